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


def transfer(
    backends: Annotated[str, typer.Option(help="Which, comma-separated: shm, rpc, gloo.")] = "shm,rpc",
    sizes: Annotated[str, typer.Option(help="MB, comma-separated.")] = "8,16,32,64,128,256,512,960",
    layouts: Annotated[str, typer.Option(help="Block layouts, comma-separated: 7b, small.")] = "7b,small",
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Of each size.")] = 5,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """How fast KV travels between two processes, beside the raw medium.

    Example: midstream bench transfer --backends shm,rpc --sizes 8,64,512 --json
    """
    from midstream.api.bench import transfer as bench
    from midstream.api.bench.report import show

    measured = bench.measure(_names(backends), tuple(int(size) for size in _names(sizes)), _names(layouts), repeats)
    if plot is not None:
        bench.draw(measured, plot)
    raise typer.Exit(show("transfer", measured, as_json=as_json))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


BENCHES: Final = (control, transfer)
NAMES: Final = tuple(bench.__name__ for bench in BENCHES)
