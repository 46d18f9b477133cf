"""The figures of one simulated run, and what several runs of several arms come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from midstream.api.bench.arms import moves_anything
from midstream.api.simulation.fleet import Played

if TYPE_CHECKING:
    from midstream.api.bench.schedule_runs import Made

Floats = npt.NDArray[np.float64]

CURVE_SHARES: Final = tuple(i / 1_000 for i in range(1_001))
"""Where the curves of the plots are taken."""


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must keep to count as served well. Milliseconds."""

    prefill_ms: float = 3_000.0
    decode_ms: float = 100.0
    """Mean time between its tokens."""


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One move on the time line of a run. Seconds."""

    source: str
    target: str
    started_s: float
    ended_s: float | None
    is_committed: bool


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Prefill: admission to first token, queueing included. Decode: mean gap of one request. Gap: each one."""

    requests: int
    failed: int
    refused: int
    too_long: int
    """Left out: no instance could ever hold them."""
    prefill_ms: dict[str, float]
    decode_ms: dict[str, float]
    gap_ms: dict[str, float]
    downtime_ms: dict[str, float]
    preemptions: int
    preempted_s: float
    moves: int
    goodput: float
    """Requests within the SLO, per second."""
    slo_share: float
    tokens_per_s: float
    instance_hours: float
    prefill_curve: tuple[float, ...]
    gap_curve: tuple[float, ...]
    kv: dict[str, tuple[tuple[float, int], ...]]
    """Per instance: (seconds, free blocks)."""
    bars: tuple[Move, ...]

    def row(self) -> dict[str, Any]:
        """Without what only plots need."""
        hidden = ("prefill_curve", "gap_curve", "kv", "bars")
        return {name: value for name, value in msgspec.to_builtins(self).items() if name not in hidden}


def figures_of(played: Played, slo: Slo, *, instances: int, too_long: int) -> Figures:
    """The figures of a run that has ended."""
    record = played.record
    finished = list(record.finished.values())
    prefill = np.array([one.ttft_ms for one in finished])
    decode = np.array([one.gap_ms_mean for one in finished])
    is_well = (prefill <= slo.prefill_ms) & (decode <= slo.decode_ms)
    gaps = _gaps_ms(record.token_s.values())
    asked = len(finished) + len(record.failed) + played.refused
    return Figures(
        requests=asked,
        failed=len(record.failed),
        refused=played.refused,
        too_long=too_long,
        prefill_ms=_spread(prefill),
        decode_ms=_spread(decode[decode > 0]),
        gap_ms=_spread(gaps) | {"max": _rounded(gaps.max(initial=0.0))},
        downtime_ms=_spread(np.array(record.downtime_ms)),
        preemptions=record.preemptions,
        preempted_s=round(record.preempted_s, 3),
        moves=record.moves,
        goodput=round(float(is_well.sum()) / played.busy_s, 4),
        slo_share=round(float(is_well.sum()) / max(asked, 1), 4),
        tokens_per_s=round(sum(one.output_tokens for one in finished) / played.busy_s, 1),
        instance_hours=round(instances * played.busy_s / 3_600, 3),
        prefill_curve=_curve(prefill),
        gap_curve=_curve(gaps),
        kv={name: _since(samples, played.began_ms) for name, samples in sorted(record.kv.items())},
        bars=tuple(
            Move(b.source, b.target, (b.started_ms - played.began_ms) / 1e3,
                 None if b.ended_ms is None else (b.ended_ms - played.began_ms) / 1e3, b.is_committed)
            for b in record.bars.values()
        ),
    )  # fmt: skip


def _gaps_ms(times: Any) -> Floats:
    parts = [np.diff(np.array(one)) for one in times if len(one) > 1]
    return np.concatenate(parts) * 1e3 if parts else np.empty(0)


def _spread(values: Floats) -> dict[str, float]:
    if not len(values):
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0}
    p50, p99 = np.quantile(values, (0.5, 0.99), method="higher")
    return {"mean": _rounded(values.mean()), "p50": _rounded(p50), "p99": _rounded(p99)}


def _curve(values: Floats) -> tuple[float, ...]:
    return tuple(np.quantile(values, CURVE_SHARES).tolist()) if len(values) else ()


def _since(samples: Sequence[tuple[int, int]], began_ms: int) -> tuple[tuple[float, int], ...]:
    return tuple(((at_ms - began_ms) / 1e3, free) for at_ms, free in samples)


def _rounded(value: Any) -> float:
    return round(float(value), 3)


# --- arms against each other ---------------------------------------------------------------------

RATIOS: Final[dict[str, Callable[[Figures], float]]] = {
    "prefill_mean": lambda f: f.prefill_ms["mean"],
    "prefill_p50": lambda f: f.prefill_ms["p50"],
    "prefill_p99": lambda f: f.prefill_ms["p99"],
    "decode_p99": lambda f: f.decode_ms["p99"],
    "gap_p99": lambda f: f.gap_ms["p99"],
}
"""Theirs over the best arm's: above 1, the best is so many times better."""

SAVED: Final[dict[str, Callable[[Figures], float]]] = {
    "preemptions_saved": lambda f: f.preemptions,
    "preempted_s_saved": lambda f: f.preempted_s,
}
"""The share of theirs that the best arm does not have; 0 where they had none."""


def summary_of(made: Sequence[Made]) -> dict[str, Any]:
    """One trace: the best arm, and how the best that moves compares to round robin and to the best that does not."""
    arms: dict[str, dict[int, Figures]] = {}
    for one in made:
        arms.setdefault(one.run.arm, {})[one.run.seed] = one.figures
    still = _best({arm: seeds for arm, seeds in arms.items() if not moves_anything(arm)})
    best = _best({arm: seeds for arm, seeds in arms.items() if moves_anything(arm)}) or still
    rivals = {"round_robin": "round_robin" if "round_robin" in arms else "", "best_without_moves": still}
    return {
        "best": _best(arms),
        "best_with_moves": best,
        "slo_share": {arm: median(f.slo_share for f in seeds.values()) for arm, seeds in arms.items()},
        "best_without_moves": still,
    } | {
        f"over_{name}": _against(arms[best], arms[rival]) for name, rival in rivals.items() if rival
    }  # fmt: skip


def _best(arms: dict[str, dict[int, Figures]]) -> str:
    """Most requests within the SLO, then the shortest prefill tail; of equals the first given."""

    def merit(arm: str) -> tuple[float, float]:
        seeds = arms[arm].values()
        return median(f.slo_share for f in seeds), -median(f.prefill_ms["p99"] for f in seeds)

    return max(arms, key=merit, default="")


def _against(ours: dict[int, Figures], theirs: dict[int, Figures]) -> dict[str, Any]:
    seeds = sorted(ours)
    ratios = {name: [_ratio(take(theirs[s]), take(ours[s])) for s in seeds] for name, take in RATIOS.items()}
    ratios["goodput"] = [_ratio(ours[s].goodput, theirs[s].goodput) for s in seeds]
    saved = {name: [_saved(take(theirs[s]), take(ours[s])) for s in seeds] for name, take in SAVED.items()}
    return {
        name: {"median": round(median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}
        for name, values in (ratios | saved).items()
    }


def _ratio(over: float, under: float) -> float:
    return over / under if under else 1.0 if not over else float("inf")


def _saved(theirs: float, ours: float) -> float:
    return 1 - ours / theirs if theirs else 0.0
