"""Commands about the installation itself: settings, doctor, database, keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from midstream.api.cli.context import globals_of
from midstream.api.cli.output import Output, OutputOption, column, say, show_item, show_items, write
from midstream.control.errors import BadInput, MidstreamError

PANEL = "House"


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command(rich_help_panel=PANEL)(settings)
    app.command(rich_help_panel=PANEL)(doctor)
    app.command(rich_help_panel=PANEL)(health)
    app.add_typer(_database(), rich_help_panel=PANEL)
    app.add_typer(_keys(), rich_help_panel=PANEL)


def settings(
    context: typer.Context,
    markdown: Annotated[bool, typer.Option("--markdown/--no-markdown", help="Print the reference page.")] = False,
    output: OutputOption = Output.table,
) -> None:
    """Show every setting with the value in force.

    Example: MIDSTREAM_TICK_MS=50 midstream settings -o json
    """
    from midstream.api.cli import reference

    if markdown:
        write(reference.markdown().rstrip())
        return
    rows = reference.effective(globals_of(context).settings())
    show_items(rows, [column("setting"), column("value"), column("meaning")], output)


def doctor(context: typer.Context, output: OutputOption = Output.table) -> None:
    """Show what is set and check Redis, archive, secret and ports; exit 1 if something is wrong."""
    import asyncio

    from midstream.api.cli import reference
    from midstream.api.cli.doctor import checks

    asked = globals_of(context).settings()
    given = [row for row in reference.effective(asked) if row["set"]]
    found = asyncio.run(checks(asked))
    if output is Output.json:
        show_item({"settings": {row["setting"]: row["value"] for row in given}, "checks": found}, output)
    else:
        if output is Output.table:
            show_items(given, [column("setting"), column("value")], output)
        show_items(found, [column("check"), column("ok"), column("detail")], output)
    bad = [check["check"] for check in found if not check["ok"]]
    if bad:
        raise MidstreamError(f"not in order: {', '.join(bad)}")


def health(
    context: typer.Context,
    file: Annotated[Path | None, typer.Option(help="The file. [default: the setting `health_file`]")] = None,
) -> None:
    """Tell whether the process that keeps a file fresh is well: exit 0, or 1 with the reason. For health checks.

    Example: midstream health --file /run/midstream/health
    """
    from midstream.api.health import check

    path = file or globals_of(context).settings().health_file
    if path is None:
        raise BadInput("no health_file: set MIDSTREAM_HEALTH_FILE for the process, and for this check or say --file")
    found = check(path)
    write(f"{found.service} {found.name} is well (pid {found.pid})")


def _database() -> typer.Typer:
    group = typer.Typer(name="db", help="The archive's database.")

    @group.command()
    def upgrade(
        context: typer.Context,
        wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the database: `start_wait_ms`.")] = False,
    ) -> None:
        """Create or upgrade the tables of the archive.

        Example: MIDSTREAM_DATABASE_URL=postgresql://… midstream db upgrade
        """
        import asyncio

        from midstream.api.bootstrap import upgrade_database
        from midstream.api.waiting import until_there

        settings = globals_of(context).settings()
        if settings.database_url is None:
            settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)

        async def bring_up() -> str:
            return await asyncio.to_thread(upgrade_database, settings.archive_url)

        patience_s = settings.start_wait_ms / 1000
        reached = until_there(bring_up, patience_s, lambda reason: say(f"waiting: {reason}")) if wait else bring_up()
        say(f"the archive is at revision {asyncio.run(reached)}")

    @group.command("status")
    def status(
        context: typer.Context,
        check: Annotated[bool, typer.Option("--check/--no-check", help="Exit 1 unless they are the same.")] = False,
        output: OutputOption = Output.table,
    ) -> None:
        """Show the revision of the tables and the newest one."""
        from midstream.migrations.schema import current, head

        url = globals_of(context).settings().archive_url
        found, newest = current(url), head()
        show_item({"revision": found, "newest": newest}, output)
        if check and found != newest:
            raise MidstreamError("the tables are not at the newest revision: run `midstream db upgrade`")

    return group


def _keys() -> typer.Typer:
    group = typer.Typer(name="keys", help="Keys of the APIs.")

    @group.command()
    def create(
        name: Annotated[str, typer.Argument(help="Who will hold it.")],
        scope: Annotated[list[str] | None, typer.Option(help="What it may do. [default: read]")] = None,
        output: OutputOption = Output.table,
    ) -> None:
        """Make a key: it is shown this once, its hash is what the servers need.

        Scopes: read, migrate, replay, admin, generate; the class of what it generates: class-high, class-normal
        (if none is named), class-low.

        Example: midstream keys create oncall --scope read --scope migrate
        """
        from midstream.api.keys import create_key

        text, key = create_key(name, tuple(scope or ["read"]))
        show_item({"key": text, "MIDSTREAM_API_KEYS": key.line()}, output)
        say("keep the key now: it is stored nowhere")

    return group
