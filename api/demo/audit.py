"""What the archive says about a demo: moves by reason, downtime, and whether every decision can be derived again."""

from __future__ import annotations

from collections import Counter

import msgspec

from midstream.control.adapters.sql_store import ArchiveStore
from midstream.control.events import (
    DowntimeMeasured,
    Entry,
    MigrationAborted,
    MigrationAdopted,
    MigrationCommitted,
    MoveDecided,
    MoveRejected,
    RequestFailed,
    TaskFailed,
)
from midstream.control.replay import each_once, verify


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are of facts; times in milliseconds."""

    facts: int
    moves_by_reason: dict[str, int]
    """Committed moves by the policy that decided them."""
    refused_by_code: dict[str, int]
    """Moves that were decided and given up before anything changed hands, and orders that were rejected."""
    downtime_ms: tuple[float, ...]
    downtime_steps: tuple[float, ...]
    """The same in decode steps: divided by the request's own mean gap."""
    freeze_to_adopt_ms: tuple[float, ...]
    requests_failed: int
    task_failures: tuple[str, ...]
    holes: tuple[str, ...]
    decisions: int
    decisions_equal: int
    first_difference: str | None


def audit(store: ArchiveStore) -> Audit:
    """Read the whole archive once and derive every decision again."""
    entries = list(store.iterate())
    report = verify(entries)
    once = list(each_once(entries))
    events = [entry.fact.event for entry in once]
    measured = [event for event in events if isinstance(event, DowntimeMeasured)]
    adopted = [event.freeze_to_adopt_ms for event in events if isinstance(event, MigrationAdopted)]
    return Audit(
        facts=len(once),
        moves_by_reason=_moves_by_reason(once),
        refused_by_code=dict(
            Counter(event.code for event in events if isinstance(event, MigrationAborted | MoveRejected))
        ),
        downtime_ms=tuple(sorted(event.downtime_ms for event in measured)),
        downtime_steps=tuple(
            sorted(event.downtime_ms / event.normal_gap_ms for event in measured if event.normal_gap_ms > 0)
        ),
        freeze_to_adopt_ms=tuple(sorted(ms for ms in adopted if ms is not None)),
        requests_failed=sum(isinstance(event, RequestFailed) for event in events),
        task_failures=tuple(f"{e.task}: {e.error}" for e in events if isinstance(e, TaskFailed)),
        holes=tuple(map(str, store.holes())),
        decisions=report.decisions,
        decisions_equal=report.equal,
        first_difference=None if report.first_difference is None else report.first_difference.explanation,
    )


def _moves_by_reason(entries: list[Entry]) -> dict[str, int]:
    decided: dict[str, str] = {}
    committed: Counter[str] = Counter()
    for entry in entries:
        match entry.fact.event:
            case MoveDecided() as event:
                decided[event.migration] = event.policy
            case MigrationCommitted() as event:
                committed[decided.get(event.migration, "unknown")] += 1
    return dict(committed)


def percentile(ordered: tuple[float, ...], share: float) -> float | None:
    """The nearest-rank percentile of sorted values, `None` of nothing."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]
