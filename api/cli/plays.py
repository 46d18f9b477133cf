"""Commands that run something and report: demo, trace, replay."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midstream.api.cli.checks import finite
from midstream.api.cli.context import admin_of, globals_of
from midstream.api.cli.output import Output, OutputOption, column, line, say, show_item, show_items, write
from midstream.control.errors import BadInput, MidstreamError

if TYPE_CHECKING:
    from midstream.api.traces.send import Sent

PANEL = "Runs"
WAIT_S = 600.0
PROGRESS_EVERY = 25


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command(rich_help_panel=PANEL)(demo)
    app.add_typer(_trace(), rich_help_panel=PANEL)
    app.add_typer(_replay(), rich_help_panel=PANEL)


def demo(
    context: typer.Context,
    engine: Annotated[str, typer.Option(help="Engine of the instances: sim or vllm.")] = "sim",
    seconds: Annotated[
        float, typer.Option(callback=finite, min=1, help="sim: how much of the trace to play, seconds.")
    ] = 60.0,
    kill: Annotated[
        list[str] | None, typer.Option(help="sim: kill this process meanwhile (valkey, controller-0).")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Move requests while they stream and verify everything.

    On simulated engines a real trace is played on four instances; on vLLM four prompts are answered by two engines.

    Example: midstream demo --seconds 20 --kill valkey
    """
    settings = globals_of(context).settings()
    if engine == "vllm":
        from midstream.api.demo import vllm

        raise typer.Exit(vllm.run(settings, output=output))
    if engine != "sim":
        raise BadInput(f"no engine {engine!r} for the demo; known: sim, vllm")
    from midstream.api.demo import run

    raise typer.Exit(run(settings, seconds=seconds, output=output, kill=kill or ()))


def _trace() -> typer.Typer:
    group = typer.Typer(name="trace", help="Recorded workloads.")

    @group.command()
    def send(
        context: typer.Context,
        file: Annotated[str, typer.Argument(help="A CSV file, or the name of a shipped trace.")],
        to: Annotated[str | None, typer.Option(help="OpenAI endpoint. [default: that of `up`]")] = None,
        speed: Annotated[float, typer.Option(callback=finite, help="10 plays ten times faster than recorded.")] = 1.0,
        seconds: Annotated[
            float | None, typer.Option(callback=finite, help="Only the first seconds of the trace.")
        ] = None,
        start: Annotated[float, typer.Option(callback=finite, help="Begin so many seconds into the trace.")] = 0.0,
        key: Annotated[str | None, typer.Option(help="Key for the endpoint.")] = None,
        output: OutputOption = Output.table,
    ) -> None:
        """Play a trace against the gateway; exit 1 if any request failed.

        Example: midstream trace send azure_conv_2023 --seconds 60 --speed 4
        """
        import asyncio

        from midstream.api.traces import load_trace, window
        from midstream.api.traces.send import SendPlan, send_trace

        rows = load_trace(file)
        if seconds is not None or start:
            rows = window(rows, start_s=start, seconds=seconds or float("inf"))
        if not rows:
            raise BadInput("that part of the trace has no requests")
        plan = SendPlan(url=to or _gateway_url(context), key=key, speed=speed)
        sent = asyncio.run(send_trace(rows, plan, _Progress(len(rows), output)))
        _report(sent, output)

    @group.command("list")
    def listing(output: OutputOption = Output.table) -> None:
        """Show the traces that come with Midstream."""
        from midstream.api.traces import load_trace, shipped_traces

        items = []
        for name in shipped_traces():
            rows = load_trace(name)
            items.append({"trace": name, "requests": len(rows), "seconds": rows[-1].arrival_s})
        show_items(items, [column("trace"), column("requests"), column("seconds")], output)

    @group.command("import")
    def read_form(
        form: Annotated[str, typer.Argument(help="azure, burstgpt, mooncake or bailian.")],
        file: Annotated[Path, typer.Argument(help="The file as it is published.", exists=True, dir_okay=False)],
        start: Annotated[float, typer.Option(callback=finite, help="Begin so many seconds into it.", min=0)] = 0.0,
        seconds: Annotated[
            float | None, typer.Option(callback=finite, help="Only so many seconds of it.", min=0)
        ] = None,
    ) -> None:
        """Turn a published trace, or a part of a long one, into a trace of ours, on stdout.

        Example: midstream trace import azure AzureLLMInferenceTrace_conv_1week.csv --seconds 3600 > hour.csv
        """
        from midstream.api.traces import write_trace
        from midstream.api.traces.importers import import_trace

        part_s = float("inf") if seconds is None else seconds
        rows = import_trace(form, _lines(file), file.name, start_s=start, seconds=part_s)
        write(write_trace(rows).rstrip())

    @group.command()
    def generate(
        name: Annotated[str, typer.Argument(help="heavy_tail, bursty, shared_prefix or tenants.")],
        seed: Annotated[int, typer.Option(help="Equal seeds, equal traces.")] = 0,
        requests: Annotated[int, typer.Option(help="Rows.", min=1)] = 10_000,
    ) -> None:
        """Make up a workload, on stdout.

        Example: midstream trace generate heavy_tail --seed 7 > heavy.csv
        """
        from midstream.api.traces import write_trace
        from midstream.api.traces.generate import generate as made_up

        write(write_trace(made_up(name, seed, requests)).rstrip())

    return group


