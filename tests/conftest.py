"""Real servers for tests, each started once per run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from midstream.control.adapters.local_valkey import LocalValkey

pytest_plugins = ["tests.databases"]


@pytest.fixture(autouse=True)
def plain_logging() -> Iterator[None]:
    """A command that a test runs in its own process sends logs to that test's stderr, which the next ones lack."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalValkey]:
    """A Valkey shared by all tests; take `cluster` too and touch only its keys."""
    server = LocalValkey(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[LocalValkey]:
    """A Valkey of this test's own, to be killed, filled and flushed."""
    server = LocalValkey(tmp_path / "valkey")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> str:
    """A cluster name that no other test has."""
    return hashlib.blake2b(request.node.nodeid.encode(), digest_size=8).hexdigest()
