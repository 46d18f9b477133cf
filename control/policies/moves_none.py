"""Moves nothing: what every other move policy is compared with."""

from __future__ import annotations

from collections.abc import Iterator

from midstream.control.policies.base import MovePolicy, NoParams, Proposal, Rng
from midstream.control.policies.room import Room
from midstream.control.state import State


def propose(state: State, room: Room, now_ms: int, params: NoParams, rng: Rng) -> Iterator[Proposal]:
    """Nothing."""
    return iter(())


POLICY = MovePolicy(name="none", version=1, params_type=NoParams, propose=propose)
