"""To the instance whose KV memory is the least claimed (as INFaaS++ does in Llumnix, OSDI'24, section 6.1).

Score = -(blocks in use or reserved + blocks that waiting and in-flight requests need + the request's own) / total
blocks. More than 1 means that somebody will wait. The best dispatcher that never moves anything, by that paper.
"""

from __future__ import annotations

from collections.abc import Mapping

from midstream.control.policies.base import DispatchChoice, DispatchPolicy, DispatchWanted, InFlight, NoParams
from midstream.control.policies.candidates import candidates
from midstream.control.policies.ranking import NOTHING_SENT, best_of
from midstream.control.state import InstanceView, State
from midstream.migration.plan import blocks_for


def choose(
    state: State, wanted: DispatchWanted, in_flight: Mapping[str, InFlight], params: NoParams, turn: int
) -> DispatchChoice | None:
    """The gateway's own dispatches that no report shows yet count as load, so many of them spread out (P22)."""
    views = candidates(state, wanted)
    if not views:
        return None
    scores = [-_claimed(view, wanted.prompt_tokens, in_flight.get(view.owner.instance, NOTHING_SENT)) for view in views]
    count = len(views)
    return best_of(views, scores, turn, lambda _, score: f"least KV of {count}: {-score:.0%} of its blocks claimed")


def _claimed(view: InstanceView, prompt_tokens: int, sent: InFlight) -> float:
    load, total = view.load, max(view.blocks_total, 1)
    blocks = total - load.blocks_free + load.blocks_waiting + sent.blocks
    return (blocks + blocks_for(prompt_tokens + 1, view.fingerprint.block_tokens)) / total


POLICY = DispatchPolicy(name="least_kv", version=1, params_type=NoParams, choose=choose)
