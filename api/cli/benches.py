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


def gateway(
    as_json: JsonOption = False,
    plots: PlotOption = None,
    model: Annotated[Path | None, typer.Option(help="Folder of the model.", show_default="the tiny one")] = None,
    flags: Annotated[str | None, typer.Option(help="Flags of `vllm serve`, for both.", show_default="small")] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at a time.")] = "1,4,16",
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Blocks of each, in turn.")] = 5,
    tokens: Annotated[int, typer.Option(min=2, max=4096, help="Output tokens of each request.")] = 64,
) -> None:
    """What the gateway costs: the same chats through vLLM's own server and through Midstream, in turn.

    Example: midstream bench gateway --json --concurrency 1,16
    """
    from midstream.api.bench.gateway import FLAGS, MODEL, Plan, measure
    from midstream.api.bench.report import show

    counts = tuple(int(part) if part.strip().isdecimal() else 0 for part in concurrency.split(","))
    plan = Plan(model=model or MODEL, flags=flags or FLAGS, concurrencies=counts, repeats=repeats, tokens=tokens)
    raise typer.Exit(show("gateway", measure(plan, plots), as_json=as_json))


BENCHES: Final = (control, gateway)
NAMES: Final = tuple(bench.__name__ for bench in BENCHES)
