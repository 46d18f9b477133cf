"""Keeps head-room around high-priority requests by moving others away; nothing is killed (Llumnix, OSDI'24, 4.4.2).

An instance with a high-priority request is to have `PolicySettings.high_headroom` of its blocks free, so that its real
load stays at a level at which that request runs unhindered. While it has less, other requests leave it: waiting ones
first, which move without KV, then the lowest class, then the largest. They go where no high-priority request is.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from midstream.control.policies.base import Count, MovePolicy, Proposal, Rng
from midstream.control.policies.freeness_math import blocks_kept
from midstream.control.policies.room import Room, blocks_needed
from midstream.control.policies.targets import best, ranked
from midstream.control.state import InstanceView, RequestView, State


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a move is worth it."""

    blocks_min: Count = 2
    """A running request with fewer blocks stays: its move costs more than the room that it gives."""


def propose(state: State, room: Room, now_ms: int, params: Params, rng: Rng) -> Iterator[Proposal]:
    """For each instance that lacks head-room, moves until it will have it."""
    for source in state.instances.values():
        if room.moves_left <= 0:
            return
        if source.owner.instance in state.high and room.is_up(source) and not source.is_draining:
            yield from _clear(state, room, source, params)


def _clear(state: State, room: Room, source: InstanceView, params: Params) -> Iterator[Proposal]:
    name, wanted = source.owner.instance, blocks_kept(state, source)
    if room.blocks_free_after(source) >= wanted and not source.load.waiting:
        return
    targets = [view for view in ranked(state, room, source) if view.owner.instance not in state.high]
    for view in _leavers(state, room, source, params):
        missing = wanted - room.blocks_free_after(source)
        if room.is_at_limit(name) or room.moves_left <= 0 or not targets:
            return
        if missing <= 0 and not view.is_waiting:
            return
        candidates = best(room, view, targets, may_return=False)
        if candidates:
            yield Proposal(
                request=view.request,
                target=candidates[0][0],
                candidates=candidates,
                blocks_needed=blocks_needed(view, source.fingerprint.block_tokens),
                reason=f"{name} has high-priority requests and lacks {max(missing, 0)} of {wanted} blocks of head-room",
            )


def _leavers(state: State, room: Room, source: InstanceView, params: Params) -> list[RequestView]:
    placed = (state.requests[request] for request in state.placed.get(source.owner.instance, ()))
    others = (view for view in placed if view.owner == source.owner and not view.is_high)
    leavers = [v for v in others if room.may_leave(v) and (v.is_waiting or v.blocks >= params.blocks_min)]
    return sorted(leavers, key=lambda view: (not view.is_waiting, -view.priority, -view.blocks, view.request))


POLICY = MovePolicy(name="priority", version=1, params_type=Params, propose=propose)
