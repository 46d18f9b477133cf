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


BENCHES: Final = (control, gateway, migration)
NAMES: Final = tuple(bench.__name__ for bench in BENCHES)
