"""Commands that are the processes of a cluster. Each prints one JSON line on stdout when it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from midstream.api.cli.context import globals_of

if TYPE_CHECKING:
    from midstream.api.settings import Settings

PANEL = "Processes"
Supervised = Annotated[bool, typer.Option("--supervised", hidden=True)]
Name = Annotated[str | None, typer.Option(help="Name of this process. [default: the host's name]")]
Engine = Annotated[str | None, typer.Option(help="sim or vllm.")]
Host = Annotated[str | None, typer.Option(help="Interface to listen on.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")]


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (controller, archiver, worker, scaler, llumlet, gateway, admin):
        app.command(rich_help_panel=PANEL)(command)


def controller(context: typer.Context, name: Name = None, supervised: Supervised = False) -> None:
    """Fold the log, decide, commit. Run as many as you like.

    Example: MIDSTREAM_REDIS_URL=redis://10.0.0.5 midstream controller
    """
    _run("controller", globals_of(context).settings(name=name), supervised)


def archiver(context: typer.Context, name: Name = None, supervised: Supervised = False) -> None:
    """Copy the log into the archive and trim what is safely there."""
    _run("archiver", globals_of(context).settings(name=name), supervised)


def worker(context: typer.Context, name: Name = None, supervised: Supervised = False) -> None:
    """Run slow jobs (replays) that the admin API queued."""
    from midstream.api.bootstrap import name_of
    from midstream.api.process import announce
    from midstream.api.processes import run_jobs, wait_for_log

    settings = globals_of(context).settings(name=name)
    settings.require_redis()
    _prepare(settings, supervised)
    import midstream.control.jobs  # noqa: F401 - ready means loaded

    if wait_for_log(settings):
        announce("worker", name_of(settings), None)
        run_jobs(settings)


def scaler(
    context: typer.Context,
    name: Name = None,
    command: Annotated[str | None, typer.Option(help="Run as `COMMAND add|remove INSTANCE SCALING`.")] = None,
    webhook: Annotated[str | None, typer.Option(help="Post to this URL instead.")] = None,
    supervised: Supervised = False,
) -> None:
    """Start and end instances as the controllers decide, by the orchestrator's own means. `up --autoscale` has its own.

    Example: midstream scaler --command ./scale.sh
    """
    settings = globals_of(context).settings(name=name, scale_command=command, scale_webhook=webhook)
    _run("scaler", settings, supervised)


def llumlet(
    context: typer.Context,
    name: Name = None,
    engine: Engine = None,
    blocks: Annotated[int | None, typer.Option(help="KV blocks of the engine.")] = None,
    supervised: Supervised = False,
) -> None:
    """Run one engine instance.

    Example: midstream llumlet --name i7 --blocks 2000
    """
    settings = globals_of(context).settings(name=name, engine=engine)
    if blocks is not None:
        settings = globals_of(context).settings(name=name, engine=engine, **{f"{settings.engine}_blocks": blocks})
    _run("llumlet", settings, supervised)


def gateway(
    context: typer.Context,
    name: Name = None,
    engine: Engine = None,
    host: Host = None,
    port: Port = None,
    supervised: Supervised = False,
) -> None:
    """Serve the OpenAI API.

    Example: midstream gateway --host 127.0.0.1 --port 8000
    """
    settings = globals_of(context).settings(name=name, engine=engine, gateway_host=host, gateway_port=port)
    _run("gateway", settings, supervised)


def admin(
    context: typer.Context, name: Name = None, host: Host = None, port: Port = None, supervised: Supervised = False
) -> None:
    """Serve the admin API."""
    settings = globals_of(context).settings(name=name, admin_host=host, admin_port=port)
    _run("admin", settings, supervised)


def _run(kind: str, settings: Settings, supervised: bool) -> None:
    from midstream.api.bootstrap import name_of
    from midstream.api.process import run_service
    from midstream.api.processes import service_of

    _prepare(settings, supervised)
    raise typer.Exit(run_service(kind, name_of(settings), service_of(kind, settings), settings.health_file))


def _prepare(settings: Settings, supervised: bool) -> None:
    from midstream.api.process import configure_logging, die_with_parent

    if supervised:
        die_with_parent()
    configure_logging(settings.log_level, settings.log_format)
