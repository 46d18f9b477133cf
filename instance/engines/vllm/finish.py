"""How a run's end is written in `Output.finish`: `stop`, `stop:<token id>`, `length`, `abort`, `error:…`."""

from __future__ import annotations

STOP, LENGTH, ABORT, ERROR, REPETITION = range(5)
"""Numbers of vLLM's `FinishReason`."""


def finish_text(reason: int, stop_reason: int | str | None) -> str:
    """The text for vLLM's finish and stop reason."""
    if reason in (STOP, REPETITION):
        kind = "stop" if reason == STOP else "repetition"
        return kind if stop_reason is None else f"{kind}:{stop_reason}"
    return {LENGTH: "length", ABORT: "abort"}.get(reason, "error:engine_failed")
