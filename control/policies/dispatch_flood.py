"""All to one instance: the founding test in which every request must be moved away. For tests, never for service."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from midstream.control.policies.base import DispatchChoice, DispatchPolicy, DispatchWanted, InFlight
from midstream.control.policies.candidates import candidates
from midstream.control.policies.ranking import best_of
from midstream.control.state import State


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which one."""

    instance: str = ""
    """Its id; empty, unknown or unable to take the request: the one registered first."""


def choose(
    state: State, wanted: DispatchWanted, in_flight: Mapping[str, InFlight], params: Params, turn: int
) -> DispatchChoice | None:
    """Score 1 for the one, 0 for the others."""
    views = candidates(state, wanted)
    if not views:
        return None
    names = [view.owner.instance for view in views]
    chosen = params.instance if params.instance in names else names[0]
    return best_of(views, [float(name == chosen) for name in names], turn, lambda _, __: f"all go to {chosen}")


POLICY = DispatchPolicy(name="flood", version=1, params_type=Params, choose=choose)
