"""Makes room for the head of the line: free blocks that are enough only in the sum become enough in one place.

Llumnix, OSDI'24, section 4: a waiting request has virtual usage, the blocks it needs, so its instance counts as over
full although blocks are free elsewhere. In this order, for the longest queues first:

1. A waiting request goes to an instance without a queue that has room for it. It has no KV yet, so nothing is copied.
2. If the head fits nowhere, running requests leave its instance until it fits there: the smallest one that is enough
   alone, else the largest first, none of the high class. All of them have a place, or none is moved; together they
   copy at most `copy_max` blocks for each block that the head needs, and every target keeps a freeness of `keep`, or
   it would soon preempt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from midstream.control.policies.base import Blocks, MovePolicy, Proposal, Rng
from midstream.control.policies.leavers import line, running
from midstream.control.policies.packing import Candidates, Packing, Targets
from midstream.control.policies.room import Room, blocks_needed
from midstream.control.state import InstanceView, RequestView, State

SOURCES_MAX: Final = 32
"""Instances with a queue that one tick weighs, the longest queue first."""

RUNNING_MAX: Final = 64
"""Running requests of one instance that are weighed."""

Plan = list[tuple[RequestView, Candidates]]


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a place in line is worth."""

    copy_max: Blocks = 4.0
    """Blocks that may be copied for each block that the head of the line needs."""
    keep: Blocks = 10.0
    """Freeness, in blocks for each running request, that every target keeps: what `balance` takes for nearly full."""


def propose(state: State, room: Room, now_ms: int, params: Params, rng: Rng) -> Iterator[Proposal]:
    """Each stuck line in turn."""
    stuck = [view for view in state.instances.values() if _is_stuck(room, view)]
    if not stuck:
        return
    targets = Targets(room, state.instances.values())
    stuck.sort(key=lambda view: (-view.load.waiting, view.owner))
    for source in stuck[:SOURCES_MAX]:
        if room.moves_left <= 0 or not targets.rows:
            return
        yield from _serve(state, room, source, targets, params)


def _is_stuck(room: Room, view: InstanceView) -> bool:
    """Does the head of the line find too few blocks, or no slot, even once all open moves have ended."""
    if not room.waiting_after(view) or not room.is_up(view) or view.is_draining:
        return False
    return room.blocks_free_after(view) < 0 or room.slots_after(view) < 1


def _serve(state: State, room: Room, source: InstanceView, targets: Targets, params: Params) -> Iterator[Proposal]:
    for place, view in enumerate(line(state, room, source)):
        if not _is_stuck(room, source) or _is_done(room, source):
            return
        if not room.may_leave(view):
            continue
        places = Packing(room, targets, source, params.keep).place(view)
        if places:
            yield _proposal(view, source, places, f"{_lack(room, source)}; {view.request}, which waits, has room there")
        elif place == 0 and room.blocks_free_after(source) < 0:
            yield from _make_room(state, room, source, targets, params)


def _is_done(room: Room, source: InstanceView) -> bool:
    return room.moves_left <= 0 or room.is_at_limit(source.owner.instance)


def _make_room(state: State, room: Room, source: InstanceView, targets: Targets, params: Params) -> Iterator[Proposal]:
    plan = _plan(state, room, source, targets, params)
    lack = _lack(room, source)
    for index, (view, places) in enumerate(plan, 1):
        reason = f"{lack}; move {index} of {len(plan)} that make room for it, {view.blocks} blocks"
        yield _proposal(view, source, places, reason)


def _plan(state: State, room: Room, source: InstanceView, targets: Targets, params: Params) -> Plan:
    """The moves that let the head of the line in, or none if they cannot be found or cost too much."""
    others = [view for view in running(state, source) if not view.is_high][:RUNNING_MAX]
    left = sorted((view.blocks, view.request) for view in others if room.may_leave(view))
    packing = Packing(room, targets, source, params.keep)
    lacking, copied, plan = -room.blocks_free_after(source), 0, Plan()
    moves_max = min(room.moves_left, room.moves_free(source.owner.instance))
    while lacking > 0:
        found = _next(state, packing, left, lacking) if len(plan) < moves_max else None
        if found is None:
            return []
        plan.append(found)
        copied += found[0].blocks
        lacking -= found[0].blocks
    return plan if copied <= params.copy_max * source.load.blocks_head else []


def _next(
    state: State, packing: Packing, left: list[tuple[int, str]], lacking: int
) -> tuple[RequestView, Candidates] | None:
    """The smallest request that is enough alone, else the largest; of those that have a place. Taken out of `left`."""
    enough = [row for row in left if row[0] >= lacking]
    short = [row for row in reversed(left) if row[0] < lacking]
    for row in (*enough, *short):
        places = packing.place(state.requests[row[1]])
        if places:
            left.remove(row)
            return state.requests[row[1]], places
    return None


def _lack(room: Room, source: InstanceView) -> str:
    lacking = -room.blocks_free_after(source)
    lacks = f"lacks {lacking} of {source.load.blocks_head} blocks" if lacking > 0 else "finds no slot"
    return f"the head of {source.load.waiting} in line on {source.owner.instance} {lacks}"


def _proposal(view: RequestView, source: InstanceView, places: Candidates, reason: str) -> Proposal:
    blocks = blocks_needed(view, source.fingerprint.block_tokens)
    return Proposal(request=view.request, target=places[0][0], candidates=places, blocks_needed=blocks, reason=reason)


POLICY = MovePolicy(name="defragment", version=1, params_type=Params, propose=propose)
