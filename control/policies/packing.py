"""Planning several moves that are worth something only together: each counts the ones planned before it.

`Room` counts what was ordered; a plan that turns out to have no end must not have ordered anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from midstream.control.policies.freeness_math import freeness_of
from midstream.control.policies.room import Room, blocks_needed
from midstream.control.state import InstanceView, RequestView

COMPARED_MAX: Final = 8
"""Targets with room that are compared for one request, taken in order of their free blocks."""

Candidates = tuple[tuple[str, float], ...]
"""(instance, freeness with the request there), best first."""


class Targets:
    """Instances that can take moved requests in this tick, those with most unclaimed blocks first.

    Sorted once: all that are asked for more blocks than an instance had then need not look further.
    """

    def __init__(self, room: Room, views: Iterable[InstanceView]) -> None:
        found = ((room.blocks_left(view), view) for view in views if _may_take(room, view))
        self.rows = sorted(((left, view) for left, view in found if left > 0), key=lambda row: (-row[0], row[1].owner))


def _may_take(room: Room, view: InstanceView) -> bool:
    """A queue would only grow; what waits there has come before."""
    is_open = room.is_up(view) and not view.is_draining and not room.is_at_limit(view.owner.instance)
    return is_open and view.load.waiting == 0


class Packing:
    """One plan for requests of `source`. Every target keeps a freeness of at least `keep`."""

    def __init__(self, room: Room, targets: Targets, source: InstanceView, keep: float) -> None:
        self._room = room
        self._targets = targets
        self._source = source
        self._keep = keep
        self._blocks: dict[str, int] = {}
        self._requests: dict[str, int] = {}

    def place(self, view: RequestView) -> Candidates:
        """Where the request may go; the first is where the plan puts it. Empty if nowhere."""
        found: list[tuple[float, str, int]] = []
        for left, target in self._targets.rows:
            blocks = blocks_needed(view, target.fingerprint.block_tokens)
            if left < blocks or len(found) == COMPARED_MAX:
                break
            freeness = self._freeness_with(view, target, blocks)
            if freeness is not None:
                found.append((-freeness, target.owner.instance, blocks))
        found.sort()
        if found:
            _, name, blocks = found[0]
            self._blocks[name] = self._blocks.get(name, 0) + blocks
            self._requests[name] = self._requests.get(name, 0) + 1
        return tuple((name, -score) for score, name, _ in found)

    def _freeness_with(self, view: RequestView, target: InstanceView, blocks: int) -> float | None:
        """Freeness of the target with this and all planned before, `None` if it may not or cannot take it."""
        room, name = self._room, target.owner.instance
        planned, requests = self._blocks.get(name, 0), self._requests.get(name, 0)
        fits = room.blocks_left(target) - planned >= blocks and room.slots_left(target) - requests >= 1
        is_astray = target.role == "prefill" and not view.is_waiting
        if is_astray or not fits or not room.may_host(view, target) or not room.may_pair(self._source, target):
            return None
        batch = room.batch_after(target) + requests + 1
        freeness = freeness_of(room.blocks_after(target) - planned - blocks, batch)
        return freeness if freeness >= self._keep else None
