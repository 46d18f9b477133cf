"""The source's side of an shm transfer: say where blocks lie in memory that the target has mapped."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np

from midstream.migration.transfers import frame_format as wire
from midstream.migration.transfers.base import Channel
from midstream.migration.transfers.budget import Budget
from midstream.migration.transfers.frames import FrameChannel, Piece
from midstream.migration.transfers.pieces import address_of, checksum, copy_pieces
from midstream.migration.transfers.rpc_socket import Stream
from midstream.migration.transfers.shm_memory import Region, Regions
from midstream.migration.transfers.slots import Slot, Slots
from midstream.migration.transfers.threads import in_thread


class ShmChannel(FrameChannel):
    """A channel to one reservation. Blocks that lie in no region of ours go through slots of `staging`."""

    def __init__(
        self,
        stream: Stream,
        budget: Budget,
        regions: Regions,
        staging: Slots[Region],
        executor: Executor,
        left: Callable[[Channel], None],
    ) -> None:
        super().__init__(stream, budget, left)
        self._regions = regions
        self._staging = staging
        self._executor = executor
        self._known: dict[Region, int] = {}

    def _home(self, view: memoryview) -> tuple[object, int]:
        found = self._regions.find(address_of(view), len(view))
        return found if found is not None else (None, 0)

    async def _send_frame(self, frame: list[Piece], is_checked: bool) -> Callable[[], None]:
        slot = None if isinstance(frame[0].home, Region) else await self._staged(frame)
        try:
            await self._announce(frame, slot, is_checked)
        except BaseException:
            self._give_back(slot)
            raise
        return lambda: self._give_back(slot)

    async def _staged(self, frame: list[Piece]) -> Slot[Region]:
        slot = await self._slot(self._staging)
        try:
            await in_thread(self._executor, lambda: _gather(slot, [piece.view for piece in frame]))
        except BaseException:
            self._staging.give_back(slot)
            raise
        return slot

    def _give_back(self, slot: Slot[Region] | None) -> None:
        if slot is not None:
            self._staging.give_back(slot)

    async def _announce(self, frame: list[Piece], slot: Slot[Region] | None, is_checked: bool) -> None:
        first, pieces = frame[0], len(frame)
        length = len(first.view)
        indexes = np.array([piece.block for piece in frame], "<u4").tobytes()
        crc = b""
        if is_checked:
            work = lambda: checksum([piece.view for piece in frame], indexes)  # noqa: E731 - runs elsewhere
            crc = wire.CHECKSUM.pack(await in_thread(self._executor, work))
        if slot is None:
            region, offsets = first.home, np.array([piece.offset for piece in frame], "<u8")
        else:
            region, offsets = slot.memory, np.arange(slot.start, slot.start + pieces * length, length).astype("<u8")
        assert isinstance(region, Region)
        header = wire.Header(
            op=wire.OP_BLOCKS,
            flags=wire.FLAG_CHECKSUM if is_checked else 0,
            region=await self._number_of(region),
            pieces=pieces,
            length=length,
            whole=first.whole,
            skip=first.skip,
        )
        await self._stream.write([memoryview(wire.pack_header(header) + indexes + offsets.tobytes() + crc)])

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

    def _ended(self) -> None:
        self._known.clear()


def _gather(slot: Slot[Region], views: list[memoryview]) -> None:
    length, start = len(views[0]), slot.memory.address + slot.start
    targets = np.arange(start, start + len(views) * length, length)
    copy_pieces(targets, np.array([address_of(view) for view in views], np.int64), length, lambda: True)
