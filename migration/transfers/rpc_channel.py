"""The source's side of an rpc transfer: send frames of blocks, wait until they are stored."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator, Sequence

from midstream.control.errors import TransferFailed
from midstream.migration.transfers import rpc_format as wire
from midstream.migration.transfers.base import Channel, CopyReport
from midstream.migration.transfers.budget import Budget
from midstream.migration.transfers.rpc_socket import Stream


class RpcChannel:
    """An authenticated connection for the blocks of one reservation. One `send` at a time; others wait their turn."""

    def __init__(self, stream: Stream, handle: bytes, budget: Budget, left: Callable[[Channel], None]) -> None:
        self._stream = stream
        self._handle = handle
        self._lock = asyncio.Lock()
        self._is_closed = False
        self._budget = budget
        self._left = left

    async def send(self, blocks: Sequence[tuple[int, memoryview]], *, checksum: bool = False) -> CopyReport:
        """Copy blocks and return when the target has stored all of them. See `Channel.send`."""
        async with self._lock:
            if self._is_closed:
                raise TransferFailed("the channel is closed")
            started_s = asyncio.get_running_loop().time()
            try:
                copied_bytes = await self._copy(blocks, checksum)
            except BaseException as error:
                early = self._stream.read_now(wire.REPLY.size)
                self._end(self._stream.abort)
                if isinstance(error, OSError):
                    raise TransferFailed(wire.refusal(early) or str(error)) from error
                raise
            duration_ms = (asyncio.get_running_loop().time() - started_s) * 1000
            return CopyReport(blocks=len(blocks), copied_bytes=copied_bytes, duration_ms=duration_ms)

    async def _copy(self, blocks: Sequence[tuple[int, memoryview]], checksum: bool) -> int:
        if not blocks:
            return 0
        copied_bytes = 0
        blocks_left = len(blocks)
        for indexes, views in group(blocks, self._budget.frame_bytes_max(wire.FRAME_BYTES_MAX)):
            if early := self._stream.read_now(wire.REPLY.size):
                raise TransferFailed(wire.refusal(early) or "the target answered too early")
            await self._budget.take(len(indexes) * len(views[0]))
            blocks_left -= len(indexes)
            end = b"" if blocks_left else wire.pack_header(wire.OP_END, self._handle, len(blocks), 0)
            await self._send_frame(indexes, views, checksum, end)
            copied_bytes += len(indexes) * len(views[0])
        code, stored = wire.REPLY.unpack(await self._stream.read(wire.REPLY.size))
        if (code, stored) != (wire.STORED, len(blocks)):
            raise TransferFailed(f"refused: {wire.reason(code)}")
        return copied_bytes

    async def _send_frame(self, indexes: list[int], views: list[memoryview], checksum: bool, end: bytes) -> None:
        """`end` follows at once: it must not wait until a thread of ours has come back from sending the blocks."""
        flags = wire.FLAG_CHECKSUM if checksum else 0
        header = wire.pack_header(wire.OP_BLOCKS, self._handle, len(indexes), len(views[0]), flags=flags)
        table = struct.pack(f"<{len(indexes)}I", *indexes)
        crc = await wire.checksum(table, views) if checksum else b""
        trailer = [memoryview(crc + end)] if crc or end else []
        await self._stream.write([memoryview(header + table)])  # the target gets ready while our thread is woken
        await self._stream.write([*views, *trailer])

    async def close(self) -> None:
        """Give up the connection; idempotent."""
        self._end(self._stream.close)

    def _end(self, end: Callable[[], None]) -> None:
        if not self._is_closed:
            self._is_closed = True
            end()
            self._left(self)


def group(blocks: Sequence[tuple[int, memoryview]], bytes_max: int) -> Iterator[tuple[list[int], list[memoryview]]]:
    """Cut blocks, in order, into frames of equally long ones; a block that is longer has a frame of its own."""
    indexes: list[int] = []
    views: list[memoryview] = []
    for index, block in blocks:
        view = block.cast("B") if block.format != "B" or block.ndim != 1 else block
        if views and not _fits(views, view, bytes_max):
            yield indexes, views
            indexes, views = [], []
        indexes.append(index)
        views.append(view)
    if views:
        yield indexes, views


def _fits(views: list[memoryview], view: memoryview, bytes_max: int) -> bool:
    is_small = (len(views) + 1) * len(view) <= bytes_max
    return len(view) == len(views[0]) and len(views) < wire.FRAME_BLOCKS_MAX and is_small
