"""Ends the Valkey that an `up` which was killed hard left running: two servers on one append-only file destroy it."""

from __future__ import annotations

from pathlib import Path

import redis

from midstream.api.cli.up.state import last_state

TIMEOUT_S = 2.0


def end_leftover_valkey(data_dir: Path) -> None:
    """End it if it still runs; nothing that is not ours is touched. Call only while holding the folder's lock."""
    state = last_state(data_dir)
    if state is None:
        return
    pids = [process.pid for process in state.processes if process.kind == "valkey"]
    client = redis.Redis.from_url(
        state.redis_url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=None
    )
    with client:
        try:
            is_ours = client.info("server")["process_id"] in pids
            directory = client.config_get("dir").get("dir")
        except redis.RedisError:
            return
        if is_ours and Path(str(directory)) == data_dir / "valkey":
            client.shutdown()
