"""Empties draining instances: everything on them, running and waiting, goes to the freest that can take it (P16).

A request on a draining instance has infinite virtual usage (Llumnix, OSDI'24, section 4.4), so it leaves whatever
the gain, and may return to where it came from.
"""

from __future__ import annotations

from collections.abc import Iterator

from midstream.control.policies.base import MovePolicy, NoParams, Proposal, Rng
from midstream.control.policies.room import Room, blocks_needed
from midstream.control.policies.targets import best, ranked
from midstream.control.state import InstanceView, State


def propose(state: State, room: Room, now_ms: int, params: NoParams, rng: Rng) -> Iterator[Proposal]:
    """Requests in the order in which they came, spread by the freeness that each move leaves behind."""
    for source in state.instances.values():
        if source.is_draining and room.is_up(source) and state.placed.get(source.owner.instance):
            yield from _empty(state, room, source)
        if room.moves_left <= 0:
            return


def _empty(state: State, room: Room, source: InstanceView) -> Iterator[Proposal]:
    name = source.owner.instance
    targets = ranked(state, room, source)
    for request in tuple(state.placed[name]):
        if room.is_at_limit(name) or room.moves_left <= 0 or not targets:
            return
        view = state.requests[request]
        if view.owner != source.owner or not room.may_leave(view):
            continue
        candidates = best(room, view, targets, may_return=True)
        if candidates:
            yield Proposal(
                request=request,
                target=candidates[0][0],
                candidates=candidates,
                blocks_needed=blocks_needed(view, source.fingerprint.block_tokens),
                reason=f"{name} is draining; {candidates[0][0]} is the freest with room",
            )


POLICY = MovePolicy(name="drain", version=1, params_type=NoParams, propose=propose, may_return=True)
