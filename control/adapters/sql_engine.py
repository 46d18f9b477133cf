"""The one place that builds SQLAlchemy engines: SQLite with WAL by default, PostgreSQL through psycopg 3."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from midstream.control.errors import ArchiveUnavailable, BadInput

BUSY_S: Final = 15
"""How long a SQLite writer waits for another process's transaction."""

CONNECT_S: Final = 5
WAL_RETRY_S: Final = 0.01
STATEMENT_MS: Final = 120_000
"""PostgreSQL gives up a statement after this; the longest is the search for holes in a big archive."""

POOL_MAX: Final = 4
DEAD_PEER: Final = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 20_000}
"""A PostgreSQL host that vanished is given up after about 20 s (P13); libpq would wait for ever."""


def parse_url(url: str) -> URL:
    """Read a database URL. Raises `BadInput` unless it is a SQLite file or a PostgreSQL database."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise BadInput(f"not a database URL: {error}") from error
    backend = parsed.get_backend_name()
    if backend == "sqlite" and parsed.database and parsed.database != ":memory:":
        return parsed.set(drivername="sqlite+pysqlite")
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    raise BadInput("a database URL looks like sqlite:///archive.db or postgresql://user@host/name")


def make_engine(url: str) -> Engine:
    """Build an engine. Connects to nothing yet. Raises `BadInput` for a bad URL or a missing driver."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite_engine(parsed)
    try:
        engine = create_engine(
            parsed, pool_size=POOL_MAX, max_overflow=0, pool_pre_ping=True, pool_timeout=CONNECT_S,
            connect_args={"connect_timeout": CONNECT_S, **DEAD_PEER},
        )  # fmt: skip
    except ImportError as error:
        raise BadInput("PostgreSQL needs psycopg: pip install 'midstream[postgres]'") from error
    event.listen(engine, "connect", _set_up_postgres)
    return engine


@contextmanager
def transaction(engine: Engine, *, writes: bool = False) -> Iterator[Connection]:
    """One transaction; raises `ArchiveUnavailable` for whatever the database answers but a result.

    A SQLite writer takes the write lock at once: a reader's lock cannot always be raised to one.
    """
    begin = "BEGIN IMMEDIATE" if writes else "BEGIN"
    try:
        with engine.connect().execution_options(sqlite_begin=begin) as connection, connection.begin():
            yield connection
    except (DBAPIError, PoolTimeout) as error:
        raise ArchiveUnavailable(_reason(error)) from error


def _sqlite_engine(url: URL) -> Engine:
    engine = create_engine(url, pool_size=POOL_MAX, max_overflow=0, connect_args={"timeout": BUSY_S})
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    # The driver's own BEGIN comes only before INSERT and never before DDL; transactions are opened by _begin_sqlite.
    connection.isolation_level = None
    _enter_wal(connection)
    connection.execute("PRAGMA synchronous=NORMAL").close()


def _enter_wal(connection: sqlite3.Connection) -> None:
    """Of several that change a new file's journal at once SQLite refuses all but one, without its busy wait."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").close()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= deadline:
                raise
            time.sleep(WAL_RETRY_S)


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("sqlite_begin", "BEGIN"))


def _set_up_postgres(connection: Any, _record: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET statement_timeout = {STATEMENT_MS}")
    connection.commit()


def _reason(error: DBAPIError | PoolTimeout) -> str:
    text = str(getattr(error, "orig", None) or error).strip().splitlines()
    reason = text[0][:300] if text else type(error).__name__
    if "no such table" in reason or "does not exist" in reason:
        return f"{reason}; has `midstream db upgrade` been run?"
    return reason
