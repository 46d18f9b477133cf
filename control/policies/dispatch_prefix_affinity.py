"""To where most of the prompt's KV is cached, as far as load allows (the cost of Dynamo's KV router, in blocks).

Cost = `prefill_weight` x blocks that must be prefilled before the first token (the prompt's that are not cached, and
those of waiting requests) + blocks in use once it and all that wait or are in flight run. Score = -cost; an instance
without free blocks for all of that comes after every one that has them. What is cached comes from the engines' own KV
events.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from midstream.control.policies.base import DispatchChoice, DispatchPolicy, DispatchWanted, InFlight, Weight
from midstream.control.policies.candidates import candidates
from midstream.control.policies.ranking import NOTHING_SENT, best_of
from midstream.control.state import InstanceView, State
from midstream.migration.plan import blocks_for


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a block of prefill is worth."""

    prefill_weight: Weight = 2.0
    """Blocks in use that one block of prefill outweighs: higher follows the cache, lower the load."""


def choose(
    state: State, wanted: DispatchWanted, in_flight: Mapping[str, InFlight], params: Params, turn: int
) -> DispatchChoice | None:
    """The gateway's own dispatches that no report shows yet count as in use (P22)."""
    views = candidates(state, wanted)
    if not views:
        return None
    scores = [_score(view, wanted, in_flight.get(view.owner.instance, NOTHING_SENT), params) for view in views]
    cached, tokens = wanted.cached, wanted.prompt_tokens
    return best_of(
        views, scores, turn,
        lambda view, score: f"cheapest of {len(views)}: {cached.get(view.owner.instance, 0)} of {tokens} prompt tokens "
        f"are cached there; cost {-score:.0f} blocks",
    )  # fmt: skip


def _score(view: InstanceView, wanted: DispatchWanted, sent: InFlight, params: Params) -> float:
    load, size = view.load, view.fingerprint.block_tokens
    needed = blocks_for(wanted.prompt_tokens + 1, size)
    fresh = max(1, needed - wanted.cached.get(view.owner.instance, 0) // size)
    queued = load.blocks_waiting + sent.blocks
    used = view.blocks_total - load.blocks_free + queued + fresh
    cost = params.prefill_weight * (load.blocks_waiting + fresh) + used
    lacking = queued + fresh - load.blocks_free
    return -cost if lacking <= 0 else -cost - (1 + params.prefill_weight) * view.blocks_total


POLICY = DispatchPolicy(name="prefix_affinity", version=1, params_type=Params, choose=choose, needs_cached=True)
