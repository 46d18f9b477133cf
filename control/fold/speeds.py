"""What the log teaches about how fast each instance is: every report and every finished request move a fit a little.

Decode steps: least squares of step time over requests running, both exponentially weighted (a report counts half after
`HALF_LIFE` more). Prefill: the leaky minimum of time to first token per prompt token, because queueing only ever adds.
"""

from __future__ import annotations

from typing import Final

from midstream.control.events import LoadReported, RequestFinished
from midstream.control.state import RequestView, Speed, State

HALF_LIFE: Final = 64
KEEP: Final = 0.5 ** (1 / HALF_LIFE)
"""Weight of what was known, at each new report."""

LEAK: Final = 1.02
"""How much the minimum of the prefill time grows with each finished request, so that it follows a slower engine."""

OUTPUT_WEIGHT: Final = 1 / 32
"""Weight of a finished request in the mean length of outputs."""


def learn_step(state: State, event: LoadReported) -> None:
    """A report of a busy instance is one more point of its line."""
    running, step_ms = event.load.running, event.load.step_ms
    if running <= 0 or step_ms <= 0:
        return
    name = event.owner.instance
    s = state.speeds.get(name) or Speed()
    state.speeds[name] = Speed(
        s.weight * KEEP + 1,
        s.running * KEEP + running,
        s.step_ms * KEEP + step_ms,
        s.running_squared * KEEP + running * running,
        s.running_step * KEEP + running * step_ms,
        s.prefill_ms_per_token,
        s.output_tokens,
    )


def learn_request(state: State, event: RequestFinished, view: RequestView) -> None:
    """A request that ended where it began shows what prefill costs there; every one shows how long outputs are."""
    name = event.owner.instance
    s = state.speeds.get(name) or Speed()
    prefill = s.prefill_ms_per_token
    if view.moves == 0 and view.prompt_tokens > 0 and event.ttft_ms > 0:
        seen = event.ttft_ms / view.prompt_tokens
        prefill = min(prefill * LEAK, seen) if prefill else seen
    output = s.output_tokens + OUTPUT_WEIGHT * (event.output_tokens - s.output_tokens) if s.output_tokens else (
        float(event.output_tokens)
    )  # fmt: skip
    state.speeds[name] = Speed(
        s.weight, s.running, s.step_ms, s.running_squared, s.running_step, prefill, output
    )  # fmt: skip
