"""To where the request's latency targets are the safest: predicted time to first token and between tokens, by instance.

With r requests there (this one, the waiting and the in-flight counted) and what `fold.speeds` learnt from the log:
- ITL = a + b x r, the fitted line of step time over running requests;
- TTFT = (tokens queued before it + its prompt) x prefill time per token + one step + the time until the blocks that
  are missing come free. By Little's law an instance frees its used blocks once in (mean output length x ITL).
Score = -max(TTFT ÷ `ttft_ms`, ITL ÷ `itl_ms`): above -1 both targets should be met. Until an instance has `REPORTS_MIN`
reports' worth of weight, it counts as all known candidates together; where none is known, with the `UNKNOWN_…` figures.
The line is fitted with a prior (ridge regression): reports at nearly one batch size say little of how steps grow, and
without growth the least difference would draw everything to one instance (P22).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec

from midstream.control.policies.base import DispatchChoice, DispatchPolicy, DispatchWanted, InFlight
from midstream.control.policies.candidates import candidates
from midstream.control.policies.ranking import NOTHING_SENT, best_of
from midstream.control.state import InstanceView, Speed, State
from midstream.migration.plan import blocks_for

REPORTS_MIN: Final = 4.0
UNKNOWN_STEP_MS: Final = 20.0
UNKNOWN_GROWTH: Final = 0.0125
"""Growth of the step with each request, as a share of the mean step."""
PRIOR_VARIANCE: Final = 4.0
"""Variance of requests running at which the reports' own slope counts as much as `UNKNOWN_GROWTH`."""
UNKNOWN_PREFILL_MS_PER_TOKEN: Final = 0.1
UNKNOWN_OUTPUT_TOKENS: Final = 256.0

_UNKNOWN: Final = Speed()

Target = Annotated[float, msgspec.Meta(ge=0.1, le=86_400_000)]


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The targets, milliseconds."""

    ttft_ms: Target = 1_000.0
    """Time to first token."""
    itl_ms: Target = 50.0
    """Time between tokens."""


def choose(
    state: State, wanted: DispatchWanted, in_flight: Mapping[str, InFlight], params: Params, turn: int
) -> DispatchChoice | None:
    """The gateway's own dispatches that no report shows yet count as queued, so many of them spread out (P22)."""
    views = candidates(state, wanted)
    if not views:
        return None
    speeds = _speeds(state, views)
    rows = [
        predicted_ms(view, speed, in_flight.get(view.owner.instance, NOTHING_SENT), wanted.prompt_tokens)
        for view, speed in zip(views, speeds, strict=True)
    ]
    scores = [-max(ttft / params.ttft_ms, itl / params.itl_ms) for ttft, itl in rows]
    said = {view.owner.instance: row for view, row in zip(views, rows, strict=True)}
    return best_of(views, scores, turn, lambda view, _: _reason(len(views), *said[view.owner.instance]))


def _speeds(state: State, views: Sequence[InstanceView]) -> list[Speed]:
    """What is known of each; of a new one what is known of the others."""
    speeds = [state.speeds.get(view.owner.instance, _UNKNOWN) for view in views]
    known = [speed for speed in speeds if speed.weight >= REPORTS_MIN]
    if not known or len(known) == len(speeds):
        return speeds
    typical = _together(known)
    return [speed if speed.weight >= REPORTS_MIN else typical for speed in speeds]


def _together(known: Sequence[Speed]) -> Speed:
    """One line through the points of all, and the means of the rest."""
    prefill = [speed.prefill_ms_per_token for speed in known if speed.prefill_ms_per_token]
    output = [speed.output_tokens for speed in known if speed.output_tokens]
    return Speed(
        weight=sum(speed.weight for speed in known),
        running=sum(speed.running for speed in known),
        step_ms=sum(speed.step_ms for speed in known),
        running_squared=sum(speed.running_squared for speed in known),
        running_step=sum(speed.running_step for speed in known),
        prefill_ms_per_token=sum(prefill) / len(prefill) if prefill else 0.0,
        output_tokens=sum(output) / len(output) if output else 0.0,
    )


def _reason(count: int, ttft: float, itl: float) -> str:
    return f"safest of {count}: first token after {ttft:.0f} ms, then one each {itl:.1f} ms"


def predicted_ms(view: InstanceView, speed: Speed, sent: InFlight, prompt_tokens: int) -> tuple[float, float]:
    """(TTFT, ITL) that the request would see there."""
    load, size = view.load, view.fingerprint.block_tokens
    itl = step_ms(speed, load.running + load.waiting + sent.requests + 1)
    queued = load.blocks_waiting + sent.blocks
    prefill = speed.prefill_ms_per_token or UNKNOWN_PREFILL_MS_PER_TOKEN
    ttft = (queued * size + prompt_tokens) * prefill + itl
    missing = queued + blocks_for(prompt_tokens + 1, size) - load.blocks_free
    if missing > 0:
        used = max(1, view.blocks_total - load.blocks_free)
        ttft += missing / used * (speed.output_tokens or UNKNOWN_OUTPUT_TOKENS) * itl
    return ttft, itl


def step_ms(speed: Speed, running: int) -> float:
    """The fitted line at so many running requests; never falling."""
    if speed.weight < REPORTS_MIN:
        return UNKNOWN_STEP_MS * (1 + UNKNOWN_GROWTH * running)
    mean_running, mean_ms = speed.running / speed.weight, speed.step_ms / speed.weight
    variance = max(0.0, speed.running_squared / speed.weight - mean_running * mean_running)
    covariance = speed.running_step / speed.weight - mean_running * mean_ms
    prior = UNKNOWN_GROWTH * mean_ms
    slope = max(0.0, (covariance + PRIOR_VARIANCE * prior) / (variance + PRIOR_VARIANCE))
    return max(mean_ms + slope * (running - mean_running), 0.1 * mean_ms)


POLICY = DispatchPolicy(name="slo", version=2, params_type=Params, choose=choose)
