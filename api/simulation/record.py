"""What a simulated fleet did, as its log and its engines tell: per request, per instance, per move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from midstream.control.codec import encode_fact
from midstream.control.events import (
    DowntimeMeasured,
    Entry,
    Event,
    LoadReported,
    MigrationAborted,
    MigrationCommitted,
    MigrationStarted,
    RequestFailed,
    RequestFinished,
)
from midstream.instance.engines.sim.run import Run

KV_SAMPLE_MS = 1_000
"""Loads of one instance are kept at most so often."""


class Bar:
    """One move on a time line. Milliseconds of the log's time; `ended_ms` is None while it is open."""

    __slots__ = ("ended_ms", "is_committed", "request", "source", "started_ms", "target")

    def __init__(self, request: str, source: str, target: str, started_ms: int) -> None:
        self.request = request
        self.source = source
        self.target = target
        self.started_ms = started_ms
        self.ended_ms: int | None = None
        self.is_committed = False


class FleetRecord:
    """Reads the log (`read`) and stands by every engine (`Witness`). Token times are those of the engines' steps."""

    def __init__(self, *, digests: bool) -> None:
        self.facts = 0
        self.finished: dict[str, RequestFinished] = {}
        self.failed: dict[str, RequestFailed] = {}
        self.token_s: dict[str, list[float]] = {}
        self.preemptions = 0
        self.preempted_s = 0.0
        """From losing its blocks until the next token, over all preemptions."""
        self.downtime_ms: list[float] = []
        self.bars: dict[str, Bar] = {}
        self.kv: dict[str, list[tuple[int, int]]] = {}
        """Per instance: (milliseconds, free blocks)."""
        self._stopped: dict[str, float] = {}
        self._digest = blake2b(digest_size=16) if digests else None
        self._readers: dict[type[Event], Callable[[int, Any], None]] = {
            LoadReported: self._load,
            RequestFinished: self._finished,
            RequestFailed: self._failed,
            MigrationStarted: self._started,
            MigrationCommitted: self._committed,
            MigrationAborted: self._aborted,
            DowntimeMeasured: self._measured,
        }

    @property
    def digest(self) -> str | None:
        """Over every fact in order, if it was asked for."""
        return None if self._digest is None else self._digest.hexdigest()

    @property
    def moves(self) -> int:
        """Moves that were committed."""
        return sum(bar.is_committed for bar in self.bars.values())

    # --- the log -----------------------------------------------------------------------------

    def read(self, entry: Entry) -> None:
        """The log's next entry."""
        self.facts += 1
        if self._digest is not None:
            self._digest.update(f"{entry.position} ".encode() + encode_fact(entry.fact))
        reader = self._readers.get(type(entry.fact.event))
        if reader is not None:
            reader(entry.fact.at_ms, entry.fact.event)

    def _load(self, at_ms: int, event: LoadReported) -> None:
        samples = self.kv.setdefault(event.owner.instance, [])
        if not samples or at_ms - samples[-1][0] >= KV_SAMPLE_MS:
            samples.append((at_ms, event.load.blocks_free))

    def _finished(self, at_ms: int, event: RequestFinished) -> None:
        self.finished[event.request] = event

    def _failed(self, at_ms: int, event: RequestFailed) -> None:
        self.failed[event.request] = event

    def _started(self, at_ms: int, event: MigrationStarted) -> None:
        self.bars[event.migration] = Bar(event.request, event.source.instance, event.target.instance, at_ms)

    def _committed(self, at_ms: int, event: MigrationCommitted) -> None:
        self._end(event.migration, at_ms).is_committed = True

    def _aborted(self, at_ms: int, event: MigrationAborted) -> None:
        if event.migration in self.bars:
            self._end(event.migration, at_ms)

    def _measured(self, at_ms: int, event: DowntimeMeasured) -> None:
        self.downtime_ms.append(event.downtime_ms)

    def _end(self, migration: str, at_ms: int) -> Bar:
        bar = self.bars[migration]
        bar.ended_ms = at_ms
        return bar

    # --- the engines -------------------------------------------------------------------------

    def stepped(self, runs: Sequence[Run], ends: Sequence[float]) -> None:
        """See `Witness.stepped`."""
        table = self.token_s
        for run in runs:
            request = run.spec.request
            if self._stopped:
                self.preempted_s += ends[0] - self._stopped.pop(request, ends[0])
            times = table.get(request)
            if times is None:
                times = table[request] = []
            times += ends

    def preempted(self, run: Run, at: float) -> None:
        """See `Witness.preempted`."""
        self.preemptions += 1
        self._stopped.setdefault(run.spec.request, at)
