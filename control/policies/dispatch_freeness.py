"""To the freest (Llumnix, OSDI'24, section 4.4.3), as the instance would be with the request there.

Score = (free blocks - blocks of all waiting and all in-flight requests - the request's own) / (running + waiting +
in flight + 1). All waiting requests count, not only the head of the line, as in the founding implementation's
dispatcher. Below zero the blocks that are missing are the score, undivided: a bigger batch must not look freer.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nsmallest
from typing import Any, Final

from midstream.control.policies.base import (
    CANDIDATES_MAX,
    DispatchChoice,
    DispatchPolicy,
    DispatchWanted,
    InFlight,
    NoParams,
)
from midstream.control.policies.candidates import candidates
from midstream.control.state import InstanceView, State
from midstream.migration.plan import blocks_for

_NONE: Final = InFlight(0, 0)


def choose(
    state: State, wanted: DispatchWanted, in_flight: Mapping[str, InFlight], params: Mapping[str, Any], turn: int
) -> DispatchChoice | None:
    """The gateway's own dispatches that no report shows yet count as load, so many of them spread out (P22)."""
    views = candidates(state, wanted)
    if not views:
        return None
    count = len(views)
    rows = [
        (-_score(view, wanted.prompt_tokens, in_flight.get(view.owner.instance, _NONE)), (index - turn) % count, index)
        for index, view in enumerate(views)
    ]
    ranked = nsmallest(CANDIDATES_MAX, rows)
    best = views[ranked[0][2]]
    return DispatchChoice(
        owner=best.owner,
        address=best.address,
        scores=tuple((views[index].owner.instance, -score) for score, _, index in ranked),
        reason=f"freest of {count}: {-ranked[0][0]:.1f} blocks for each request",
    )


def _score(view: InstanceView, prompt_tokens: int, sent: InFlight) -> float:
    load = view.load
    blocks = load.blocks_free - load.blocks_waiting - sent.blocks
    blocks -= blocks_for(prompt_tokens + 1, view.fingerprint.block_tokens)
    return blocks / (load.running + load.waiting + sent.requests + 1) if blocks > 0 else float(blocks)


POLICY = DispatchPolicy(name="freeness", version=1, params_type=NoParams, choose=choose)
