"""Each in turn: dispatch number `turn` goes to instance `turn` mod n, whatever the load (P22)."""

from __future__ import annotations

from collections.abc import Mapping

from midstream.control.policies.base import DispatchChoice, DispatchPolicy, DispatchWanted, InFlight, NoParams
from midstream.control.policies.candidates import candidates
from midstream.control.state import State


def choose(
    state: State, wanted: DispatchWanted, in_flight: Mapping[str, InFlight], params: NoParams, turn: int
) -> DispatchChoice | None:
    """k x n dispatches over n unchanging instances hit each k times."""
    views = candidates(state, wanted)
    if not views:
        return None
    index = turn % len(views)
    view = views[index]
    return DispatchChoice(
        owner=view.owner,
        address=view.address,
        scores=((view.owner.instance, 0.0),),
        reason=f"turn {turn}: instance {index + 1} of {len(views)}",
    )


POLICY = DispatchPolicy(name="round_robin", version=1, params_type=NoParams, choose=choose)
