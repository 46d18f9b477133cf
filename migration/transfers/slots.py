"""Where blocks are put on their way, if they cannot go straight: a few slots, taken in turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from midstream.migration.transfers.frame_format import FRAME_BYTES_MAX

SLOTS = 8
"""Frames of one process that are on their way through its slots."""


M = TypeVar("M")


class Slot(Generic[M]):
    """Room for one frame: `FRAME_BYTES_MAX` bytes from `start` on."""

    def __init__(self, memory: M, start: int) -> None:
        self.memory = memory
        self.start = start


class Slots(Generic[M]):
    """A bounded pool of slots; `make` gives memory for all of them when the first is asked for.

    Whoever waits in `take` must hold no slot that he alone can give back: then waiting ends, whoever sends to whom.
    """

    def __init__(self, make: Callable[[int], M], count: int = SLOTS) -> None:
        self._make = make
        self._count = count
        self._slots: deque[Slot[M]] | None = None
        self._waiting: deque[asyncio.Future[Slot[M]]] = deque()
        self.taken = 0

    def take_now(self) -> Slot[M] | None:
        """A free slot, if nobody waits for it."""
        if self._slots is None:
            memory = self._make(self._count * FRAME_BYTES_MAX)
            self._slots = deque(Slot(memory, number * FRAME_BYTES_MAX) for number in range(self._count))
        if not self._slots:
            return None
        self.taken += 1
        return self._slots.popleft()

    async def take(self) -> Slot[M]:
        """A free slot, in the order of asking."""
        if (slot := self.take_now()) is not None:
            return slot
        turn: asyncio.Future[Slot[M]] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(turn.result())
            raise

    def give_back(self, slot: Slot[M]) -> None:
        """The slot may be overwritten."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(slot)
                return
        assert self._slots is not None
        self.taken -= 1
        self._slots.append(slot)
