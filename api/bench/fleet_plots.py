"""A picture of a simulated day: how many instances there were, and how many it took."""

from __future__ import annotations

from pathlib import Path

from midstream.api.bench.plots import plot
from midstream.api.simulation.scenarios.play import Played
from midstream.api.simulation.scenarios.scaling import sizes


def draw_day(folder: Path, scaled: Played) -> None:
    """`fleet-scaling.png`."""
    at_ms, there, needed = zip(*sizes(scaled.entries), strict=True)
    at_s = [(ms - at_ms[0]) / 1e3 for ms in at_ms]
    with plot(folder, "fleet-scaling", width=11) as (_, axes):
        axes.step(at_s, there, where="post", label="instances that serve")
        axes.step(at_s, needed, where="post", lw=0.8, label="fewest that could have served")
        axes.set(xlabel="seconds", ylabel="instances", ylim=(0, None))
        axes.legend()
