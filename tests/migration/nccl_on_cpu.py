"""A device made of host memory, with a communicator made of a socket: what `nccl` runs with where there is no GPU.

As on a real one, streams work by themselves, messages have no tags, and nothing notices by itself that a peer is gone.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from midstream.migration.transfers.base import Channel, CopyReport, Sink, Where
from midstream.migration.transfers.device_range import DeviceRange
from midstream.migration.transfers.nccl import NcclTransfer
from midstream.migration.transfers.paired import TARGET
from midstream.migration.transfers.shm_memory import Region


class CpuStream:
    """`nccl.DeviceStream`: a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._asked: Future[None] | None = None

    def run(self, work: Callable[[], None]) -> None:
        self._asked = self._thread.submit(work)

    def mark(self) -> CpuMark:
        return CpuMark(self._asked, self._thread.submit(lambda: None))


class CpuMark:
    """`nccl.Mark`."""

    def __init__(self, last: Future[None] | None, reached: Future[None]) -> None:
        self._last, self._reached = last, reached

    def is_reached(self) -> bool:
        if not self._reached.done():
            return False
        if self._last is not None:
            self._last.result()
        return True


class CpuDevice:
    """`nccl.Device`."""

    version = "cpu"

    def __init__(self) -> None:
        self._listening: dict[bytes, socket.socket] = {}

    def memory(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def stream(self) -> CpuStream:
        return CpuStream()

    def new_id(self) -> bytes:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1)
        unique_id = b"%d" % listener.getsockname()[1]
        self._listening[unique_id] = listener
        return unique_id

    def communicator(self, unique_id: bytes, rank: int, deadline_s: float) -> CpuCommunicator:
        try:
            if rank != TARGET:
                return CpuCommunicator(socket.create_connection(("127.0.0.1", int(unique_id)), deadline_s))
            with self._listening.pop(unique_id) as listener:
                listener.settimeout(deadline_s)
                return CpuCommunicator(listener.accept()[0])
        except OSError as error:
            raise RuntimeError(str(error)) from error


class CpuCommunicator:
    """`nccl.Communicator`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock
        self.is_aborted = False

    def send(self, memory: torch.Tensor, stream: CpuStream) -> None:
        stream.run(lambda: self._pass(self._send, memory))

    def receive(self, memory: torch.Tensor, stream: CpuStream) -> None:
        stream.run(lambda: self._pass(self._fill, memory))

    def _pass(self, how: Callable[[memoryview], None], memory: torch.Tensor) -> None:
        if self.is_aborted:
            return  # a kernel that was aborted ends as if nothing had happened
        try:
            how(memoryview(memory.numpy()))
        except OSError:
            if not self.is_aborted:
                raise RuntimeError("the connection broke") from None

    def _send(self, view: memoryview) -> None:
        self._sock.sendall(view)

    def _fill(self, view: memoryview) -> None:
        while len(view):
            count = self._sock.recv_into(view)
            if count == 0:
                raise ConnectionError("closed")
            view = view[count:]

    def check(self) -> None:
        return

    def abort(self) -> None:
        self.is_aborted = True
        with contextlib.suppress(OSError):  # the peer was first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class NcclOnCpu(NcclTransfer):
    """An nccl endpoint whose device is the CPU."""

    def __init__(self, where: Where, regions: Sequence[Region] = ()) -> None:
        super().__init__(where, regions, opening=lambda _: CpuDevice())


class OnCpu(NcclOnCpu):
    """One for tests that have bytes: they become ranges of a device made of them."""

    def expect(self, handle: str, sink: Sink) -> None:
        super().expect(handle, lambda index: as_range(sink(index)))

    async def open(self, address: str, handle: str) -> Channel:
        return ChannelOnCpu(await super().open(address, handle))


class ChannelOnCpu:
    """Its channel."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner

    async def send(self, blocks: Sequence[tuple[int, Any]], *, checksum: bool = False) -> CopyReport:
        return await self._inner.send([(index, as_range(view)) for index, view in blocks], checksum=checksum)

    async def close(self) -> None:
        await self._inner.close()


def as_range(view: memoryview) -> DeviceRange:
    """Bytes as memory of a device, each an allocation of its own."""
    return DeviceRange(torch.frombuffer(view, dtype=torch.uint8), 0, len(view))
