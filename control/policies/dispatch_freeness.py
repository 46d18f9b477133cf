"""To the freest (Llumnix, OSDI'24, section 4.4.3), as the instance would be with the request there.

Score = (free blocks - blocks of all waiting and all in-flight requests - the request's own) / (running + waiting +
in flight + 1). All waiting requests count, not only the head of the line, as in the founding implementation's
dispatcher. Below zero the blocks that are missing are the score, undivided: a bigger batch must not look freer.
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
    scores = [
        freeness_there(view, wanted.prompt_tokens, in_flight.get(view.owner.instance, NOTHING_SENT)) for view in views
    ]
    count = len(views)
    return best_of(views, scores, turn, lambda _, score: f"freest of {count}: {score:.1f} blocks for each request")


def freeness_there(view: InstanceView, prompt_tokens: int, sent: InFlight) -> float:
    """Freeness of the instance with the request there."""
    load = view.load
    blocks = load.blocks_free - load.blocks_waiting - sent.blocks
    blocks -= blocks_for(prompt_tokens + 1, view.fingerprint.block_tokens)
    return blocks / (load.running + load.waiting + sent.requests + 1) if blocks > 0 else float(blocks)


POLICY = DispatchPolicy(name="freeness", version=1, params_type=NoParams, choose=choose)
