"""What one load comes to, and what several loads of several arms come to. Pure.

Prefill and decode are meant as in the founding work (Llumnix): prefill latency is admission to first token with all
queueing, decode latency the *mean* time between tokens of one request, and its p99 a p99 over requests of their means.
Single gaps stand beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any, Final

import msgspec

from midstream.api.bench.report import rank, spread
from midstream.api.bench.serve_load import Answer
from midstream.api.bench.sse import Timed

RANKS: Final = {"p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
COMPARED: Final = (
    ("prefill_ms", "mean"), ("prefill_ms", "p50"), ("prefill_ms", "p99"), ("decode_ms", "mean"), ("decode_ms", "p99"),
    ("gap_ms", "p99"), ("gap_ms", "max"),
)  # fmt: skip

Spread = dict[str, float | None]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One arm under one load: what its clients saw, and what the log says of it."""

    answers: tuple[Answer, ...]
    downtimes_ms: tuple[float, ...] = ()
    moves: int = 0
    """Committed ones."""
    moves_failed: int = 0
    preemptions: int = 0

    @property
    def well(self) -> list[tuple[float, Timed]]:
        """(Planned arrival, answer) of the requests that ended well."""
        return [(answer.planned_at, answer.timed) for answer in self.answers if answer.timed is not None]

    @property
    def errors(self) -> list[str]:
        """Of the requests that did not."""
        return [answer.error for answer in self.answers if answer.error is not None]

    @property
    def prefills_ms(self) -> list[float]:
        """Per request: planned arrival to first token."""
        return [1e3 * (timed.arrivals[0] - planned_at) for planned_at, timed in self.well]

    @property
    def decodes_ms(self) -> list[float]:
        """Per request: mean time between its tokens."""
        return [decode_ms(timed) for _, timed in self.well if timed.tokens > 1]

    @property
    def gaps_ms(self) -> list[float]:
        """Every single gap. Tokens that came together have one gap before them."""
        return [gap for _, timed in self.well for gap in timed.gaps_ms]


def decode_ms(timed: Timed) -> float:
    """First to last token ÷ the steps between them."""
    return 1e3 * (timed.arrivals[-1] - timed.arrivals[0]) / (timed.tokens - 1)


def ranks(values: Sequence[float], names: Iterable[str] = RANKS) -> Spread:
    """Percentiles by name; None of nothing."""
    return {name: rank(values, RANKS[name]) for name in names}


def figures(load: Load) -> dict[str, Any]:
    """Of one load; None for what nobody saw."""
    prefills, decodes, gaps = load.prefills_ms, load.decodes_ms, load.gaps_ms
    return {
        "prefill_ms": ranks(prefills) | {"mean": _mean(prefills)},
        "decode_ms": ranks(decodes) | {"mean": _mean(decodes)},
        "gap_ms": ranks(gaps, ("p50", "p99")) | {"max": max(gaps, default=None)},
        "moves": load.moves,
        "moves_failed": load.moves_failed,
        "preemptions": load.preemptions,
        "tokens_per_s": _tokens_per_s(load),
        "in_flight_max": in_flight_max(load.answers),
        "drain_s": _drain_s(load.answers),
        "late_ms_max": max((1e3 * (timed.sent_at - at) for at, timed in load.well), default=None),
    }


def in_flight_max(answers: Sequence[Answer]) -> int:
    """Most requests that had arrived and not ended."""
    changes = sorted([(a.planned_at, 1) for a in answers] + [(a.ended_at, -1) for a in answers])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _tokens_per_s(load: Load) -> float | None:
    """Output tokens of whole answers, from the first planned arrival to the last end."""
    if not load.well:
        return None
    took_s = max(a.ended_at for a in load.answers) - min(a.planned_at for a in load.answers)
    return sum(timed.tokens for _, timed in load.well) / took_s


def _drain_s(answers: Sequence[Answer]) -> float:
    """From the last arrival to the last end: how far behind the cluster was."""
    return max(a.ended_at for a in answers) - max(a.planned_at for a in answers)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


# --- several loads -------------------------------------------------------------------------------


def row_of(arm: str, loads: Sequence[Load]) -> dict[str, Any]:
    """One arm: medians over its loads, with the least and the most; downtimes of all of them together."""
    found = [figures(load) for load in loads]
    downtimes = [ms for load in loads for ms in load.downtimes_ms]
    row: dict[str, Any] = {
        "arm": arm,
        "repeats": len(loads),
        "requests": sum(len(load.answers) for load in loads),
        "errors": sum(len(load.errors) for load in loads),
    }
    for name, value in found[0].items():
        if isinstance(value, Mapping):
            row[name] = _merged(spread(part, [one[name][part] for one in found]) for part in value)
        else:
            row |= spread(name, [one[name] for one in found])
    row["downtime_ms"] = ranks(downtimes, ("p50", "p99")) | {"max": max(downtimes, default=None)}
    return row


def summary_of(loads: Mapping[str, Sequence[Load]]) -> dict[str, Any]:
    """Each arm over each later one, per repeat: so many times longer it lets wait. None where one saw nothing."""
    found = {arm: [figures(load) for load in made] for arm, made in loads.items()}
    errors = sum(len(load.errors) for made in loads.values() for load in made)
    pairs = {f"{one}_over_{other}": _against(found[one], found[other]) for one, other in combinations(found, 2)}
    return {"errors": errors} | pairs


def _against(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> Spread:
    pairs = list(zip(one, other, strict=True))
    ratios = _merged(
        spread(f"{name.removesuffix('_ms')}_{part}", [ratio(a[name][part], b[name][part]) for a, b in pairs])
        for name, part in COMPARED
    )
    gained = [ratio(b["tokens_per_s"], a["tokens_per_s"]) for a, b in pairs]
    fewer = [float(a["preemptions"] - b["preemptions"]) for a, b in pairs]
    return ratios | spread("tokens_per_s_gained", gained) | spread("preemptions_fewer", fewer)


def ratio(over: float | None, under: float | None) -> float | None:
    """Their quotient; None where there is none."""
    return over / under if over is not None and under else None


def _merged(parts: Iterable[Spread]) -> Spread:
    return {name: value for part in parts for name, value in part.items()}
