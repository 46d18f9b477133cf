"""Operator commands over the admin REST API: instances, requests, migrations, scalings, events, state, policies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from midstream.api.cli.checks import finite, quoted
from midstream.api.cli.context import admin_of
from midstream.api.cli.explain import show_move, show_request
from midstream.api.cli.output import Output, OutputOption, column, line, show_item, show_items
from midstream.control.errors import MidstreamError

if TYPE_CHECKING:
    from midstream.api.cli.client import AdminClient

PANEL = "Operators"
WAIT_S = 60.0
EVENTS_SHOWN = 20
MOVE_ENDS = frozenset({"MigrationReleased", "MigrationAborted", "CommandRefused"})

Limit = Annotated[int | None, typer.Option(min=1, help="At most so many.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the outcome.")]
Mode = Annotated[
    Literal["live", "blocking", "recompute"],
    typer.Option(help="Copy KV while the request decodes on, once it is frozen, or not at all."),
]
Timeout = Annotated[float, typer.Option(callback=finite, min=0.1, help="How long to wait, seconds.")]

INSTANCES = (
    column("instance"), column("health"), column("draining", "is_draining"), column("running", "load.running"),
    column("waiting", "load.waiting"), column("free", "load.blocks_free"), column("blocks", "blocks_total"),
    column("address"),
)  # fmt: skip
REQUESTS = (
    column("request"), column("instance", "owner.instance"), column("epoch"), column("prompt", "prompt_tokens"),
    column("tokens"), column("blocks"), column("waiting", "is_waiting"), column("moves"), column("migration"),
)  # fmt: skip
MIGRATIONS = (
    column("migration"), column("request"), column("source", "source.instance"), column("target", "target.instance"),
    column("mode"), column("policy"), column("stage"), column("rounds"), column("blocks", "copied_blocks"),
    column("downtime ms", "downtime_ms"), column("code"), column("reason"),
)  # fmt: skip
SCALINGS = (
    column("scaling"), column("action"), column("instance"), column("status"), column("decided at ms", "decided_at_ms"),
    column("ended at ms", "ended_at_ms"), column("policy"), column("code"), column("reason"),
)  # fmt: skip
EVENTS = (column("position"), column("at_ms"), column("source"), column("kind"), column("event"))


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for group in (_instances(), _requests(), _migrations(), _scalings(), _events(), _state(), _policies()):
        app.add_typer(group, rich_help_panel=PANEL)


def _group(name: str, text: str) -> typer.Typer:
    return typer.Typer(name=name, help=text, no_args_is_help=False)


def _instances() -> typer.Typer:
    group = _group("instances", "Engine instances: list, drain.")

    @group.command("list")
    def listing(context: typer.Context, output: OutputOption = Output.table) -> None:
        """Show all instances and their load."""
        show_items(admin_of(context).items("/instances"), INSTANCES, output)

    @group.command()
    def get(context: typer.Context, instance: str, output: OutputOption = Output.table) -> None:
        """Show one instance."""
        show_item(admin_of(context).get(f"/instances/{quoted(instance)}"), output)

    @group.command()
    def drain(
        context: typer.Context, instance: str, wait: Wait = False, timeout: Timeout = WAIT_S,
        output: OutputOption = Output.table,
    ) -> None:  # fmt: skip
        """Move everything off an instance; it takes nothing new.

        Example: midstream instances drain i1 --wait
        """
        client = admin_of(context)
        _order(client, client.post(f"/instances/{quoted(instance)}/drain", {}), timeout if wait else None, output)

    @group.command()
    def undrain(context: typer.Context, instance: str, output: OutputOption = Output.table) -> None:
        """Let a draining instance take requests again."""
        client = admin_of(context)
        _order(client, client.post(f"/instances/{quoted(instance)}/undrain", {}), None, output)

    return group


def _requests() -> typer.Typer:
    group = _group("requests", "Requests in flight: list, explain.")

    @group.command("list")
    def listing(
        context: typer.Context,
        instance: Annotated[str | None, typer.Option(help="Only those on this instance.")] = None,
        limit: Limit = None,
        output: OutputOption = Output.table,
    ) -> None:
        """Show the requests in flight."""
        items = admin_of(context).items("/requests", limit=limit, instance=instance)
        show_items(items, REQUESTS, output)

    @group.command()
    def get(context: typer.Context, request: str, output: OutputOption = Output.table) -> None:
        """Show one request."""
        show_item(admin_of(context).get(f"/requests/{quoted(request)}"), output)

    @group.command()
    def explain(context: typer.Context, request: str, output: OutputOption = Output.table) -> None:
        """Say why a request is, or was, where it is: every dispatch, every move, every no.

        Example: midstream requests explain r-17
        """
        show_request(admin_of(context).get(f"/requests/{quoted(request)}/explain"), output)

    return group


def _migrations() -> typer.Typer:
    group = _group("migrations", "Moves of requests: list, start, watch, explain.")

    @group.command("list")
    def listing(context: typer.Context, limit: Limit = None, output: OutputOption = Output.table) -> None:
        """Show moves, open and closed."""
        show_items(admin_of(context).items("/migrations", limit=limit), MIGRATIONS, output)

    @group.command()
    def get(context: typer.Context, migration: str, output: OutputOption = Output.table) -> None:
        """Show one move."""
        show_item(admin_of(context).get(f"/migrations/{quoted(migration)}"), output)

    @group.command()
    def explain(context: typer.Context, migration: str, output: OutputOption = Output.table) -> None:
        """Say why a move was ordered: the rule, the candidates, what was refused and why.

        Example: midstream migrations explain m-1764579000123-17-0
        """
        show_move(admin_of(context).get(f"/migrations/{quoted(migration)}/explain"), output)

    @group.command()
    def start(
        context: typer.Context,
        request: str,
        to: Annotated[str | None, typer.Option(help="Target instance. [default: the controller chooses]")] = None,
        mode: Mode = "live",
        wait: Wait = True,
        timeout: Timeout = WAIT_S,
        output: OutputOption = Output.table,
    ) -> None:
        """Move a request now.

        Example: midstream migrations start r-17 --to i2 --mode blocking
        """
        client = admin_of(context)
        accepted = client.post("/migrations", {"request": request, "target": to, "mode": mode})
        _order(client, accepted, timeout if wait else None, output)

    @group.command()
    def watch(context: typer.Context, migration: Annotated[str | None, typer.Argument()] = None) -> None:
        """Follow all moves, or one until it ends, as JSON lines.

        Example: midstream migrations watch
        """
        _watch(admin_of(context), migration)

    return group


def _scalings() -> typer.Typer:
    group = _group("scalings", "Decisions that instances come or go.")

    @group.command("list")
    def listing(
        context: typer.Context,
        status: Annotated[str | None, typer.Option(help="open, done, failed, cancelled or dry_run.")] = None,
        limit: Limit = None,
        output: OutputOption = Output.table,
    ) -> None:
        """Show what was decided about the number of instances, why, and what came of it, newest first.

        Example: midstream scalings list --status failed
        """
        show_items(admin_of(context).items("/scalings", limit=limit, status=status), SCALINGS, output)

    @group.command()
    def get(context: typer.Context, scaling: str, output: OutputOption = Output.table) -> None:
        """Show one such decision."""
        show_item(admin_of(context).get(f"/scalings/{quoted(scaling)}"), output)

    return group


def _events() -> typer.Typer:
    group = _group("events", "The log of facts.")

    @group.command()
    def tail(
        context: typer.Context,
        follow: Annotated[bool, typer.Option("--follow/--no-follow", "-f", help="Go on as facts come.")] = False,
        after: Annotated[str | None, typer.Option(help="Begin behind this position (3-200).")] = None,
        kind: Annotated[str | None, typer.Option(help="Only facts of this kind.")] = None,
        request: Annotated[str | None, typer.Option(help="Only about this request.")] = None,
        migration: Annotated[str | None, typer.Option(help="Only about this move.")] = None,
        limit: Annotated[int, typer.Option(min=1, help="At most so many (not with --follow).")] = EVENTS_SHOWN,
        output: OutputOption = Output.table,
    ) -> None:
        """Show the newest facts of the log, or those behind a position; with --follow the coming ones as JSON lines.

        Example: midstream events tail --follow --kind MoveDecided -o jsonl
        """
        client = admin_of(context)
        chosen = {"kind": kind, "request": request, "migration": migration}
        if follow:
            for entry in client.stream("/events/stream", after=after, **chosen):
                line(entry)
        elif after is not None:
            show_items(client.items("/events", limit=limit, after=after, **chosen), EVENTS, output)
        else:
            show_items(_newest(client, limit, chosen), EVENTS, output)

    return group


def _state() -> typer.Typer:
    group = _group("state", "What the log adds up to.")

    @group.command()
    def show(
        context: typer.Context,
        at: Annotated[str | None, typer.Option(help="As of this position (3-200) instead of now.")] = None,
        output: OutputOption = Output.json,
    ) -> None:
        """Show the fold of the log, now or at any position.

        Example: midstream state show --at 3-500
        """
        show_item(admin_of(context).get("/state", at=at), output)

    return group


def _policies() -> typer.Typer:
    group = _group("policies", "Policies in force.")

    @group.command()
    def show(context: typer.Context, output: OutputOption = Output.table) -> None:
        """Show the policies in force."""
        show_item(admin_of(context).get("/policies"), output)

    @group.command("set")
    def change(
        context: typer.Context,
        changes: Annotated[list[str], typer.Argument(help="NAME=JSON, for example cooldown_ms=500.")],
        output: OutputOption = Output.table,
    ) -> None:
        """Change policies; the change is a fact.

        Example: midstream policies set cooldown_ms=500 'dispatch={"name":"round_robin"}'
        """
        from midstream.api.cli.overrides import apply_overrides

        client = admin_of(context)
        body = apply_overrides(client.get("/policies"), changes)
        show_item(client.put("/policies", body), output)

    return group


def _order(client: AdminClient, accepted: dict[str, Any], timeout_s: float | None, output: Output) -> None:
    """Show an accepted order, or wait for its outcome and fail if it failed."""
    if timeout_s is None:
        show_item(accepted, output)
        return
    outcome = client.finished(accepted["operation"], timeout_s)
    show_item(outcome, output)
    if outcome["status"] == "failed":
        raise MidstreamError(f"{outcome['detail'] or 'it failed'} ({outcome['code']})")


def _watch(client: AdminClient, migration: str | None) -> None:
    after = None if migration is None else client.get(f"/migrations/{quoted(migration)}")["decided_at"]
    for entry in client.stream("/events/stream", migration=migration, after=after):
        if "migration" in entry["event"]:
            line(entry)
        if migration is not None and entry["kind"] in MOVE_ENDS:
            return


def _newest(client: AdminClient, limit: int, chosen: dict[str, str | None]) -> Iterator[dict[str, Any]]:
    """The last facts that fit. Without a filter they are where the log ends; with one they must be looked for."""
    if any(chosen.values()):
        yield from deque(client.items("/events", limit=None, **chosen), maxlen=limit)
        return
    generation, _, seq = client.get("/health")["position"].partition("-")
    after = f"{generation}-{max(int(seq) - limit, 0)}"
    yield from client.items("/events", after=after, limit=limit)
