"""`midstream bench NAME`: measurements. One command each, because each has its own questions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

JsonOption = Annotated[bool, typer.Option("--json/--no-json", help="One JSON object on stdout.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Write plots (PNG) into this folder.")]


def register(app: typer.Typer) -> None:
    """Add these commands."""
    group = typer.Typer(name="bench", help="Measure; a table, or with --json one object. Compare ratios, not seconds.")
    for bench in BENCHES:
        group.command()(bench)
    app.add_typer(group, rich_help_panel="Runs")


def control(as_json: JsonOption = False) -> None:
    """What the control plane costs: folding, committing, deciding, dispatching, doing nothing.

    Example: midstream bench control --json
    """
    from midstream.api.bench.control import measure
    from midstream.api.bench.report import show

    raise typer.Exit(show("control", measure(), as_json=as_json))


def fleet(
    only: Annotated[list[str] | None, typer.Option(help="priorities, tenants, scaling or roles.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs of each arm, each with a seed of its own.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Classes, tenants, scaling and roles on simulated clusters.

    Example: midstream bench fleet --only tenants --seeds 1
    """
    from midstream.api.bench.fleet import SCENARIOS, measure
    from midstream.api.bench.report import show

    for name in only or ():
        if name not in SCENARIOS:
            raise typer.BadParameter(f"there is no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    raise typer.Exit(show("fleet", measure(only or (), seeds), as_json=as_json))


BENCHES: Final = (control, fleet)
NAMES: Final = tuple(bench.__name__ for bench in BENCHES)
