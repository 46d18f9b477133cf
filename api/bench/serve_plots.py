"""Pictures of served loads: which share of requests waited how long, and of tokens came after how long a gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from midstream.api.bench.plots import plot
from midstream.api.bench.serve_figures import Load

LEAST_MS: Final = 0.1
"""Where a logarithmic axis starts."""
POINTS_MAX: Final = 2_000


def draw(folder: Path, engine: str, loads: Mapping[str, Sequence[Load]]) -> None:
    """Cumulative shares of all repeats together, one line for each arm."""
    with plot(folder, f"serve-{engine}", width=11, ncols=2) as (_, (left, right)):
        for arm, made in loads.items():
            _curve(left, [ms for load in made for ms in load.prefills_ms], arm)
            _curve(right, [ms for load in made for ms in load.gaps_ms], arm)
        for axes, what in ((left, "arrival to first token, ms"), (right, "between two tokens, ms")):
            axes.set(xscale="log", xlabel=what, ylabel="share")
            axes.grid(alpha=0.3)
            axes.legend()


def _curve(axes: Any, values: Sequence[float], label: str) -> None:
    ordered = sorted(max(value, LEAST_MS) for value in values)
    every = max(1, len(ordered) // POINTS_MAX)
    shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
    axes.plot(ordered[::every] + ordered[-1:], shares[::every] + shares[-1:], label=label)