def _lines(file: Path) -> Iterator[str]:
    """One by one: published traces have tens of millions."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            yield from lines
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file} cannot be read: {error}") from None


def _replay() -> typer.Typer:
    group = typer.Typer(name="replay", help="Decide again what was decided.")

    @group.command()
    def verify(
        context: typer.Context,
        changes: Annotated[list[str] | None, typer.Option("--set", help="Change a parameter: balance.low=20.")] = None,
        remote: Annotated[bool, typer.Option("--remote/--local", help="As a job of the cluster, or here.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
        output: OutputOption = Output.table,
    ) -> None:
        """Re-derive every decision from the log; exit 1 at a difference, and show the first one.

        Example: midstream replay verify --set balance.low=20 --json
        """
        from midstream.api.cli.overrides import parse_overrides

        overrides = parse_overrides(changes or [])
        report = _verify_remotely(context, overrides) if remote else _verify_here(context, overrides)
        show_item(report, Output.json if as_json else output)
        if report["first_difference"] is not None:
            raise MidstreamError(f"{report['equal']} of {report['decisions']} decisions re-derived equal")
        say(f"decisions re-derived from the log: {report['equal']} of {report['decisions']} equal")

    return group


def _verify_here(context: typer.Context, overrides: dict[str, Any]) -> dict[str, Any]:
    from midstream.api.cli.up.state import read_state
    from midstream.control.adapters.sql_store import ArchiveStore
    from midstream.control.replay import as_json, verify

    settings = globals_of(context).settings()
    running = read_state(settings.data_dir) if settings.database_url is None else None
    if settings.database_url is None and running is None and not settings.archive_path.exists():
        raise BadInput(f"no archive: neither MIDSTREAM_DATABASE_URL is set nor is there a {settings.archive_path}")
    store = ArchiveStore(running.database_url if running else settings.archive_url)
    try:
        return as_json(verify(store.iterate(), overrides=overrides))
    finally:
        store.close()


def _verify_remotely(context: typer.Context, overrides: dict[str, Any]) -> dict[str, Any]:
    client = admin_of(context)
    operation = client.post("/replays", {"overrides": overrides})["operation"]
    outcome = client.finished(operation, WAIT_S)
    if outcome["status"] == "failed":
        raise MidstreamError(f"the replay failed: {outcome['detail']}")
    found: dict[str, Any] = outcome["result"]
    return found


def _gateway_url(context: typer.Context) -> str:
    from midstream.api.cli.up.state import read_state

    settings = globals_of(context).settings()
    state = read_state(settings.data_dir)
    if state is None:
        raise BadInput(f"no cluster runs in {settings.data_dir}: say with --to where the endpoint is")
    return state.gateway


class _Progress:
    """Says on stderr how far a trace is; with jsonl output, each request on stdout as it ends."""

    def __init__(self, total: int, output: Output) -> None:
        self._total = total
        self._output = output
        self._ended = 0
        self._failed = 0

    def __call__(self, sent: Sent) -> None:
        self._ended += 1
        self._failed += sent.error is not None
        if self._output is Output.jsonl:
            line(_row(sent))
        if self._ended % PROGRESS_EVERY == 0 or self._ended == self._total:
            end = "\n" if self._ended == self._total or not sys.stderr.isatty() else "\r"
            sys.stderr.write(f"{self._ended}/{self._total} requests, {self._failed} failed{end}")
            sys.stderr.flush()


def _row(sent: Sent) -> dict[str, Any]:
    names = ("row", "prompt_tokens", "output_tokens", "ttft_ms", "gap_ms_max", "duration_ms", "error")
    return {name: getattr(sent, name) for name in names}


def _report(sent: Sequence[Sent], output: Output) -> None:
    failed = [one for one in sent if one.error is not None]
    if output is not Output.jsonl:
        show_item(summary(sent), output)
    if failed:
        raise MidstreamError(f"{len(failed)} of {len(sent)} requests failed, the first: {failed[0].error}")


def summary(sent: Sequence[Sent]) -> dict[str, Any]:
    """What a played trace came to. Times in milliseconds."""
    ttft = sorted(one.ttft_ms for one in sent if one.ttft_ms is not None)
    gaps = sorted(one.gap_ms_max for one in sent if one.gap_ms_max is not None)
    return {
        "requests": len(sent),
        "failed": sum(one.error is not None for one in sent),
        "prompt_tokens": sum(one.prompt_tokens for one in sent),
        "output_tokens": sum(one.output_tokens for one in sent),
        "ttft_ms": {"p50": _rank(ttft, 0.5), "p99": _rank(ttft, 0.99)},
        "gap_ms_max": {"p50": _rank(gaps, 0.5), "p99": _rank(gaps, 0.99)},
    }


def _rank(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None
