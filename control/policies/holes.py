"""Where there is room for one who waits, or for those who make room for it: blocks that nobody before it claims."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Final

from midstream.control.policies.freeness_math import blocks_kept, freeness_of
from midstream.control.policies.packing import Plan, Row
from midstream.control.policies.room import Room, blocks_needed
from midstream.control.state import InstanceView, RequestView, State

LOOKED_MAX: Final = 32
"""Targets that are looked at for one request, those with the largest holes."""

Turn = tuple[int, int, str]

LAST: Final[Turn] = (1 << 62, 0, "")
"""The turn of who waits at a gateway: after all who wait at instances."""


def is_stuck(room: Room, view: InstanceView) -> bool:
    """Does the head of the line find too few blocks, or no slot, even once all open moves have ended."""
    if not room.waiting_after(view) or not room.is_up(view) or view.is_draining:
        return False
    return room.blocks_free_after(view) < 0 or room.slots_after(view) < 1


class Holes:
    """The room that one whose turn it is may count on; `heads` are the turns of the heads of all stuck lines."""

    def __init__(self, state: State, room: Room, heads: Mapping[str, Turn], mine: Turn, keep: float) -> None:
        self._state = state
        self._heads = heads
        self._turn = mine
        self._keep = keep
        self.room = room

    def needed(self, view: RequestView, site: InstanceView) -> int:
        """Blocks with which it can start there."""
        return blocks_needed(view, site.fingerprint.block_tokens)

    def hole(self, view: InstanceView) -> int | None:
        """Blocks that are free for it there, negative if promised ones are not; none if others are before it."""
        if not self.room.is_up(view) or view.is_draining:
            return None
        if not view.load.waiting:
            return self.room.blocks_left(view)
        head = self._heads.get(view.owner.instance)
        return None if head is None or head <= self._turn else self.room.blocks_open(view)

    def sites(self, view: RequestView, source: InstanceView) -> list[tuple[int, InstanceView]]:
        """Other instances at which it would be the first in line, and the blocks that have to leave; fewest first."""
        rows: list[tuple[int, InstanceView]] = []
        for site in self._state.instances.values():
            hole = self.hole(site) if site is not source else None
            if hole is None or not self.room.may_pair(source, site) or not self.room.may_host(view, site):
                continue
            lacking = self.needed(view, site) - hole
            if lacking > 0 and self.room.slots_left(site) > 0:
                rows.append((lacking, site))
        return sorted(rows, key=lambda row: (row[0], row[1].owner))

    def fill(self, without: InstanceView | None = None, leaving: InstanceView | None = None) -> Filling:
        """A plan that fills holes, but not on `without`; it may on `leaving`, which it leaves itself."""
        rows = [row for row in self._open if row[1] is not without]
        if leaving is not None and leaving is not without:
            rows.append((self._less_kept(leaving, self.room.blocks_open(leaving)), leaving))
        return Filling(self.room, rows, self._keep)

    @cached_property
    def _open(self) -> list[tuple[int, InstanceView]]:
        holes = ((self.hole(view), view) for view in self._state.instances.values())
        return [(self._less_kept(view, hole), view) for hole, view in holes if hole is not None and hole > 0]

    def _less_kept(self, view: InstanceView, hole: int) -> int:
        return hole - blocks_kept(self._state, view)


class Filling(Plan):
    """A plan that fills holes."""

    def __init__(self, room: Room, rows: list[Row], keep: float) -> None:
        usable = ((hole - keep * (room.running_after(view) + 1), (hole, view)) for hole, view in rows)
        found = [(blocks, row) for blocks, row in usable if blocks > 0]
        self.blocks = sum(blocks for blocks, _ in found)
        """No plan can move more."""
        super().__init__(room, [row for _, row in found], keep)
        del self._rows[LOOKED_MAX:]

    def _freeness(self, target: InstanceView, free: int, blocks: int, requests: int) -> float:
        return freeness_of(free - blocks, self._room.running_after(target) + requests)
