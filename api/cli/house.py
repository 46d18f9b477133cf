"""Commands about the installation itself: settings, doctor, database, keys."""

from __future__ import annotations

from typing import Annotated

import typer

from midstream.api.cli.context import globals_of
from midstream.api.cli.output import Output, OutputOption, column, say, show_item, show_items, write
from midstream.control.errors import MidstreamError

PANEL = "House"


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command(rich_help_panel=PANEL)(settings)
    app.command(rich_help_panel=PANEL)(doctor)
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
    """Check settings, Redis, archive, secret and ports; exit 1 if something is wrong."""
    import asyncio

    from midstream.api.cli.doctor import checks

    found = asyncio.run(checks(globals_of(context).settings()))
    show_items(found, [column("check"), column("ok"), column("detail")], output)
    bad = [check["check"] for check in found if not check["ok"]]
    if bad:
        raise MidstreamError(f"not in order: {', '.join(bad)}")


def _database() -> typer.Typer:
    group = typer.Typer(name="db", help="The archive's database.")

    @group.command()
    def upgrade(context: typer.Context) -> None:
        """Create or upgrade the tables of the archive.

        Example: MIDSTREAM_DATABASE_URL=postgresql://… midstream db upgrade
        """
        from midstream.api.bootstrap import upgrade_database

        settings = globals_of(context).settings()
        if settings.database_url is None:
            settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        say(f"the archive is at revision {upgrade_database(settings.archive_url)}")

    @group.command("status")
    def status(context: typer.Context, output: OutputOption = Output.table) -> None:
        """Show the revision of the tables and the newest one."""
        from midstream.migrations.schema import current, head

        url = globals_of(context).settings().archive_url
        show_item({"revision": current(url), "newest": head()}, output)

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

        Scopes: read, migrate, replay, admin, generate.

        Example: midstream keys create oncall --scope read --scope migrate
        """
        from midstream.api.keys import create_key

        text, key = create_key(name, tuple(scope or ["read"]))
        show_item({"key": text, "MIDSTREAM_API_KEYS": key.line()}, output)
        say("keep the key now: it is stored nowhere")

    return group
