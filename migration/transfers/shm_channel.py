"""The source's side of an shm transfer: say where blocks lie in memory that the target has mapped."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from midstream.control.errors import TransferFailed
from midstream.migration.transfers import rpc_format
from midstream.migration.transfers import shm_format as wire
from midstream.migration.transfers.base import Channel, CopyReport
from midstream.migration.transfers.rpc_socket import Stream
from midstream.migration.transfers.shm_copy import checksum
from midstream.migration.transfers.shm_memory import Region, Regions, address_of
from midstream.migration.transfers.shm_staging import Slot, Staging
from midstream.migration.transfers.threads import in_thread

Offsets = npt.NDArray[np.uint64]


class Piece(NamedTuple):
    """Part of a block, and where it lies; `region` is None for memory that cannot be mapped."""

    block: int
    view: memoryview
    whole: int
    skip: int
    region: Region | None
    offset: int


class ShmChannel:
    """An authenticated connection for the blocks of one reservation. One `send` at a time; others wait their turn."""

    def __init__(
        self, stream: Stream, regions: Regions, staging: Staging, executor: Executor, left: Callable[[Channel], None]
    ) -> None:
        self._stream = stream
        self._regions = regions
        self._staging = staging
        self._executor = executor
        self._left = left
        self._lock = asyncio.Lock()
        self._known: dict[Region, int] = {}
        self._unanswered: deque[tuple[int, Slot | None]] = deque()
        self._is_closed = False

    async def send(self, blocks: Sequence[tuple[int, memoryview]], *, checksum: bool = False) -> CopyReport:
        """Have blocks copied and return when the target has stored all of them. See `Channel.send`.

        However it ends, the target reads none of the blocks any more, unless it hung for the whole stall time.
        """
        async with self._lock:
            if self._is_closed:
                raise TransferFailed("the channel is closed")
            started_s = asyncio.get_running_loop().time()
            try:
                copied_bytes = await self._copy(blocks, checksum)
            except BaseException as error:
                early = self._stream.read_now(wire.REPLY.size)
                await self._part()
                if isinstance(error, OSError):
                    raise TransferFailed(_why(early) or str(error)) from error
                raise
            duration_ms = (asyncio.get_running_loop().time() - started_s) * 1000
            return CopyReport(blocks=len(blocks), copied_bytes=copied_bytes, duration_ms=duration_ms)

    async def _copy(self, blocks: Sequence[tuple[int, memoryview]], is_checked: bool) -> int:
        copied_bytes = 0
        for frame in frames(blocks, self._regions):
            if len(self._unanswered) >= wire.FRAMES_AHEAD_MAX:
                await self._answer()
            await self._send_frame(frame, is_checked)
            copied_bytes += len(frame) * len(frame[0].view)
            frame.clear()
        while self._unanswered:
            await self._answer()
        return copied_bytes

    async def _send_frame(self, frame: list[Piece], is_checked: bool) -> None:
        slot = None if frame[0].region is not None else await self._staged(frame)
        region, offsets = _where(frame) if slot is None else (slot.region, slot.offsets(len(frame), len(frame[0].view)))
        self._unanswered.append((len(frame), slot))
        table = np.array([piece.block for piece in frame], "<u4").tobytes()
        views = [piece.view for piece in frame]
        crc = b""
        if is_checked:
            crc = wire.CHECKSUM.pack(await in_thread(self._executor, lambda: checksum(views, table)))
        header = wire.Header(
            op=wire.OP_BLOCKS,
            flags=wire.FLAG_CHECKSUM if is_checked else 0,
            region=await self._number_of(region),
            pieces=len(frame),
            length=len(views[0]),
            whole=frame[0].whole,
            skip=frame[0].skip,
        )
        views.clear()
        await self._stream.write([memoryview(wire.pack_header(header) + table + offsets.tobytes() + crc)])

    async def _staged(self, frame: list[Piece]) -> Slot:
        slot = await self._staging.take()
        try:
            await in_thread(self._executor, lambda: slot.gather([piece.view for piece in frame]))
        except BaseException:
            self._staging.give_back(slot)
            raise
        return slot

    async def _number_of(self, region: Region) -> int:
        """The region's number on this connection; the first time, the target gets it."""
        number = self._known.get(region)
        if number is not None:
            return number
        number = self._known[region] = len(self._known)
        header = wire.Header(wire.OP_REGION, 0, number, 0, 0, 0, 0)
        await self._stream.write([memoryview(wire.pack_header(header))])
        lent = region.lend()
        try:
            await self._stream.write_descriptor(lent)
        finally:
            os.close(lent)
        return number

    async def _answer(self) -> None:
        code, stored = wire.REPLY.unpack(await self._stream.read(wire.REPLY.size))
        count, slot = self._unanswered[0]
        if (code, stored) != (rpc_format.STORED, count):
            raise TransferFailed(f"refused: {rpc_format.reason(code)}")
        self._unanswered.popleft()
        if slot is not None:
            self._staging.give_back(slot)

    async def _part(self) -> None:
        """Close, and wait until the target has let go of our memory."""
        self._stream.say_goodbye()
        try:
            await self._stream.drain()
        except OSError:
            pass  # it is gone, or hangs
        finally:
            self._end()

    async def close(self) -> None:
        """Give up the connection; idempotent. A send in progress fails first."""
        if self._lock.locked():
            self._stream.say_goodbye()
            async with self._lock:
                pass
        self._end()

    def _end(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._stream.close()
            for _, slot in self._unanswered:
                if slot is not None:
                    self._staging.give_back(slot)
            self._unanswered.clear()
            self._known.clear()
            self._left(self)


def frames(blocks: Sequence[tuple[int, memoryview]], regions: Regions) -> Iterator[list[Piece]]:
    """Cut blocks, in order, into frames of equally long pieces of one region, within the bounds of a frame."""
    frame: list[Piece] = []
    for piece in _pieces(blocks, regions):
        if frame and not _fits(frame, piece):
            yield frame
            frame = []
        frame.append(piece)
    if frame:
        yield frame


def _pieces(blocks: Sequence[tuple[int, memoryview]], regions: Regions) -> Iterator[Piece]:
    for index, block in blocks:
        view = block if block.format == "B" and block.ndim == 1 else block.cast("B")
        whole = len(view)
        found = regions.find(address_of(view), whole)
        region, offset = found if found is not None else (None, 0)
        if whole <= wire.FRAME_BYTES_MAX:
            yield Piece(index, view, whole, 0, region, offset)
            continue
        for skip in range(0, whole, wire.FRAME_BYTES_MAX):
            yield Piece(index, view[skip : skip + wire.FRAME_BYTES_MAX], whole, skip, region, offset + skip)


def _fits(frame: list[Piece], piece: Piece) -> bool:
    first = frame[0]
    return (
        (piece.whole, piece.skip, piece.region) == (first.whole, 0, first.region)
        and first.whole <= wire.FRAME_BYTES_MAX
        and len(frame) < wire.FRAME_PIECES_MAX
        and (len(frame) + 1) * first.whole <= wire.FRAME_BYTES_MAX
    )


def _where(frame: list[Piece]) -> tuple[Region, Offsets]:
    region = frame[0].region
    assert region is not None
    return region, np.array([piece.offset for piece in frame], "<u8")


def _why(reply: bytes) -> str | None:
    if len(reply) != wire.REPLY.size:
        return None
    code, _ = wire.REPLY.unpack(reply)
    return None if code == rpc_format.STORED else f"refused: {rpc_format.reason(code)}"
