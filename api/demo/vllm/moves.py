"""Orders moves through the admin API and learns from the facts what became of them. Blocking: call it in a thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from midstream.api.cli.client import AdminClient
from midstream.control.errors import MidstreamError
from midstream.migration.plan import LIVE

POLL_S = 0.05
APPEARS_S = 10.0
ENDS_S = 60.0
Answer = TypeVar("Answer")


class Seam(msgspec.Struct, frozen=True, kw_only=True):
    """One committed move. The target's first own token is output token `index`. Times in milliseconds."""

    index: int
    source: str
    target: str
    mode: str
    rounds: int
    copied_bytes: int
    freeze_to_adopt_ms: float | None
    downtime_ms: float
    """The gap at the seam less the ordinary one, as the gateway saw it."""
    normal_gap_ms: float


def owner_of_only_request(admin: AdminClient) -> str:
    """The instance that runs the one live request. Raises `MidstreamError`."""
    return str(_until(lambda: next(admin.items("/requests", limit=1), None))["owner"]["instance"])


def move_only_request(admin: AdminClient, mode: str = LIVE) -> Seam:
    """Move the one live request to the other instance. Raises `MidstreamError` if that did not happen."""
    request = _until(lambda: next(admin.items("/requests", limit=1), None))
    source = request["owner"]["instance"]
    others = [one["instance"] for one in admin.items("/instances") if one["instance"] != source]
    order = admin.post("/migrations", {"request": request["request"], "target": others[0], "mode": mode})
    done = admin.finished(order["operation"], ENDS_S)
    if done["status"] != "succeeded":
        raise MidstreamError(f"a move was given up: {done['detail']} ({done['code']})")
    return _seam(admin, done["migration"], mode, request["prompt_tokens"])


def _seam(admin: AdminClient, migration: str, mode: str, prompt_tokens: int) -> Seam:
    """A committed move from its facts, once the archive has the last of them."""
    entries = _until(lambda: _whole_story(admin, migration))
    rounds = [entry["event"] for entry in entries if entry["kind"] == "RoundCopied"]
    facts = {entry["kind"]: entry["event"] for entry in entries}
    return Seam(
        index=facts["RequestFrozen"]["tokens"] - prompt_tokens,
        source=facts["MigrationStarted"]["source"]["instance"],
        target=facts["MigrationCommitted"]["owner"]["instance"],
        mode=mode,
        rounds=len(rounds),
        copied_bytes=sum(one["copied_bytes"] for one in rounds),
        freeze_to_adopt_ms=facts["MigrationAdopted"]["freeze_to_adopt_ms"],
        downtime_ms=facts["DowntimeMeasured"]["downtime_ms"],
        normal_gap_ms=facts["DowntimeMeasured"]["normal_gap_ms"],
    )


def _whole_story(admin: AdminClient, migration: str) -> list[dict[str, Any]]:
    entries = list(admin.items("/events", migration=migration))
    return entries if any(entry["kind"] == "DowntimeMeasured" for entry in entries) else []


def _until(ask: Callable[[], Answer | None]) -> Answer:
    """Ask again until there is an answer. Raises `MidstreamError` after `APPEARS_S`."""
    deadline = time.monotonic() + APPEARS_S
    while not (found := ask()):
        if time.monotonic() > deadline:
            raise MidstreamError("the cluster's log does not show what the demo waits for")
        time.sleep(POLL_S)
    return found
