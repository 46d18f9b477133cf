"""Where blocks are put that lie in memory which cannot be mapped: a few slots, taken in turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from midstream.migration.transfers.shm_format import FRAME_BYTES_MAX
from midstream.migration.transfers.shm_memory import Region

SLOTS = 8
"""Frames of one process that are on their way through the slots."""


class Slot:
    """Room for one frame, in a region."""

    def __init__(self, region: Region, start: int) -> None:
        self.region = region
        self._start = start

    def gather(self, views: Sequence[memoryview]) -> None:
        """Put views there, one behind the other."""
        at = self._start
        for view in views:
            self.region.view[at : at + len(view)] = view
            at += len(view)

    def offsets(self, count: int, length: int) -> npt.NDArray[np.uint64]:
        """Where `count` pieces of `length` bytes lie in the region."""
        return np.arange(count, dtype=np.uint64) * np.uint64(length) + np.uint64(self._start)


class Staging:
    """A bounded pool of slots, made when the first is asked for.

    A slot is held until the target has copied it, which waits for nothing of ours: so waiting here ends.
    """

    def __init__(self) -> None:
        self._slots: deque[Slot] | None = None
        self._waiting: deque[asyncio.Future[Slot]] = deque()
        self.taken = 0

    async def take(self) -> Slot:
        """A free slot, in the order of asking."""
        if self._slots is None:
            region = Region(SLOTS * FRAME_BYTES_MAX)
            self._slots = deque(Slot(region, number * FRAME_BYTES_MAX) for number in range(SLOTS))
        if self._slots:
            self.taken += 1
            return self._slots.popleft()
        turn: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(turn.result())
            raise

    def give_back(self, slot: Slot) -> None:
        """The slot may be overwritten."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(slot)
                return
        assert self._slots is not None
        self.taken -= 1
        self._slots.append(slot)
