"""`midstream bench NAME`: measurements. One command each, because each has its own questions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from midstream.control.errors import BadInput

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


def migration(
    engine: Annotated[str, typer.Option(help="Engine of the two instances: sim or vllm.")] = "sim",
    contexts: Annotated[str | None, typer.Option(help="Tokens, comma-separated: 128,1024,4096.")] = None,
    modes: Annotated[str, typer.Option(help="Ways to move.")] = "live,blocking,recompute",
    repeats: Annotated[int, typer.Option(min=1, help="Moves per context and mode.")] = 5,
    recompute_s: Annotated[float, typer.Option(min=0, help="Recompute no more once it took so long.")] = 60.0,
    kv_gib: Annotated[float, typer.Option(min=0.1, help="vllm: KV memory of one instance.")] = 1.0,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """What a move costs its client: live, stopped and copied, or computed again.

    Example: midstream bench migration --engine vllm --contexts 128,1024 --modes live,blocking --plot plots
    """
    from midstream.api.bench.migration import Plan, draw, measure
    from midstream.api.bench.report import show

    plan = Plan(
        engine=engine,
        contexts=numbers(contexts),
        modes=tuple(modes.split(",")),
        repeats=repeats,
        recompute_s=recompute_s,
        kv_gib=kv_gib,
    )
    measured = measure(plan)
    if plot is not None:
        draw(measured, plot)
    raise typer.Exit(show("migration", measured, as_json=as_json))


def numbers(text: str | None) -> tuple[int, ...]:
    """Comma-separated whole numbers. Raises `BadInput`."""
    try:
        return tuple(int(part) for part in (text or "").split(",") if part)
    except ValueError:
        raise BadInput(f"whole numbers, comma-separated, not {text!r}") from None


BENCHES: Final = (control, migration)
NAMES: Final = tuple(bench.__name__ for bench in BENCHES)
