"""Makes room for those who wait: free blocks that are enough only in the sum become enough in one place.

Llumnix, OSDI'24, section 4: a waiting request has virtual usage, the blocks it needs, so its instance counts as over
full although blocks are free elsewhere. Lines that are stuck are served as one line, in the order in which an engine
would serve it (class, then arrival), as one engine with all the memory would:

1. A waiting request goes to an instance that has room for it. It has no KV yet, so nothing is copied.
2. If the head of a line fits nowhere, a place is made for it where the fewest blocks have to leave: its own instance,
   or another one, to which it goes at once, so that nobody else takes what comes free there. Of those who run there
   the smallest one that is enough alone leaves, else the largest first, none of the high class. All of them have a
   place, or none is moved; together they copy at most `copy_max` blocks for each block that the head needs.
3. Who waits at a gateway for room gets it in the same way, at the instance where it is claimed for it (`Room`).

Every target keeps a freeness of `keep`, or it would soon preempt. What a stuck line of later ones claims is passed
over: blocks that wait for a head that does not fit are of use to nobody else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from midstream.control.policies.base import Blocks, MovePolicy, Proposal, Rng
from midstream.control.policies.holes import LAST, Holes, is_stuck
from midstream.control.policies.leavers import line, running, turn
from midstream.control.policies.packing import Candidates
from midstream.control.policies.room import Room, blocks_needed
from midstream.control.state import InstanceView, RequestView, State

SOURCES_MAX: Final = 32
"""Instances with a stuck line that one tick weighs, the longest line first."""

WAITING_MAX: Final = 64
"""Requests in stuck lines that one tick weighs, the first to have come first."""

HEADS_MAX: Final = 8
"""Of these, heads for which a tick tries to make room: it orders no more moves than that by default."""

RUNNING_MAX: Final = 64
"""Running requests of one instance that are weighed."""

SITES_MAX: Final = 4
"""Instances besides its own at which a place for one head is looked for, those that lack least first."""


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a place in line is worth."""

    copy_max: Blocks = 2.0
    """Blocks that may be copied for each block that the head of the line needs."""
    keep: Blocks = 5.0
    """Freeness, in blocks for each running request, that every target keeps, or it would soon preempt."""


Plan = tuple[tuple[RequestView, Candidates], ...]


class Place(msgspec.Struct, frozen=True):
    """Where a head can get its place, and who leaves for it."""

    site: InstanceView
    lacking: int
    plan: Plan


def propose(state: State, room: Room, now_ms: int, params: Params, rng: Rng) -> Iterator[Proposal]:
    """All who wait in stuck lines, in their order."""
    stuck = [view for view in state.instances.values() if is_stuck(room, view)]
    if not stuck and not room.claims:
        return
    stuck.sort(key=lambda view: (-view.load.waiting, view.owner))
    lines = {view.owner.instance: line(state, room, view) for view in stuck[:SOURCES_MAX]}
    heads = {name: turn(waiting[0]) for name, waiting in lines.items() if waiting}
    waiting = sorted((view for views in lines.values() for view in views), key=turn)
    served = sorted(heads.values())[:HEADS_MAX]
    for view in waiting[:WAITING_MAX]:
        if room.moves_left <= 0:
            return
        source = state.instances[view.owner.instance]
        if is_stuck(room, source) and not room.is_moving(view):
            holes = Holes(state, room, heads, turn(view), params.keep)
            yield from _serve(state, holes, view, turn(view) in served, params)
    for name, needed in room.claims.items():
        holes = Holes(state, room, heads, LAST, params.keep)
        yield from _welcome(state, holes, state.instances[name], needed, params)


def _serve(state: State, holes: Holes, view: RequestView, is_head: bool, params: Params) -> Iterator[Proposal]:
    room, source = holes.room, state.instances[view.owner.instance]
    if room.may_leave(view) and not room.is_at_limit(source.owner.instance):
        places = holes.fill().place(view, source)
        if places:
            why = f"{_lack(room, source)}; {view.request}, which waits, has room there"
            yield _proposal(view, places, source, why)
            return
    if is_head and room.blocks_free_after(source) < 0:
        yield from _make_room(state, holes, view, source, params)


