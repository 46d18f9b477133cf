"""Planning several moves that are worth something only together: each counts the ones planned before it.

`Room` counts what was ordered; a plan that turns out to have no end must not have ordered anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Final

from midstream.control.policies.freeness_math import freeness_of
from midstream.control.policies.room import Room, blocks_needed
from midstream.control.state import InstanceView, RequestView

COMPARED_MAX: Final = 8
"""Targets with room that are compared for one request, taken in order of their free blocks."""

Candidates = tuple[tuple[str, float], ...]
"""(instance, freeness with the request there), best first."""

Row = tuple[int, InstanceView]
"""Blocks that are free for moved requests on an instance."""


class Plan(ABC):
    """One plan of several moves. Every target keeps a freeness of at least `keep`.

    Rows are sorted once: all that are asked for more blocks than an instance had then need not look further.
    """

    def __init__(self, room: Room, rows: Iterable[Row], keep: float) -> None:
        self._room = room
        self._rows = sorted(rows, key=lambda row: (-row[0], row[1].owner))
        self._keep = keep
        self._blocks: dict[str, int] = {}
        self._requests: dict[str, int] = {}

    @abstractmethod
    def _freeness(self, target: InstanceView, free: int, blocks: int, requests: int) -> float:
        """Freeness of the target, of whose `free` blocks so many are taken by so many requests of this plan."""

    def place(self, view: RequestView, source: InstanceView) -> Candidates:
        """Where the request may go from `source`; the first is where the plan puts it. Empty if nowhere."""
        found: list[tuple[float, str, int]] = []
        for free, target in self._rows:
            blocks = blocks_needed(view, target.fingerprint.block_tokens)
            if free < blocks or len(found) == COMPARED_MAX:
                break
            freeness = self._freeness_with(view, source, target, free, blocks)
            if freeness is not None:
                found.append((-freeness, target.owner.instance, blocks))
        found.sort()
        if found:
            _, name, blocks = found[0]
            self._blocks[name] = self._blocks.get(name, 0) + blocks
            self._requests[name] = self._requests.get(name, 0) + 1
        return tuple((name, -score) for score, name, _ in found)

    def _freeness_with(
        self, view: RequestView, source: InstanceView, target: InstanceView, free: int, blocks: int
    ) -> float | None:
        """Freeness of the target with this and all planned before, `None` if it may not or cannot take it."""
        room, name = self._room, target.owner.instance
        taken, requests = self._blocks.get(name, 0) + blocks, self._requests.get(name, 0) + 1
        is_astray = target.role == "prefill" and not view.is_waiting
        if is_astray or taken > free or requests > room.slots_left(target):
            return None
        freeness = self._freeness(target, free, taken, requests)
        if freeness < self._keep or not room.may_host(view, target) or not room.may_pair(source, target):
            return None
        return freeness


class Packing(Plan):
    """A plan for the requests of an instance that is to be emptied: they go where nobody waits."""

    def __init__(self, room: Room, views: Iterable[InstanceView], keep: float) -> None:
        found = ((room.blocks_left(view), view) for view in views if _may_take(room, view))
        super().__init__(room, [row for row in found if row[0] > 0], keep)

    def _freeness(self, target: InstanceView, free: int, blocks: int, requests: int) -> float:
        return freeness_of(self._room.blocks_after(target) - blocks, self._room.batch_after(target) + requests)


def _may_take(room: Room, view: InstanceView) -> bool:
    """A queue would only grow; what waits there has come before."""
    is_open = room.is_up(view) and not view.is_draining and not room.is_at_limit(view.owner.instance)
    return is_open and view.load.waiting == 0
