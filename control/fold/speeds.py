"""What the log teaches about how fast each instance is: every report and every finished request move a fit a little.

Decode steps: least squares of step time over requests running, both exponentially weighted (a report counts half after
`HALF_LIFE` more). Prefill: the lower quartile of time to first token per prompt token, of the last `PREFILL_SEEN_MAX`
requests: queueing adds to it, a cached prompt takes away, and neither may decide alone.
"""

from __future__ import annotations

from typing import Final

from midstream.control.events import LoadReported, RequestFinished
from midstream.control.state import RequestView, Speed, State

HALF_LIFE: Final = 64
KEEP: Final = 0.5 ** (1 / HALF_LIFE)
"""Weight of what was known, at each new report."""

PREFILL_SEEN_MAX: Final = 16
"""Requests whose prefill times are kept: so soon it follows a slower engine."""

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
        s.prefill_seen,
    )


def learn_request(state: State, event: RequestFinished, view: RequestView) -> None:
    """A request that was nowhere else shows what prefill costs there; every one shows how long outputs are."""
    name = event.owner.instance
    s = state.speeds.get(name) or Speed()
    ttft_ms = event.ttft_ms - view.waited_ms
    seen, is_at_home = s.prefill_seen, view.moves == 0 and not view.is_dispatched_again
    if is_at_home and view.prompt_tokens > 0 and ttft_ms > 0:
        seen = (*seen, ttft_ms / view.prompt_tokens)[-PREFILL_SEEN_MAX:]
    prefill = sorted(seen)[(len(seen) - 1) // 4] if seen else 0.0
    output = s.output_tokens + OUTPUT_WEIGHT * (event.output_tokens - s.output_tokens) if s.output_tokens else (
        float(event.output_tokens)
    )  # fmt: skip
    state.speeds[name] = Speed(
        s.weight, s.running, s.step_ms, s.running_squared, s.running_step, prefill, output, seen
    )  # fmt: skip