def _welcome(state: State, holes: Holes, site: InstanceView, needed: int, params: Params) -> Iterator[Proposal]:
    """Make room for who waits at a gateway, where it is claimed for it."""
    room, lacking = holes.room, -holes.room.blocks_free_after(site)
    if site.load.waiting or lacking <= 0:
        return
    plan = _plan(state, holes, site, None, lacking)
    if sum(leaver.blocks for leaver, _ in plan) > params.copy_max * needed:
        return
    lack = f"who waits at the gateway lacks {lacking} of {needed} blocks on {site.owner.instance}"
    yield from _leave(room, site, plan, lack)


def _make_room(
    state: State, holes: Holes, view: RequestView, source: InstanceView, params: Params
) -> Iterator[Proposal]:
    place = _cheapest(state, holes, view, source, params)
    if place is None:
        return
    room, lack, site = holes.room, _lack(holes.room, source), place.site
    if site is not source:
        gap = f"{place.lacking} blocks have to leave {site.owner.instance} for it"
        score = ((site.owner.instance, float(-place.lacking)),)
        yield _proposal(view, score, source, f"{lack}; {gap}")
    yield from _leave(room, site, place.plan, lack)


def _leave(room: Room, site: InstanceView, plan: Plan, lack: str) -> Iterator[Proposal]:
    """As many of a plan as may move at once: the others follow in later ticks."""
    moves_max = min(room.moves_left, room.moves_free(site.owner.instance))
    for index, (leaver, places) in enumerate(plan[:moves_max], 1):
        reason = f"{lack}; move {index} of {len(plan)} that make room for it, {leaver.blocks} blocks"
        yield _proposal(leaver, places, site, reason)


def _cheapest(state: State, holes: Holes, view: RequestView, source: InstanceView, params: Params) -> Place | None:
    """Where the fewest blocks have to leave, of those where all of them have a place."""
    sites = [(-holes.room.blocks_free_after(source), False, source)]
    if holes.room.may_leave(view) and not holes.room.is_at_limit(source.owner.instance):
        sites += [(lacking, True, site) for lacking, site in holes.sites(view, source)[:SITES_MAX]]
    for lacking, _, site in sorted(sites, key=lambda row: (row[0], row[1], row[2].owner)):
        plan = _plan(state, holes, site, source, lacking)
        if plan and sum(leaver.blocks for leaver, _ in plan) <= params.copy_max * holes.needed(view, site):
            return Place(site, lacking, plan)
    return None


def _plan(state: State, holes: Holes, site: InstanceView, source: InstanceView | None, lacking: int) -> Plan:
    """Who leaves `site`, and where to, until so many blocks have come free; nothing if not all have a place."""
    room = holes.room
    others = [view for view in running(state, site) if not view.is_high][:RUNNING_MAX]
    left = sorted((view.blocks, view.request) for view in others if room.may_leave(view))
    filling = holes.fill(without=site, leaving=source)
    if filling.blocks < lacking:
        return ()
    plan: list[tuple[RequestView, Candidates]] = []
    while lacking > 0:
        enough = [row for row in left if row[0] >= lacking]
        short = [row for row in reversed(left) if row[0] < lacking]
        for row in (*enough, *short):
            places = filling.place(state.requests[row[1]], site)
            if places:
                left.remove(row)
                plan.append((state.requests[row[1]], places))
                lacking -= row[0]
                break
        else:
            return ()
    return tuple(plan)


def _lack(room: Room, source: InstanceView) -> str:
    lacking = -room.blocks_free_after(source)
    lacks = f"lacks {lacking} of {source.load.blocks_head} blocks" if lacking > 0 else "finds no slot"
    return f"the head of {source.load.waiting} in line on {source.owner.instance} {lacks}"


def _proposal(view: RequestView, places: Candidates, source: InstanceView, reason: str) -> Proposal:
    blocks = blocks_needed(view, source.fingerprint.block_tokens)
    return Proposal(
        request=view.request, target=places[0][0], candidates=places, blocks_needed=blocks, reason=reason,
        is_first=True,
    )  # fmt: skip


POLICY = MovePolicy(name="defragment", version=2, params_type=Params, propose=propose)
