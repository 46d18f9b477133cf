"""Hands requests over once their prompt is computed, from instances that are for prompts to those for tokens.

The move is the ordinary one. It is decided at the tick after the gateway's `FirstTokenDelivered`, so the first tokens
of a request come from the prefill side: a tick's worth, a bounded price for having one way of moving. When the other
side is full the request stays and goes on where it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from midstream.control.policies.base import Blocks, Count, MovePolicy, Proposal, Rng
from midstream.control.policies.room import Room, blocks_needed
from midstream.control.policies.targets import best, ranked
from midstream.control.state import InstanceView, RequestView, State


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a hand-over is worth it."""

    tokens_left_min: Count = 32
    """With fewer tokens to come at most, it ends where it is."""
    freeness_min: Blocks = 2.0
    """A target must keep so many blocks for each of its requests, with the new one there."""


def propose(state: State, room: Room, now_ms: int, params: Params, rng: Rng) -> Iterator[Proposal]:
    """Requests in the order in which they came to each prefill instance."""
    for source in state.instances.values():
        if room.moves_left <= 0:
            return
        if source.role == "prefill" and room.is_up(source) and state.placed.get(source.owner.instance):
            yield from _hand_over(state, room, source, params)


def _hand_over(state: State, room: Room, source: InstanceView, params: Params) -> Iterator[Proposal]:
    name = source.owner.instance
    targets = [view for view in ranked(state, room, source) if view.role != "prefill"]
    for request in tuple(state.placed[name]):
        if room.is_at_limit(name) or room.moves_left <= 0 or not targets:
            return
        view = state.requests[request]
        if view.owner != source.owner or not _is_ready(view, params) or not room.may_leave(view):
            continue
        candidates = best(room, view, targets, may_return=True)
        if candidates and candidates[0][1] >= params.freeness_min:
            yield Proposal(
                request=request,
                target=candidates[0][0],
                candidates=candidates,
                blocks_needed=blocks_needed(view, source.fingerprint.block_tokens),
                reason=f"its prompt is computed; {name} is for prompts, {candidates[0][0]} the freest of the others",
            )


def _is_ready(view: RequestView, params: Params) -> bool:
    """Has it its first token, and enough of them to come."""
    left = view.prompt_tokens + view.output_tokens_max - view.tokens
    return not view.is_waiting and view.tokens > view.prompt_tokens and left >= params.tokens_left_min


POLICY = MovePolicy(name="prefill_decode", version=1, params_type=Params, propose=propose, may_return=True)
