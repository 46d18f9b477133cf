"""To where the request's latency targets are the safest: predicted time to first token and between tokens, by instance.

With r requests there (this one, the waiting and the in-flight counted) and what `fold.speeds` learnt from the log:
- ITL = a + b x r, the fitted line of step time over running requests;
- TTFT = (tokens queued before it + its prompt) x prefill time per token + one step + the time until the blocks that
  are missing come free. By Little's law an instance frees its used blocks once in (mean output length x ITL).
Score = -max(TTFT ÷ `ttft_ms`, ITL ÷ `itl_ms`): above -1 both targets should be met. Until an instance has `REPORTS_MIN`
reports' worth of weight, it counts with the `UNKNOWN_…` figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from midstream.control.policies.base import DispatchChoice, DispatchPolicy, DispatchWanted, InFlight
from midstream.control.policies.candidates import candidates
from midstream.control.policies.ranking import NOTHING_SENT, best_of
from midstream.control.state import InstanceView, Speed, State
from midstream.migration.plan import blocks_for

REPORTS_MIN: Final = 4.0
UNKNOWN_STEP_MS: Final = 20.0
UNKNOWN_STEP_MS_PER_REQUEST: Final = 0.25
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
    rows = [
        predicted_ms(
            view,
            state.speeds.get(view.owner.instance, _UNKNOWN),
            in_flight.get(view.owner.instance, NOTHING_SENT),
            wanted.prompt_tokens,
        )
        for view in views
    ]
    scores = [-max(ttft / params.ttft_ms, itl / params.itl_ms) for ttft, itl in rows]
    said = {view.owner.instance: row for view, row in zip(views, rows, strict=True)}
    return best_of(views, scores, turn, lambda view, _: _reason(len(views), *said[view.owner.instance]))


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
    """The fitted line at so many running requests; never falling, and flat if all reports had the same number."""
    if speed.weight < REPORTS_MIN:
        return UNKNOWN_STEP_MS + UNKNOWN_STEP_MS_PER_REQUEST * running
    mean_running, mean_ms = speed.running / speed.weight, speed.step_ms / speed.weight
    variance = speed.running_squared / speed.weight - mean_running * mean_running
    covariance = speed.running_step / speed.weight - mean_running * mean_ms
    slope = max(0.0, covariance / variance) if variance > 1e-6 * mean_running * mean_running else 0.0
    return max(mean_ms + slope * (running - mean_running), 0.1 * mean_ms)


POLICY = DispatchPolicy(name="slo", version=1, params_type=Params, choose=choose)
