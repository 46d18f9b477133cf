"""Pictures of simulated runs: how long clients waited, how full instances were, what moved when."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midstream.api.bench.plots import plot
from midstream.api.bench.schedule_figures import CURVE_SHARES, Figures

if TYPE_CHECKING:
    from midstream.api.bench.schedule_runs import Made


def draw(folder: Path, trace: str, made: Sequence[Made], *, blocks: int) -> None:
    """Curves of all arms; KV and moves of each arm."""
    arms = {one.run.arm: one.figures for one in made}
    with plot(folder, f"{trace}-latency", width=11, ncols=2) as (_, (left, right)):
        _curves(left, {arm: f.prefill_curve for arm, f in arms.items()}, "admission to first token, ms")
        _curves(right, {arm: f.gap_curve for arm, f in arms.items()}, "between two tokens, ms")
    for arm, figures in arms.items():
        name = f"{trace}-{re.sub('[^a-z0-9_]+', '-', arm)}"
        with plot(folder, f"{name}-kv", width=11) as (_, axes):
            _kv(axes, figures, blocks)
        if figures.bars:
            with plot(folder, f"{name}-moves", width=11) as (_, axes):
                _gantt(axes, figures)


def _curves(axes: Any, curves: dict[str, tuple[float, ...]], what: str) -> None:
    for arm, values in curves.items():
        axes.plot([max(value, 0.1) for value in values], CURVE_SHARES, label=arm)
    axes.set(xscale="log", xlabel=what, ylabel="share")
    axes.grid(alpha=0.3)
    axes.legend()


def _kv(axes: Any, figures: Figures, blocks: int) -> None:
    for instance, samples in figures.kv.items():
        axes.plot([at for at, _ in samples], [100 - 100 * free / blocks for _, free in samples], lw=0.8, label=instance)
    axes.set(xlabel="seconds", ylabel="KV blocks in use, %", ylim=(0, 101))
    axes.legend(ncols=8, fontsize="x-small", loc="lower center")


def _gantt(axes: Any, figures: Figures) -> None:
    """One line per source; the colour says whether the move was committed, the arrow's end where to."""
    instances = sorted(figures.kv)
    for bar in figures.bars:
        start, end = bar.started_s, bar.ended_s if bar.ended_s is not None else bar.started_s
        source, target = instances.index(bar.source), instances.index(bar.target)
        colour = "tab:green" if bar.is_committed else "tab:red"
        axes.plot([start, end], [source, source], color=colour, lw=4, solid_capstyle="butt")
        axes.plot([end, end], [source, target], color=colour, lw=0.5, alpha=0.5)
    axes.set(xlabel="seconds", yticks=range(len(instances)), yticklabels=instances)
