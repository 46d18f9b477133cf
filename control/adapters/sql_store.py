"""The archive in SQL, synchronous: for the archiver's writer thread, the admin API's readers and rq workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    FromClause,
    Table,
    func,
    or_,
    select,
    text,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from midstream.control.adapters.archive_rows import PAGE_MAX, FactRow, check_count, check_places, rows_of
from midstream.control.adapters.sql_engine import make_engine, transaction
from midstream.control.adapters.sql_schema import archive_position, dead_letters, facts, repeats, snapshots
from midstream.control.codec import decode_state, decode_stored, digest
from midstream.control.errors import BadInput
from midstream.control.events import Entry
from midstream.control.fold import fold
from midstream.control.ids import START, Position
from midstream.control.ports import Hole
from midstream.control.state import SourceMark, State

HISTORY_PAGE: Final = 2_000
"""Entries per query when a whole history is read."""


def is_behind(table: FromClause, position: Position) -> ColumnElement[bool]:
    """Rows of `table` behind a position."""
    return tuple_(table.c.generation, table.c.seq) > tuple_(*position)


def is_upto(table: FromClause, position: Position) -> ColumnElement[bool]:
    """Rows of `table` up to and including a position."""
    return tuple_(table.c.generation, table.c.seq) <= tuple_(*position)


class ArchiveStore:
    """The `Archive` port without the async: same methods, same errors, any number of threads and processes."""

    def __init__(self, url: str) -> None:
        """Connects at the first call. Raises `BadInput` for a bad URL."""
        self.engine = make_engine(url)
        insert = postgresql.insert if self.engine.dialect.name == "postgresql" else sqlite.insert
        self._inserts: dict[Table, Executable] = {
            table: insert(table).on_conflict_do_nothing() for table in (facts, repeats, dead_letters, snapshots)
        }

    def close(self) -> None:
        """Give up connections."""
        self.engine.dispose()

    def store(self, entries: Sequence[Entry]) -> None:
        """See `Archive.store`."""
        if not entries:
            return
        rows, dead = rows_of(entries)
        with transaction(self.engine, writes=True) as connection:
            if rows:
                done = connection.execute(self._inserts[facts], [row._asdict() for row in rows])
                if done.rowcount != len(rows):
                    self._keep_repeats(connection, rows)
            if dead:
                connection.execute(self._inserts[dead_letters], [letter._asdict() for letter in dead])
            _advance(connection, entries[-1].position)

    def position(self) -> Position:
        """See `Archive.position`."""
        with transaction(self.engine) as connection:
            row = connection.execute(select(archive_position.c.generation, archive_position.c.seq)).first()
        return START if row is None else Position(*row)

    def read(
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
        wanted = {"kind": kind, "request": request, "migration": migration, "instance": instance}
        query = select(facts.c.generation, facts.c.seq, facts.c.body).where(is_behind(facts, after))
        query = query.where(*(facts.c[name] == value for name, value in wanted.items() if value is not None))
        if since_ms is not None:
            query = query.where(facts.c.at_ms >= since_ms)
        if until_ms is not None:
            query = query.where(facts.c.at_ms <= until_ms)
        return self._entries(query.order_by(facts.c.generation, facts.c.seq).limit(count))

    def history(self, after: Position, count: int = 500, *, upto: Position | None = None) -> list[Entry]:
        """See `Archive.history`."""
        check_count(count)
        branches = []
        for table, body, source in (
            (facts, facts.c.body, facts),
            (repeats, facts.c.body, repeats.join(facts, _said_again())),
            (dead_letters, dead_letters.c.body, dead_letters),
        ):
            query = select(table.c.generation.label("generation"), table.c.seq.label("seq"), body.label("body"))
            query = query.select_from(source).where(is_behind(table, after))
            branches.append(query if upto is None else query.where(is_upto(table, upto)))
        return self._entries(union_all(*branches).order_by(text("generation"), text("seq")).limit(count))

    def iterate(self, after: Position = START, upto: Position | None = None) -> Iterator[Entry]:
        """The whole `history` behind `after`, page by page."""
        while page := self.history(after, HISTORY_PAGE, upto=upto):
            yield from page
            after = page[-1].position

    def length(self, upto: Position) -> int:
        """How many entries `iterate` gives up to a position."""
        tables = facts, repeats, dead_letters
        with transaction(self.engine) as connection:
            counts = [connection.execute(select(func.count()).where(is_upto(t, upto))).scalar_one() for t in tables]
        return sum(counts)

    def holes(self) -> list[Hole]:
        """See `Archive.holes`."""
        key = facts.c.source, facts.c.incarnation
        before = func.lag(facts.c.source_seq, 1, 0).over(partition_by=key, order_by=facts.c.source_seq)
        numbers = select(*key, facts.c.source_seq, before.label("before")).subquery()
        gaps = select(numbers.c.source, numbers.c.incarnation, numbers.c.before + 1, numbers.c.source_seq - 1)
        gaps = gaps.where(numbers.c.source_seq > numbers.c.before + 1)
        with transaction(self.engine) as connection:
            return sorted(Hole(*row) for row in connection.execute(gaps))

    def marks(self) -> dict[str, SourceMark]:
        """See `Archive.marks`."""
        key = facts.c.source, facts.c.incarnation
        query = select(*key, func.max(facts.c.source_seq)).group_by(*key).order_by(*key)
        with transaction(self.engine) as connection:
            return {source: SourceMark(incarnation, seq) for source, incarnation, seq in connection.execute(query)}

    def counts(self) -> dict[str, int]:
        """See `Archive.counts`."""
        query = select(facts.c.kind, func.count()).group_by(facts.c.kind).order_by(facts.c.kind)
        with transaction(self.engine) as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def dead_letters(self, count: int = 500) -> list[tuple[Position, str, str]]:
        """(position, error, body) of entries that could not be kept as facts, oldest first."""
        check_count(count)
        query = select(dead_letters).order_by(dead_letters.c.generation, dead_letters.c.seq).limit(count)
        with transaction(self.engine) as connection:
            rows = connection.execute(query).all()
        return [(Position(row.generation, row.seq), row.error, row.body) for row in rows]

    def story(self, request: str) -> list[Entry]:
        """See `Archive.story`."""
        moves = select(facts.c.migration).where(facts.c.request == request, facts.c.migration.is_not(None))
        query = select(facts.c.generation, facts.c.seq, facts.c.body)
        query = query.where(or_(facts.c.request == request, facts.c.migration.in_(moves)))
        return self._entries(query.order_by(facts.c.generation, facts.c.seq).limit(PAGE_MAX))

    def state_at(self, position: Position) -> State:
        """See `Archive.state_at`."""
        state = self._snapshot_before(position)
        after = START if state is None else state.position
        return fold(self.iterate(after, position), state)

    def position_at(self, at_ms: int) -> Position:
        """See `Archive.position_at`."""
        query = select(facts.c.generation, facts.c.seq).where(facts.c.at_ms <= at_ms)
        query = query.order_by(facts.c.at_ms.desc(), facts.c.generation.desc(), facts.c.seq.desc()).limit(1)
        with transaction(self.engine) as connection:
            row = connection.execute(query).first()
        return START if row is None else Position(*row)

    def save_snapshot(self, position: Position, state: bytes) -> None:
        """See `Archive.save_snapshot`."""
        row = {"generation": position.generation, "seq": position.seq}
        row |= {"digest": digest(state), "state": state.decode()}  # type: ignore[dict-item]
        with transaction(self.engine, writes=True) as connection:
            connection.execute(self._inserts[snapshots], [row])

    def _snapshot_before(self, position: Position) -> State | None:
        query = select(snapshots.c.state).where(is_upto(snapshots, position))
        query = query.order_by(snapshots.c.generation.desc(), snapshots.c.seq.desc()).limit(1)
        with transaction(self.engine) as connection:
            kept = connection.execute(query).scalar()
        if kept is None:
            return None
        try:
            return decode_state(kept.encode())
        except BadInput:  # written by another build: the facts are all there, folding them only takes longer
            return None

    def _keep_repeats(self, connection: Connection, rows: list[FactRow]) -> None:
        """Some rows were not new. Raises `ArchiveForked` if one's place is taken by another fact."""
        query = select(facts.c.generation, facts.c.seq, facts.c.source, facts.c.incarnation, facts.c.source_seq)
        query = query.where(tuple_(facts.c.generation, facts.c.seq) >= tuple_(*rows[0].position))
        stored = connection.execute(query.where(is_upto(facts, rows[-1].position)))
        taken = {Position(*row[:2]): (row[2], row[3], row[4]) for row in stored}
        again = check_places(rows, taken.get)
        if again:
            connection.execute(self._inserts[repeats], [_repeat(row) for row in again])

    def _entries(self, query: Executable) -> list[Entry]:
        with transaction(self.engine) as connection:
            rows = connection.execute(query).all()
        return [Entry(Position(row[0], row[1]), decode_stored(row[2].encode())) for row in rows]


def _advance(connection: Connection, position: Position) -> None:
    behind = tuple_(archive_position.c.generation, archive_position.c.seq) < tuple_(*position)
    values = {"generation": position.generation, "seq": position.seq}
    connection.execute(update(archive_position).where(behind).values(values))


def _said_again() -> ColumnElement[bool]:
    columns = "source", "incarnation", "source_seq"
    return tuple_(*(repeats.c[c] for c in columns)) == tuple_(*(facts.c[c] for c in columns))


def _repeat(row: FactRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("generation", "seq", "source", "incarnation", "source_seq")}
