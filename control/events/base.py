"""What a fact is made of, and the registry of fact kinds.

A fact's wire name is its class's bare name. Fields are only ever added, with defaults; a changed
meaning is a new `VERSION` with an upcaster in `control.codec`.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

import msgspec

from midstream.control.ids import Position


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened. Subclasses are named in the past tense."""

    VERSION: ClassVar[int] = 1


class Fact(msgspec.Struct, frozen=True):
    """An event with who said it: (`source`, `incarnation`, `source_seq`) is its identity, unique for ever.

    `source_seq` starts at 1 for each incarnation and has no gaps. `at_ms` is the source's wall clock.
    """

    source: str
    incarnation: int
    source_seq: int
    at_ms: int
    event: Event


class Entry(msgspec.Struct, frozen=True):
    """A fact at its place in the log."""

    position: Position
    fact: Fact


EVENTS: dict[str, type[Event]] = {}
"""Every fact kind by its wire name."""

E = TypeVar("E", bound=type[Event])


def event(cls: E) -> E:
    """Class decorator: register a fact kind."""
    if cls.__name__ in EVENTS:
        raise TypeError(f"fact kind {cls.__name__} is registered twice")
    EVENTS[cls.__name__] = cls
    return cls
