"""A policy that wants every move there is: what is left of it is what the limits allow. For tests."""

from __future__ import annotations

from collections.abc import Iterator

from midstream.control.policies.base import MovePolicy, NoParams, Proposal, Rng
from midstream.control.policies.room import Room, blocks_needed
from midstream.control.state import State


def propose(state: State, room: Room, now_ms: int, params: NoParams, rng: Rng) -> Iterator[Proposal]:
    """Everything to everywhere, and something that does not exist."""
    for view in state.requests.values():
        for name, target in state.instances.items():
            blocks = blocks_needed(view, target.fingerprint.block_tokens)
            yield Proposal(request=view.request, target=name, candidates=(), blocks_needed=blocks, reason="greed")
    yield Proposal(request="nobody", target="nowhere", candidates=(), blocks_needed=1, reason="greed")


POLICY = MovePolicy(name="greedy", version=1, params_type=NoParams, propose=propose)
