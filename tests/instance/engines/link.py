"""A transfer for tests that copies in memory at once, and can be told to wait, to fail or to flip a byte."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

from midstream.control.errors import TransferFailed
from midstream.migration.transfers.base import CopyReport, Sink


class Link:
    """One engine's end. Addresses are names in a shared table of ends."""

    name = "link"

    def __init__(self, address: str, ends: dict[str, Self]) -> None:
        self.address = address
        self.ends = ends
        self.sinks: dict[str, Sink] = {}
        self.open_channels = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.sending = asyncio.Event()
        self.flip: tuple[int, int] | None = None
        """(block index, byte) to alter at the receiver of the next send."""
        self.swap = False
        self.is_broken = False

    async def start(self) -> str:
        self.ends[self.address] = self
        return self.address

    def expect(self, handle: str, sink: Sink) -> None:
        self.sinks[handle] = sink

    async def forget(self, handle: str) -> None:
        self.sinks.pop(handle, None)
        await asyncio.sleep(0)

    async def open(self, address: str, handle: str) -> LinkChannel:
        if address not in self.ends or handle not in self.ends[address].sinks:
            raise TransferFailed("no such reservation")
        self.open_channels += 1
        return LinkChannel(self, self.ends[address], handle)

    async def stop(self) -> None:
        self.ends.pop(self.address, None)


class LinkChannel:
    """Copies block by block, letting others run in between."""

    def __init__(self, source: Link, target: Link, handle: str) -> None:
        self.source, self.target, self.handle = source, target, handle
        self.is_open = True

    async def send(self, blocks: Sequence[tuple[int, memoryview]], *, checksum: bool = False) -> CopyReport:
        copied = 0
        for index, block in blocks:
            self.source.sending.set()
            await self.source.gate.wait()
            sink = self.target.sinks.get(self.handle)
            if sink is None or self.source.is_broken:
                raise TransferFailed("refused")
            try:
                sink(index)[:] = block
            except IndexError as error:
                raise TransferFailed(str(error)) from error
            copied += block.nbytes
            await asyncio.sleep(0)
        self._spoil([index for index, _ in blocks])
        return CopyReport(blocks=len(blocks), copied_bytes=copied, duration_ms=0.0)

    async def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.source.open_channels -= 1

    def _spoil(self, indices: list[int]) -> None:
        sink = self.target.sinks[self.handle]
        if self.source.flip is not None and self.source.flip[0] in indices:
            index, byte = self.source.flip
            sink(index)[byte] ^= 1
        if self.source.swap and len(indices) > 1:
            first, second = bytes(sink(indices[0])), bytes(sink(indices[1]))
            sink(indices[0])[:], sink(indices[1])[:] = second, first
