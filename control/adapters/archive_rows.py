"""What both archives agree on: which columns a fact is found by, and which entries cannot be kept as facts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from midstream.control.codec import POISON_KIND, UnknownEvent, encode_fact
from midstream.control.errors import ArchiveForked, BadInput
from midstream.control.events import Entry, Event
from midstream.control.ids import Owner, Position

KEY_CHARS_MAX: Final = 512
"""Longest name that may be indexed; PostgreSQL refuses index entries over about 2,700 bytes."""

INTEGER_MAX: Final = 2**63 - 1

PAGE_MAX: Final = 10_000
"""Most entries that one read gives."""

INSTANCE_FIELDS: Final = ("instance", "owner", "source", "target")
"""Where an event names the instance it is filed under; the first that is there wins."""


Identity = tuple[str, int, int]
"""Source, incarnation, source_seq."""


class FactRow(NamedTuple):
    """One fact as both archives keep it."""

    generation: int
    seq: int
    source: str
    incarnation: int
    source_seq: int
    kind: str
    version: int
    at_ms: int
    request: str | None
    migration: str | None
    instance: str | None
    body: str

    @property
    def position(self) -> Position:
        """Its place in the log."""
        return Position(self.generation, self.seq)

    @property
    def identity(self) -> Identity:
        """What makes it this fact and no other."""
        return self.source, self.incarnation, self.source_seq


class DeadLetter(NamedTuple):
    """An entry that cannot be kept as a fact, and why."""

    generation: int
    seq: int
    error: str
    body: str

    @property
    def position(self) -> Position:
        """Its place in the log."""
        return Position(self.generation, self.seq)


Row = FactRow | DeadLetter


def row_of(entry: Entry) -> Row:
    """The row of one log entry."""
    fact, event = entry.fact, entry.fact.event
    body = encode_fact(fact).decode()
    kind, version = _kind(event)
    request, migration, instance = _subjects(event)
    row = FactRow(
        generation=entry.position.generation, seq=entry.position.seq, source=fact.source,
        incarnation=fact.incarnation, source_seq=fact.source_seq, kind=kind, version=version, at_ms=fact.at_ms,
        request=request, migration=migration, instance=instance, body=body,
    )  # fmt: skip
    error = _error(row)
    return DeadLetter(*entry.position, error, body) if error else row


def rows_of(entries: Sequence[Entry]) -> tuple[list[FactRow], list[DeadLetter]]:
    """The rows of a batch, facts and dead letters apart, each in log order."""
    rows = [row_of(entry) for entry in entries]
    return [r for r in rows if isinstance(r, FactRow)], [r for r in rows if isinstance(r, DeadLetter)]


def check_places(rows: Sequence[FactRow], taken: Callable[[Position], Identity | None]) -> list[FactRow]:
    """The rows whose places are free. Raises `ArchiveForked` if a place is taken by another fact."""
    free = []
    for row in rows:
        identity = taken(row.position)
        if identity is None:
            free.append(row)
        elif identity != row.identity:
            raise ArchiveForked(f"position {row.position} is archived as {identity}, the log now shows {row.identity}")
    return free


def check_count(count: int) -> None:
    """Raises `BadInput` unless 1 <= count <= `PAGE_MAX`."""
    if not 1 <= count <= PAGE_MAX:
        raise BadInput(f"count must be 1 to {PAGE_MAX}, not {count}")


def _kind(event: Event) -> tuple[str, int]:
    if isinstance(event, UnknownEvent):
        return event.kind, event.version
    return type(event).__name__, event.VERSION


def _error(row: FactRow) -> str | None:
    if row.kind == POISON_KIND:
        return "not a fact"
    names = (row.source, row.kind, row.request, row.migration, row.instance)
    if any(name is not None and (len(name) > KEY_CHARS_MAX or "\0" in name) for name in names):
        return f"a name in it has a NUL or is longer than {KEY_CHARS_MAX} characters"
    numbers = (row.incarnation, row.source_seq, row.at_ms, row.version)
    if any(not 0 <= number <= INTEGER_MAX for number in numbers):
        return "a number in it is negative or has more than 63 bits"
    return None


Subjects = tuple[str | None, str | None, str | None]
_finders: dict[type[Event], Callable[[Any], Subjects]] = {}


def _subjects(event: Event) -> Subjects:
    finder = _finders.get(type(event))
    if finder is None:
        finder = _finders[type(event)] = _finder(type(event))
    return finder(event)


def _finder(cls: type[Event]) -> Callable[[Any], Subjects]:
    fields = cls.__struct_fields__
    instance_field = next((name for name in INSTANCE_FIELDS if name in fields), None)

    def find(event: Any) -> Subjects:
        instance = getattr(event, instance_field) if instance_field else None
        return (
            event.request if "request" in fields else None,
            event.migration if "migration" in fields else None,
            instance.instance if isinstance(instance, Owner) else instance,
        )

    return find
