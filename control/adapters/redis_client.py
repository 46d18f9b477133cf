"""The only place that builds Redis clients for the log, every option said (rules R2, R4, 2.10).

redis-py's defaults repeat a write whose reply was lost, and hang a blocking read for a minute.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError

from midstream.control.errors import BadInput, LogUnavailable

COMMAND_TIMEOUT_S: Final = 4.0
CONNECT_TIMEOUT_S: Final = 2.0
POOL_WAIT_S: Final = 4.0
COMMAND_CONNECTIONS_MAX: Final = 8
READER_CONNECTIONS_MAX: Final = 64
"""Blocking reads that one process may have open at once."""

BLOCK_MS_MAX: Final = 1_000
"""Longest single BLOCK; a longer wait is several of them."""

READ_GRACE_S: Final = 2.0
"""A blocking read that has not answered so long after its BLOCK is given up."""

SCHEMES: Final = ("redis", "rediss", "unix")


def command_settings() -> dict[str, Any]:
    """Options of clients that write or ask: no retry (R2); `COMMAND_TIMEOUT_S` is kept by the caller (R4)."""
    return {
        "max_connections": COMMAND_CONNECTIONS_MAX,
        "timeout": POOL_WAIT_S,
        "socket_timeout": None,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "retry_on_error": [],
        "health_check_interval": 0,
        "protocol": 2,
        "decode_responses": False,
        "client_name": "midstream-log",
    }


def reader_settings() -> dict[str, Any]:
    """Options of clients that block in reads: the caller's own deadline ends a dead read."""
    return command_settings() | {
        "max_connections": READER_CONNECTIONS_MAX,
        "client_name": "midstream-reader",
    }


def command_client(url: str) -> Redis:
    """A client for writes and short questions."""
    return _client(url, command_settings())


def reader_client(url: str) -> Redis:
    """A client for blocking reads and nothing else."""
    return _client(url, reader_settings())


def redacted(url: str) -> str:
    """The address without its password, for messages."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


def unavailable(error: RedisError | OSError, url: str) -> LogUnavailable:
    """What a failed call means to the caller, in one line."""
    return LogUnavailable(f"the log at {redacted(url)} {_what(error)}: {error}")


def _what(error: RedisError | OSError) -> str:
    if isinstance(error, OutOfMemoryError):
        return "is full"
    if isinstance(error, ReadOnlyError):
        return "is a read-only replica"
    if isinstance(error, BusyLoadingError):
        return "is still loading"
    return "refused" if isinstance(error, ResponseError) else "cannot be reached"


def _client(url: str, settings: dict[str, Any]) -> Redis:
    if urlsplit(url).scheme not in SCHEMES:
        raise BadInput(f"a Redis address looks like redis://host:6379/0, not {redacted(url)!r}")
    try:
        pool = BlockingConnectionPool.from_url(url, **settings)
    except ValueError as error:
        raise BadInput(f"bad Redis address {redacted(url)!r}: {error}") from error
    return Redis.from_pool(pool)
