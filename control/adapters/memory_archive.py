"""The archive in memory, for simulation: the same promises as the one in SQL, held to the same contract suite."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from midstream.control.adapters.archive_rows import (
    PAGE_MAX,
    FactRow,
    Identity,
    Row,
    check_count,
    check_places,
    rows_of,
)
from midstream.control.codec import decode_state, decode_stored
from midstream.control.events import Entry
from midstream.control.fold import fold
from midstream.control.ids import START, Position
from midstream.control.ports import Hole
from midstream.control.state import SourceMark, State


class MemoryArchive:
    """Implements `Archive`. Not bounded: it lives as long as one simulation."""

    def __init__(self) -> None:
        self._facts: dict[Identity, FactRow] = {}
        self._places: dict[Position, Row] = {}
        """What stands where in the log; the fact of a repeat is in `_facts` at its first place."""
        self._order: list[Position] = []
        self._snapshots: dict[Position, bytes] = {}
        self._position = START

    async def store(self, entries: Sequence[Entry]) -> None:
        """See `Archive.store`."""
        facts, dead = rows_of(entries)
        check_places(facts, self._identity_at)
        rows: list[Row] = [*facts, *dead]
        for row in rows:
            if row.position not in self._places:
                self._places[row.position] = row
                self._order.insert(bisect_right(self._order, row.position), row.position)
            if isinstance(row, FactRow):
                self._facts.setdefault(row.identity, row)
        if entries:
            self._position = max(self._position, entries[-1].position)

    async def position(self) -> Position:
        """See `Archive.position`."""
        return self._position

    async def read(
        self,
        after: Position,
        count: int = 500,
        *,
        kind: str | None = None,
        request: str | None = None,
        migration: str | None = None,
        instance: str | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
    ) -> list[Entry]:
        """See `Archive.read`."""
        check_count(count)
        fits = (
            row
            for row in self._first_places(after)
            if kind in (None, row.kind)
            and request in (None, row.request)
            and migration in (None, row.migration)
            and instance in (None, row.instance)
            and (since_ms is None or row.at_ms >= since_ms)
            and (until_ms is None or row.at_ms <= until_ms)
        )
        return [_entry(row) for row in islice(fits, count)]

    async def history(self, after: Position, count: int = 500, *, upto: Position | None = None) -> list[Entry]:
        """See `Archive.history`."""
        check_count(count)
        places = (place for place in self._behind(after) if upto is None or place <= upto)
        return [_entry(self._places[place]) for place in islice(places, count)]

    async def holes(self) -> list[Hole]:
        """See `Archive.holes`."""
        holes: list[Hole] = []
        before: tuple[str, int, int] = ("", 0, 0)
        for source, incarnation, seq in sorted(self._facts):
            last = before[2] if before[:2] == (source, incarnation) else 0
            if seq > last + 1:
                holes.append(Hole(source, incarnation, last + 1, seq - 1))
            before = (source, incarnation, seq)
        return holes

    async def marks(self) -> dict[str, SourceMark]:
        """See `Archive.marks`."""
        return {source: SourceMark(incarnation, seq) for source, incarnation, seq in sorted(self._facts)}

    async def counts(self) -> dict[str, int]:
        """See `Archive.counts`."""
        return dict(sorted(Counter(row.kind for row in self._facts.values()).items()))

    async def story(self, request: str) -> list[Entry]:
        """See `Archive.story`."""
        moves = {row.migration for row in self._facts.values() if row.request == request} - {None}
        rows = (r for r in self._first_places(START) if r.request == request or r.migration in moves)
        return [_entry(row) for row in islice(rows, PAGE_MAX)]

    async def state_at(self, position: Position) -> State:
        """See `Archive.state_at`."""
        near = max((place for place in self._snapshots if place <= position), default=None)
        state = None if near is None else decode_state(self._snapshots[near])
        places = (place for place in self._behind(near or START) if place <= position)
        return fold((_entry(self._places[place]) for place in places), state)

    async def position_at(self, at_ms: int) -> Position:
        """See `Archive.position_at`."""
        earlier = [(row.at_ms, row.position) for row in self._facts.values() if row.at_ms <= at_ms]
        return max(earlier)[1] if earlier else START

    async def save_snapshot(self, position: Position, state: bytes) -> None:
        """See `Archive.save_snapshot`."""
        self._snapshots.setdefault(position, state)

    async def close(self) -> None:
        """Nothing to give up."""

    def _identity_at(self, position: Position) -> Identity | None:
        row = self._places.get(position)
        return row.identity if isinstance(row, FactRow) else None

    def _behind(self, after: Position) -> Iterable[Position]:
        return islice(self._order, bisect_right(self._order, after), None)

    def _first_places(self, after: Position) -> Iterable[FactRow]:
        for place in self._behind(after):
            row = self._places[place]
            if isinstance(row, FactRow) and self._facts[row.identity] is row:
                yield row


def _entry(row: Row) -> Entry:
    return Entry(row.position, decode_stored(row.body.encode()))
