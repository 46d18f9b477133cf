"""How long one step takes: a model fitted to measured prefill and decode times (`fit.py`, `data/README.md`)."""

from __future__ import annotations

import csv
from bisect import bisect_right
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import msgspec

from midstream.control.errors import UnknownThing
from midstream.instance.engines.sim.scheduler import Plan

CONSTANTS = ("step_times.csv", "published.csv")


class StepTimeModel(msgspec.Struct, frozen=True, kw_only=True):
    """Step times of one model on one kind of machine, milliseconds."""

    decode_base_ms: float
    decode_request_ms: float
    """More per request in the batch."""
    decode_token_ms: float
    """More per token of context, over the whole batch."""
    prefill_knots: tuple[tuple[int, float], ...]
    """(prompt tokens in the step, ms), rising; linear between knots and beyond the last, constant before the first."""

    def decode_ms(self, requests: int, context_tokens: int) -> float:
        """One token for each of `requests` requests, whose contexts add up to `context_tokens`."""
        return self.batch_ms(requests) + self.decode_token_ms * context_tokens

    def batch_ms(self, requests: int) -> float:
        """The part of a decode step that does not depend on contexts."""
        return self.decode_base_ms + self.decode_request_ms * requests

    def prefill_ms(self, tokens: int) -> float:
        """One pass over `tokens` prompt tokens."""
        knots = self.prefill_knots
        if tokens <= knots[0][0]:
            return knots[0][1]
        right = min(bisect_right(knots, (tokens, 0.0)), len(knots) - 1)
        (x0, y0), (x1, y1) = knots[right - 1], knots[right]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)

    def plan_ms(self, plan: Plan) -> float:
        """One step. Mixed ones were not measured: taken as one pass over all tokens, not less than its decodes."""
        decodes = [chunk for chunk in plan.chunks if chunk.is_decode]
        tokens = sum(chunk.tokens for chunk in plan.chunks)
        decode_ms = self.decode_ms(len(decodes), sum(chunk.run.computed for chunk in decodes)) if decodes else 0.0
        if tokens == len(decodes):
            return decode_ms
        return max(decode_ms, self.prefill_ms(tokens))


@lru_cache(maxsize=32)
def load_model(name: str) -> StepTimeModel:
    """The fitted model called `model/hardware/tensor-parallel`, or the first of a CSV file of constants (`fit.py`).

    Raises `UnknownThing` with the known names.
    """
    models = _models(name)
    name = next(iter(models), name) if name.endswith(".csv") else name
    if name not in models:
        raise UnknownThing(f"no step times {name!r}; known: {', '.join(sorted(models))}")
    row = models[name]
    knots = [knot.split(":") for knot in row["prefill_knots"].split()]
    return StepTimeModel(
        decode_base_ms=float(row["decode_base_ms"]),
        decode_request_ms=float(row["decode_request_ms"]),
        decode_token_ms=float(row["decode_token_ms"]),
        prefill_knots=tuple((int(tokens), float(ms)) for tokens, ms in knots),
    )


def _models(name: str) -> dict[str, dict[str, str]]:
    try:
        texts = [Path(name).read_text(encoding="utf-8")] if name.endswith(".csv") else _known()
    except (OSError, UnicodeDecodeError) as error:
        raise UnknownThing(f"step times {name} cannot be read: {error}") from None
    return {row["name"]: row for text in texts for row in csv.DictReader(text.splitlines())}


def _known() -> list[str]:
    folder = files("midstream.instance.engines.sim.data")
    return [folder.joinpath(name).read_text(encoding="utf-8") for name in CONSTANTS]
