"""Empties the instance with the fewest requests, so that it can go: half of a scale-in (Llumnix, OSDI'24, 4.4.3).

Nothing moves unless everything on it has a place elsewhere at which every target keeps a freeness of `keep` (the load
after consolidation, P23), nor while an instance of the same kind is empty already. Something else must take the empty
one out, by a drain or by scaling in: a dispatcher that looks for free memory would fill it again.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from midstream.control.policies.base import Blocks, Count, MovePolicy, Proposal, Rng
from midstream.control.policies.packing import Candidates, Packing
from midstream.control.policies.room import Room, blocks_needed
from midstream.control.state import InstanceView, RequestView, State


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When an instance is not needed."""

    keep: Blocks = 60.0
    """Freeness, in blocks for each running request, that every target keeps: twice what `balance` gives to."""
    requests_max: Count = 8
    """An instance with more requests than this is not emptied."""


def propose(state: State, room: Room, now_ms: int, params: Params, rng: Rng) -> Iterator[Proposal]:
    """All of one instance's requests, or nothing."""
    ups = [view for view in state.instances.values() if room.is_up(view) and not view.is_draining]
    source = _fewest(room, ups, params)
    if source is None:
        return
    plan = _plan(state, room, source, ups, params)
    for index, (view, places) in enumerate(plan, 1):
        yield Proposal(
            request=view.request,
            target=places[0][0],
            candidates=places,
            blocks_needed=blocks_needed(view, source.fingerprint.block_tokens),
            reason=f"{source.owner.instance} has the fewest requests, and all fit elsewhere at a freeness of "
            f"{params.keep:g}: {index} of {len(plan)}",
        )


def _fewest(room: Room, ups: list[InstanceView], params: Params) -> InstanceView | None:
    """The instance to empty, unless one of its kind is empty or all have too much."""
    busy = [view for view in ups if _requests(room, view)]
    source = min(busy, key=lambda view: (_requests(room, view), view.owner), default=None)
    if source is None or _requests(room, source) > params.requests_max:
        return None
    alike = [view for view in ups if view.fingerprint == source.fingerprint and view.role == source.role]
    is_one_empty = any(not _requests(room, view) for view in alike)
    return None if is_one_empty else source


def _requests(room: Room, view: InstanceView) -> int:
    """Requests once every open move has ended well."""
    return room.running_after(view) + room.waiting_after(view)


def _plan(
    state: State, room: Room, source: InstanceView, ups: list[InstanceView], params: Params
) -> list[tuple[RequestView, Candidates]]:
    """A place for each request that is still there, or nothing."""
    packing = Packing(room, ups, params.keep)
    plan: list[tuple[RequestView, Candidates]] = []
    for request in state.placed.get(source.owner.instance, ()):
        view = state.requests[request]
        if room.is_moving(view):
            continue
        places = packing.place(view, source) if view.owner == source.owner and room.may_leave(view) else ()
        if not places:
            return []
        plan.append((view, places))
    return plan


POLICY = MovePolicy(name="consolidate", version=1, params_type=Params, propose=propose)
