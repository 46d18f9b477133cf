"""The source's side of an shm transfer: say where blocks lie in memory that the target has mapped."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor
from itertools import takewhile

import numpy as np

from midstream.migration.transfers import frame_format as wire
from midstream.migration.transfers.base import Channel
from midstream.migration.transfers.budget import Budget
from midstream.migration.transfers.frames import Frame, FrameChannel, Home
from midstream.migration.transfers.pieces import address_of, checksum, copy_pieces
from midstream.migration.transfers.rpc_socket import Stream
from midstream.migration.transfers.shm_memory import Region, Regions
from midstream.migration.transfers.slots import Slot, Slots
from midstream.migration.transfers.threads import in_thread


class ShmChannel(FrameChannel):
    """A channel to one reservation. Blocks that lie in no region of ours go through slots of `staging`."""

    frame_bytes_max = wire.LENT_BYTES_MAX

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

    async def introduce(self) -> ShmChannel:
        """Lend the target our regions, which the first send then need not do."""
        for region in self._regions:
            await self._number_of(region)
        return self

    def _home(self, views: list[memoryview]) -> Home:
        addresses, length = np.array(list(map(address_of, views)), np.int64), len(views[0])
        start = int(addresses.min())
        found = self._regions.find(start, int(addresses.max()) - start + length)
        if found is not None:
            return Home(len(views), found[0], addresses - found[0].address)
        homes = [self._regions.find(address, length) for address in addresses.tolist()]
        first = homes[0][0] if homes[0] else None
        count = sum(1 for _ in takewhile(lambda home: (home[0] if home else None) is first, homes))
        return Home(count) if first is None else Home(count, first, addresses[:count] - first.address)

    async def _send_frame(self, frame: Frame, is_checked: bool) -> Callable[[], None]:
        slot = None if isinstance(frame.home.memory, Region) else await self._staged(frame)
        try:
            await self._announce(frame, slot, is_checked)
        except BaseException:
            self._give_back(slot)
            raise
        return lambda: self._give_back(slot)

    async def _staged(self, frame: Frame) -> Slot[Region]:
        slot = await self._slot(self._staging)
        try:
            await in_thread(self._executor, lambda: _gather(slot, frame.views))
        except BaseException:
            self._staging.give_back(slot)
            raise
        return slot

    def _give_back(self, slot: Slot[Region] | None) -> None:
        if slot is not None:
            self._staging.give_back(slot)

    async def _announce(self, frame: Frame, slot: Slot[Region] | None, is_checked: bool) -> None:
        pieces, length = len(frame.views), len(frame.views[0])
        indexes = np.array(frame.blocks, "<u4").tobytes()
        crc = b""
        if is_checked:
            crc = wire.CHECKSUM.pack(await in_thread(self._executor, lambda: checksum(frame.views, indexes)))
        region, offsets = frame.home.memory, frame.home.offsets
        if slot is not None:
            region, offsets = slot.memory, np.arange(slot.start, slot.start + pieces * length, length)
        assert isinstance(region, Region) and offsets is not None
        header = wire.Header(
            op=wire.OP_BLOCKS,
            flags=wire.FLAG_CHECKSUM if is_checked else 0,
            region=await self._number_of(region),
            pieces=pieces,
            length=length,
            whole=frame.whole,
            skip=frame.skip,
        )
        table = indexes + offsets.astype("<u8").tobytes()
        await self._stream.write([memoryview(wire.pack_header(header) + table + crc)])

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
