"""`midstream bench NAME`: measurements. One command each, because each has its own questions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from midstream.api.cli.checks import file, finite, folder
from midstream.control.errors import BadInput

JsonOption = Annotated[bool, typer.Option("--json/--no-json", help="One JSON object on stdout.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", callback=folder, help="Write plots (PNG) into this folder.")]


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
    jobs: Annotated[int, typer.Option(min=0, help="Processes for scaling's days; 0: one per core.")] = 0,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Classes, tenants, scaling and roles on simulated clusters.

    Example: midstream bench fleet --only tenants --seeds 1
    """
    from midstream.api.bench.fleet import SCENARIOS, measure
    from midstream.api.bench.report import show

    for name in only or ():
        if name not in SCENARIOS:
            raise typer.BadParameter(f"there is no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    raise typer.Exit(show("fleet", measure(only or (), seeds, jobs, plot), as_json=as_json))


def gateway(
    as_json: JsonOption = False,
    plot: PlotOption = None,
    model: Annotated[Path | None, typer.Option(help="Folder of the model.", show_default="the tiny one")] = None,
    flags: Annotated[str | None, typer.Option(help="Flags of `vllm serve`, for both.", show_default="small")] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at a time.")] = "1,4,16",
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Blocks of each, in turn.")] = 60,
    tokens: Annotated[int, typer.Option(min=2, max=4096, help="Output tokens of each request.")] = 64,
) -> None:
    """What the gateway costs: the same chats through vLLM's own server and through Midstream, in turn.

    Example: midstream bench gateway --json --concurrency 1,16
    """
    from midstream.api.bench.gateway import FLAGS, MODEL, Plan, measure
    from midstream.api.bench.report import show

    plan = Plan(
        model=model or MODEL,
        flags=flags or FLAGS,
        concurrencies=numbers(concurrency),
        repeats=repeats,
        tokens=tokens,
    )
    raise typer.Exit(show("gateway", measure(plan, plot), as_json=as_json))


def migration(
    engine: Annotated[str, typer.Option(help="Engine of the two instances: sim or vllm.")] = "sim",
    contexts: Annotated[str | None, typer.Option(help="Tokens, comma-separated: 128,1024,4096.")] = None,
    modes: Annotated[str, typer.Option(help="Ways to move.")] = "live,blocking,recompute",
    repeats: Annotated[int, typer.Option(min=1, help="Moves per context and mode.")] = 5,
    recompute_s: Annotated[
        float, typer.Option(callback=finite, min=0, help="Recompute no more once it took so long.")
    ] = 60.0,
    kv_gib: Annotated[float, typer.Option(callback=finite, min=0.1, help="vllm: KV memory of one instance.")] = 1.0,
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
        modes=names(modes),
        repeats=repeats,
        recompute_s=recompute_s,
        kv_gib=kv_gib,
    )
    measured = measure(plan)
    if plot is not None:
        draw(measured, plot)
    raise typer.Exit(show("migration", measured, as_json=as_json))


def schedule(
    traces: Annotated[
        list[str] | None, typer.Option("--trace", help="Shipped, generated, or a file; again for more. [default: five]")
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option("--policies", help="DISPATCH+MOVES, as freeness+balance:low=20; again for more arms."),
    ] = None,
    instances: Annotated[int, typer.Option(help="Instances.", min=1)] = 16,
    rate_scale: Annotated[
        float | None,
        typer.Option(
            callback=finite, help="Play so many times faster than recorded. [default: the most that is sustained]"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds of each arm.", min=1)] = 3,
    requests: Annotated[int, typer.Option(help="Requests of each run; all of a trace that has fewer.", min=1)] = 3_000,
    slo_prefill_ms: Annotated[float, typer.Option(callback=finite, help="SLO: admission to first token.")] = 3_000.0,
    slo_decode_ms: Annotated[float, typer.Option(callback=finite, help="SLO: mean time between tokens.")] = 100.0,
    step_times: Annotated[
        str, typer.Option(help="Model/hardware/tensor-parallel, or a file of constants.")
    ] = "llama2-70b/h100-80gb/2",
    blocks: Annotated[int, typer.Option(help="KV blocks of each instance.", min=1)] = 2_048,
    block_tokens: Annotated[int, typer.Option(help="Tokens of one block.", min=1)] = 16,
    token_bytes: Annotated[int, typer.Option(help="KV bytes of one token.", min=8)] = 327_680,
    gbit: Annotated[
        float, typer.Option(callback=finite, help="Bandwidth between instances, Gbit/s.", min=0.001)
    ] = 25.0,
    transfer: Annotated[
        str | None,
        typer.Option(help="BACKEND=FILE: speed and latency as `bench transfer --json` found them, not --gbit."),
    ] = None,
    queue_depth: Annotated[
        int,
        typer.Option(help="Requests that wait at an instance, the others at the gateway; 0: all at instances.", min=0),
    ] = 4,
    jobs: Annotated[int, typer.Option(help="Processes. [default: one per core]", min=0)] = 0,
    kept: Annotated[
        Path | None,
        typer.Option(callback=file, help="Add every run made to this file, and make none again that is in it."),
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """How well policies schedule a simulated fleet, on recorded and generated workloads.

    Example: midstream bench schedule --trace azure_conv_2023 --rate-scale 12 --seeds 1 --plot plots
    """
    from midstream.api.bench.report import show
    from midstream.api.bench.schedule import ARMS, LATENCY_MS, TRACES, Plan, measure
    from midstream.api.bench.schedule_figures import Slo
    from midstream.api.bench.transfer_model import TransferModel, transfer_model
    from midstream.api.cli.output import say
    from midstream.api.traces.workload import overlap

    link = TransferModel(gbit, LATENCY_MS) if transfer is None else transfer_model(transfer)
    plan = Plan(
        traces=tuple(traces or TRACES), arms=tuple(policies or ARMS), seeds=seeds, instances=instances,
        requests=requests, rate_scale=rate_scale, slo=Slo(prefill_ms=slo_prefill_ms, decode_ms=slo_decode_ms),
        step_times=step_times, blocks=blocks, block_tokens=block_tokens, token_bytes=token_bytes,
        gbit_per_s=link.gbit_per_s, latency_ms=link.latency_ms,
        queue_depth=queue_depth, jobs=jobs,
    )  # fmt: skip
    for trace in plan.traces:
        if share := overlap(trace, seeds, requests):
            say(f"{trace}: seeds play parts of it that overlap, by up to {share:.0%}")
    raise typer.Exit(show("schedule", measure(plan, plot, kept), as_json=as_json))


def profile(
    url: Annotated[str, typer.Argument(help="OpenAI endpoint with one idle instance behind it.")],
    batch: Annotated[
        list[int] | None, typer.Option(help="Requests at once; again for more. [default: 1 2 4 8]")
    ] = None,
    prompt: Annotated[
        list[int] | None, typer.Option(help="Prompt tokens; again for more. [default: 128 512 2048]")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 32,
    repeats: Annotated[int, typer.Option(help="Runs of each point.")] = 3,
    hardware: Annotated[str, typer.Option(help="Name of the machine in the constants.")] = "here",
    tensor_parallel: Annotated[int, typer.Option(help="Cards of the instance.", min=1)] = 1,
    key: Annotated[str | None, typer.Option(help="Key for the endpoint.")] = None,
    constants: Annotated[
        Path | None, typer.Option(callback=file, help="Write what --step-times reads into this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """How long the steps of a running instance take, and the model of them that simulations use.

    Example: midstream bench profile http://127.0.0.1:8000 --constants mine.csv
    """
    from midstream.api.bench.profile import BATCHES, PROMPTS, Plan, measure
    from midstream.api.bench.report import show

    plan = Plan(
        url=url, batches=tuple(batch or BATCHES), prompts=tuple(prompt or PROMPTS), tokens=tokens, repeats=repeats,
        hardware=hardware, tensor_parallel=tensor_parallel, key=key,
    )  # fmt: skip
    raise typer.Exit(show("profile", measure(plan, constants), as_json=as_json))


def serve(
    engine: Annotated[str, typer.Option(help="Engine of the instances: sim or vllm.")] = "sim",
    model: Annotated[Path | None, typer.Option(help="vllm: folder of the model.", show_default="the settings'")] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option("--policies", help="DISPATCH+MOVES, as freeness+balance:low=20; again for more arms."),
    ] = None,
    trace: Annotated[str, typer.Option(help="Lengths: a shipped trace, a generated one, or a file.")] = "heavy_tail",
    length_scale: Annotated[
        float | None, typer.Option(callback=finite, help="Factor on lengths.", show_default="by engine")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(callback=finite, help="Requests a second, over all instances.", show_default="by engine"),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=8, max=100_000, help="Of each arm and repeat.", show_default="by engine")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Loads of each arm, each with a seed of its own.")] = 3,
    instances: Annotated[int | None, typer.Option(min=1, help="Instances.", show_default="by engine")] = None,
    blocks: Annotated[
        int | None, typer.Option(min=16, help="KV blocks of each instance.", show_default="by engine")
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """The founding latency table: Poisson arrivals at a cluster of real processes, policies in turn.

    Exit code 1 if a request failed. Example: midstream bench serve --rate 10 --repeats 1 --plot plots
    """
    from midstream.api.bench.report import show
    from midstream.api.bench.serve import ARMS, Plan, measure

    plan = Plan(
        engine=engine, model=model, arms=tuple(policies or ARMS), trace=trace, length_scale=length_scale, rate=rate,
        requests=requests, repeats=repeats, instances=instances, blocks=blocks,
    )  # fmt: skip
    measured = measure(plan, plot)
    code = show("serve", measured, as_json=as_json)
    raise typer.Exit(code or int(measured.summary["errors"] > 0))


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

    measured = bench.measure(names(backends), numbers(sizes), names(layouts), repeats)
    if plot is not None:
        bench.draw(measured, plot)
    raise typer.Exit(show("transfer", measured, as_json=as_json))


def names(text: str | None) -> tuple[str, ...]:
    """Comma-separated words."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def numbers(text: str | None) -> tuple[int, ...]:
    """Comma-separated whole numbers. Raises `BadInput`."""
    try:
        return tuple(int(word) for word in names(text))
    except ValueError:
        raise BadInput(f"whole numbers, comma-separated, not {text!r}") from None


BENCHES: Final = (control, fleet, gateway, migration, profile, schedule, serve, transfer)
NAMES: Final = tuple(bench.__name__ for bench in BENCHES)
