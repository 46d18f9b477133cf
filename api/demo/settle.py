"""The end of a demo: wait until nothing runs and everything is archived; what living instances still hold is a leak."""

from __future__ import annotations

import time
from typing import Any

from midstream.api.cli.client import AdminClient
from midstream.control.adapters.sql_store import ArchiveStore
from midstream.control.errors import MidstreamError
from midstream.control.ids import parse_position

SETTLE_S = 30.0


def settle(admin: AdminClient, database_url: str) -> tuple[str, ...]:
    """What is leaked. Raises `MidstreamError` when the archive lags behind the log for good."""
    deadline = time.monotonic() + SETTLE_S
    held = ["not asked yet"]
    while held and time.monotonic() < deadline:
        time.sleep(0.5)
        held = [_held(one) for one in admin.items("/instances") if _held(one)]
    _wait_archived(database_url, str(admin.get("/state")["position"]), deadline + SETTLE_S)
    return tuple(f"leak: {text}" for text in held)


def _held(instance: dict[str, Any]) -> str:
    if instance["health"] in {"lost", "stopped"}:
        return ""
    load = instance["load"]
    is_free = load["blocks_free"] == instance["blocks_total"] and not load["blocks_reserved"]
    is_idle = not load["running"] and not load["waiting"]
    return "" if is_free and is_idle else f"{instance['instance']} holds {load}"


def _wait_archived(database_url: str, position: str, deadline: float) -> None:
    wanted = parse_position(position)
    store = ArchiveStore(database_url)
    try:
        while store.position() < wanted:
            if time.monotonic() > deadline:
                raise MidstreamError(f"the archive ends at {store.position()}, the log at {wanted}")
            time.sleep(0.2)
    finally:
        store.close()
