"""Brings a database to a revision of the schema, from Python, without an alembic.ini."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from midstream.control.adapters.sql_engine import make_engine, transaction

UPGRADE_LOCK: Final = 0x6D696473
"""PostgreSQL advisory lock: of two upgrades at once, the second waits and finds nothing to do."""


def upgrade(url: str, revision: str = "head") -> str:
    """Create or upgrade the tables in one transaction; return the revision reached.

    Raises `BadInput` for a bad URL and `ArchiveUnavailable` if the database is away.
    """
    return _change(url, command.upgrade, revision)


def downgrade(url: str, revision: str) -> str:
    """Go back to an older revision (`base` drops every table, facts included). Raises as `upgrade`."""
    return _change(url, command.downgrade, revision)


def current(url: str) -> str | None:
    """The revision a database is at, `None` if it has no tables of ours. Raises as `upgrade`."""
    engine = make_engine(url)
    try:
        with transaction(engine) as connection:
            return _revision(connection)
    finally:
        engine.dispose()


def head() -> str:
    """The newest revision."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    assert revision is not None
    return revision


def _change(url: str, change: Callable[[Config, str], None], revision: str) -> str:
    engine = make_engine(url)
    try:
        with transaction(engine, writes=True) as connection:
            _lock(connection)
            config = _config()
            config.attributes["connection"] = connection
            change(config, revision)
            return _revision(connection) or "base"
    finally:
        engine.dispose()


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _lock(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": UPGRADE_LOCK})


def _config() -> Config:
    config = Config()
    # ConfigParser reads % as the start of an interpolation.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
