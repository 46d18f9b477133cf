"""A crash of Valkey in which what it acknowledged survives."""

from __future__ import annotations

import time
from typing import Final

import redis

from midstream.control.adapters.local_valkey import LocalValkey

PATIENCE_S: Final = 30.0
POLL_S: Final = 0.005
UNWRITTEN: Final = ("aof_buffer_length", "aof_rewrite_in_progress", "aof_rewrite_scheduled")


def until_written(server: LocalValkey) -> None:
    """Wait until all that `server` acknowledged is in its append-only file, and no rewrite of that is under way.

    With `appendfsync everysec` it holds writes back for up to two seconds while the last fsync is still going on.
    """
    deadline = time.monotonic() + PATIENCE_S
    with redis.Redis.from_url(server.url) as client:
        while any(client.info("persistence")[name] for name in UNWRITTEN):
            assert time.monotonic() < deadline, "the append-only file is not written"
            time.sleep(POLL_S)


def crash(server: LocalValkey) -> None:
    """Kill it at once, after `until_written`."""
    until_written(server)
    server.kill()
