"""The transfer port: KV blocks from one engine's memory into another's.

A *handle* is a per-move secret that authorises writes into exactly the blocks reserved for that move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

Bytes: TypeAlias = Any
"""The memory of one block: a `memoryview`, or a `DeviceRange` where a backend's `is_on_device` says so. Transfers
rely on what both have: a length, slices, and `cast("B")`."""
Sink = Callable[[int], Bytes]
"""Writable memory of the moved request's `index`-th block at the target; IndexError outside the reservation."""


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process's transfers listen, and what they prove themselves with."""

    bind_host: str
    port: int = 0
    """0: any that is free."""
    advertise_host: str | None = None
    """Host that peers use; needed when `bind_host` is a wildcard."""
    secret: bytes
    bytes_per_s: float | None = None
    """What may leave through all transfers together. None: as much as can."""
    stall_s: float = 1.0
    """A copy without progress for so long has failed. In it a link must carry what kernels buffer, about 4 MB."""
    kv_device: str | None = None
    """The device whose memory holds the KV, as torch names it (`cuda:0`). None: it is in the host's."""


class CopyReport(msgspec.Struct, frozen=True):
    """What one send did."""

    blocks: int
    copied_bytes: int
    duration_ms: float


class Channel(Protocol):
    """An open way from one source to one reservation."""

    async def send(self, blocks: Sequence[tuple[int, Bytes]], *, checksum: bool = False) -> CopyReport:
        """Copy (index, bytes) pairs and return when the target has stored and acknowledged all of them.

        Raises `TransferFailed` when the peer died, refused the handle, or a checksum did not match.
        May be cancelled at any byte; afterwards the channel is closed.
        """
        ...

    async def close(self) -> None:
        """Give up the connection; idempotent."""
        ...


class Transfer(Protocol):
    """One backend in one process, both directions."""

    name: str

    @property
    def offer(self) -> str:
        """What peers are told: the name, and `@place` behind it if only peers of that place can use it, or
        `!reason` if it cannot work here at all."""
        ...

    async def start(self) -> str:
        """Listen; return the address peers use (bound, not configured)."""
        ...

    def expect(self, handle: str, sink: Sink) -> None:
        """Let the holder of `handle` write through `sink` from now on."""
        ...

    async def forget(self, handle: str) -> None:
        """Refuse the handle from now on, and return only when no write through it is in progress. Idempotent."""
        ...

    async def open(self, address: str, handle: str) -> Channel:
        """Connect to a reservation. Raises `TransferFailed` within the connect deadline."""
        ...

    async def stop(self) -> None:
        """Close all channels and the listener."""
        ...
