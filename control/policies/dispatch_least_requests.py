"""To the instance with the fewest requests (join the shortest queue): running, waiting and in flight.

Score = -(running + waiting + in flight). Knows nothing of their sizes: right where all requests are alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from midstream.control.policies.base import DispatchChoice, DispatchPolicy, DispatchWanted, InFlight, NoParams
from midstream.control.policies.candidates import candidates
from midstream.control.policies.ranking import NOTHING_SENT, best_of
from midstream.control.state import InstanceView, State


def choose(
    state: State, wanted: DispatchWanted, in_flight: Mapping[str, InFlight], params: NoParams, turn: int
) -> DispatchChoice | None:
    """The gateway's own dispatches that no report shows yet count, so many of them spread out (P22)."""
    views = candidates(state, wanted)
    if not views:
        return None
    scores = [-float(requests_there(view, in_flight.get(view.owner.instance, NOTHING_SENT))) for view in views]
    count = len(views)
    return best_of(views, scores, turn, lambda _, score: f"fewest requests of {count}: {-score:.0f}")


def requests_there(view: InstanceView, sent: InFlight) -> int:
    """Requests that the instance has or is about to have."""
    return view.load.running + view.load.waiting + sent.requests


POLICY = DispatchPolicy(name="least_requests", version=1, params_type=NoParams, choose=choose)
