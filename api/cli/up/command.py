"""`midstream up`: a whole local cluster until Ctrl-C."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from midstream.api.cli.checks import finite
from midstream.api.cli.context import globals_of
from midstream.api.cli.output import Output, OutputOption, column, line, say, show_items

if TYPE_CHECKING:
    from midstream.api.cli.up.cluster import LocalCluster
    from midstream.api.cli.up.state import UpState
    from midstream.api.settings import Settings

DEFAULT_INSTANCES = {"sim": 4, "vllm": 2}


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command(rich_help_panel="Clusters")(up)


def up(
    context: typer.Context,
    engine: Annotated[str | None, typer.Option(help="Engine of the instances: sim or vllm.")] = None,
    instances: Annotated[
        int | None, typer.Option(help="How many instances, all alike.", show_default="sim 4, vllm 2")
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="KV blocks of each instance instead: 400,200,200.")] = None,
    controllers: Annotated[int, typer.Option(min=1, max=8, help="How many controllers.")] = 1,
    gateway_port: Annotated[int | None, typer.Option(help="Port of the OpenAI API; 0 takes a free one.")] = None,
    admin_port: Annotated[int | None, typer.Option(help="Port of the admin API; 0 takes a free one.")] = None,
    autoscale: Annotated[
        str | None, typer.Option(help="Instances at least and at most, like 1:4; the cluster grows and shrinks.")
    ] = None,
    time_scale: Annotated[float | None, typer.Option(callback=finite, help="Factor on simulated step times.")] = None,
    output: OutputOption = Output.table,
) -> None:
    """Start Valkey, archive, controller, instances, gateway and admin API; one Ctrl-C ends all.

    Example: midstream up --sizes 400,200,200,100 --gateway-port 0
    """
    import asyncio

    from midstream.api.bootstrap import check_policies
    from midstream.api.cli.up.cluster import ClusterPlan, local_cluster
    from midstream.api.cli.up.until import until_signal

    settings = globals_of(context).settings(
        engine=engine, gateway_port=gateway_port, admin_port=admin_port, sim_time_scale=time_scale, autoscale=autoscale
    )
    check_policies(settings)
    count = _count(settings) if instances is None else instances
    plan = ClusterPlan(sizes=parse_sizes(sizes) or (None,) * count, controllers=controllers)
    cluster = local_cluster(settings, plan, say)
    raise typer.Exit(asyncio.run(until_signal(cluster, lambda running: _announce(running, output))))


def _count(settings: Settings) -> int:
    """How many instances there are at first."""
    if settings.autoscale is not None:
        return int(settings.autoscale.partition(":")[0])
    return DEFAULT_INSTANCES[settings.engine]


def parse_sizes(text: str | None) -> tuple[int, ...]:
    """Read `400,200,200`. Raises `BadParameter`."""
    try:
        sizes = tuple(int(part) for part in (text or "").split(",") if part.strip())
    except ValueError:
        sizes = (0,)
    if any(size < 1 for size in sizes):
        raise typer.BadParameter(f"sizes are numbers of blocks like 400,200,200, not {text!r}")
    return sizes


def _announce(cluster: LocalCluster, output: Output) -> None:
    state = cluster.state
    if output is Output.table:
        show_items(_rows(state), [column("what"), column("where"), column("pid")], output)
        say("ready; Ctrl-C ends it")
    else:
        line({"ready": True, "service": "up", "gateway": state.gateway, "admin": state.admin, "pid": state.pid})


def _rows(state: UpState) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = [
        {"what": "OpenAI API", "where": f"{state.gateway}/v1"},
        {"what": "admin API", "where": f"{state.admin}/api/v1"},
        {"what": "archive", "where": state.database_url},
    ]
    return rows + [{"what": process.name, "where": process.address, "pid": process.pid} for process in state.processes]
