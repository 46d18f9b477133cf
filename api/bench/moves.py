"""One ordered move of a stream, measured: what its client saw, and what the facts say of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, Final

import msgspec

from midstream.api.bench.streams import Stream
from midstream.api.cli.client import AdminClient
from midstream.control.errors import MidstreamError

NEAR: Final = 12
"""Gaps before the order, and as many behind the seam, that say what is normal: half of them on either engine."""
SETTLE: Final = 3
"""Tokens behind a seam that count for nothing."""
EARLIEST: Final = 12
"""Tokens after the order before anybody is asked how the move went: questions take time of the same cores."""
APPEARS_S: Final = 15.0
POLL_S: Final = 0.1
MS: Final = 1_000
LAST_FACTS: Final = frozenset({"DowntimeMeasured", "MigrationReleased"})
TERMINAL: Final = frozenset({"succeeded", "failed"})


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """One move. Times in milliseconds; `source_slowdown` is None where nothing decoded while bytes moved."""

    normal_gap_ms: float
    gap_ms: float
    """The longest gap from the last token that the source delivered itself to the first that the target made."""
    rounds: int
    copied_bytes: int
    freeze_to_adopt_ms: float | None
    source_slowdown: float | None
    total_ms: float

    @property
    def extra_ms(self) -> float:
        """What the move added to an ordinary gap."""
        return self.gap_ms - self.normal_gap_ms


async def move(admin: AdminClient, stream: Stream, mode: str, deadline_s: float) -> Moved:
    """Move the only live request to the other instance. Raises `MidstreamError` if that did not happen."""
    begun = len(stream.times_us)
    await stream.has(begun + SETTLE + NEAR, deadline_s)
    operation, migration = await asyncio.to_thread(_order, admin, mode), ""
    ordered = len(stream.times_us)
    deadline = time.monotonic() + deadline_s
    await _some_more(stream, ordered + EARLIEST)
    while not migration:
        migration = await asyncio.to_thread(_outcome, admin, operation)
        if time.monotonic() > deadline:
            raise MidstreamError(f"a move did not end within {deadline_s:g} s")
        await asyncio.sleep(POLL_S)
    facts = await asyncio.to_thread(_facts, admin, migration)
    seam = _seam(facts, stream)
    await stream.has(seam + 1 + SETTLE + NEAR, deadline_s)
    return measured(facts, stream, ordered=ordered, seam=seam)


async def _some_more(stream: Stream, outputs: int) -> None:
    """Keep quiet while the stream goes on as usual; a pause of its own ends this too."""
    while len(stream.times_us) < outputs:
        before = len(stream.times_us)
        await asyncio.sleep(POLL_S * 3)
        if stream.error is not None or len(stream.times_us) == before:
            return


def _order(admin: AdminClient, mode: str) -> str:
    """Order the move; return the operation."""
    request = next(admin.items("/requests", limit=1), None)
    if request is None:
        raise MidstreamError("there is no live request to move")
    source = request["owner"]["instance"]
    target = next(one["instance"] for one in admin.items("/instances") if one["instance"] != source)
    order = admin.post("/migrations", {"request": request["request"], "target": target, "mode": mode})
    return str(order["operation"])


def _outcome(admin: AdminClient, operation: str) -> str:
    """The move of an operation that has succeeded, empty while it runs. Raises `MidstreamError`."""
    found = admin.get(f"/operations/{operation}")
    if found["status"] == "failed":
        raise MidstreamError(f"a move was given up: {found['detail']} ({found['code']})")
    return str(found["migration"]) if found["status"] in TERMINAL else ""


def _facts(admin: AdminClient, migration: str) -> list[dict[str, Any]]:
    """All facts of a committed move, once the archive has the last of them. Raises `MidstreamError`."""
    deadline = time.monotonic() + APPEARS_S
    while True:
        facts = list(admin.items("/events", migration=migration))
        if {fact["kind"] for fact in facts} >= LAST_FACTS:
            return facts
        if time.monotonic() > deadline:
            raise MidstreamError(f"the archive does not show the end of {migration}")
        time.sleep(POLL_S)


def _one(facts: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(fact for fact in facts if fact["kind"] == kind)


def _seam(facts: Sequence[dict[str, Any]], stream: Stream) -> int:
    """Index of the target's first own token."""
    return int(_one(facts, "RequestFrozen")["event"]["tokens"]) - stream.prompt_tokens


def measured(facts: Sequence[dict[str, Any]], stream: Stream, *, ordered: int, seam: int) -> Moved:
    """The figures of a move that was ordered behind output token `ordered`; `seam` is the target's first."""
    rounds = [fact for fact in facts if fact["kind"] == "RoundCopied"]
    committed = _one(facts, "MigrationCommitted")
    around = range(seam - int(committed["event"]["tail_tokens"]), seam + 1)
    behind = seam + 1 + SETTLE
    before = [stream.gap_ms(index) for index in range(ordered - NEAR, ordered)]
    normal_ms = median([*before, *(stream.gap_ms(index) for index in range(behind, behind + NEAR))])
    return Moved(
        normal_gap_ms=normal_ms,
        gap_ms=max(stream.gap_ms(index) for index in around),
        rounds=len(rounds),
        copied_bytes=sum(fact["event"]["copied_bytes"] for fact in rounds),
        freeze_to_adopt_ms=_one(facts, "MigrationAdopted")["event"]["freeze_to_adopt_ms"],
        source_slowdown=_slowdown(facts, stream, seam, median(before)),
        total_ms=float(committed["at_ms"] - _one(facts, "MigrationStarted")["at_ms"]),
    )


def _slowdown(facts: Sequence[dict[str, Any]], stream: Stream, seam: int, before_ms: float) -> float | None:
    """Mean gap of the source's tokens made between the target's answer and the last live round, by its gap before."""
    live = [fact for fact in facts if fact["kind"] == "RoundCopied" and not fact["event"]["is_final"]]
    if not sum(fact["event"]["blocks"] for fact in live):
        return None
    begin, until = _one(facts, "MigrationPrepared")["at_ms"] * MS, live[-1]["at_ms"] * MS
    times = stream.times_us
    gaps = [stream.gap_ms(index) for index in range(1, seam) if times[index - 1] < until and begin < times[index]]
    return fmean(gaps) / before_ms if gaps and before_ms else None
