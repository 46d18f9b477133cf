"""The ports of the control plane: what the shells need from outside, as protocols.

Each has one contract suite in `tests/contracts`, run on every adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from midstream.control.commands import Command
from midstream.control.events import Entry, Fact
from midstream.control.ids import Position
from midstream.control.state import SourceMark, State


class Clock(Protocol):
    """Wall clock. Deadlines inside one process use the event loop's own time instead."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        ...

    def now_us(self) -> int:
        """Microseconds since the Unix epoch: for durations across processes of one machine."""
        ...


class LogTail(msgspec.Struct, frozen=True):
    """Where the log begins and ends right now."""

    generation: int
    first: Position
    """Oldest entry still there; equals `next` when the stream is empty."""
    last: Position
    """Newest entry ever appended in this generation (it may be trimmed already)."""
    committed: Position
    """Last fact that a controller committed, `START` if none in this generation."""


class DeliveredCommand(msgspec.Struct, frozen=True):
    """A command with its place in its instance's command stream."""

    cursor: str
    command: Command


class FactLog(Protocol):
    """The facts stream and the command streams of one cluster.

    Every method raises `LogUnavailable` when the server is away, full or not ready; the effect is then
    unknown, and repeating the call is safe because folds drop what they have seen.
    """

    async def append(self, facts: Sequence[Fact], *, generation: int | None = None) -> Position:
        """Append facts in order, all or none; return the position of the last one.

        If no generation is open on this server run, the call opens the next one first.
        A caller compares the returned generation with the one it knew: a higher one means that
        the log lost its memory or restarted, and recent facts must be appended again. A caller whose
        facts must stay in order across that gives the `generation` it knows: if another one is open,
        `GenerationChanged` is raised with nothing appended.
        """
        ...

    async def commit(
        self, *, after: Position, facts: Sequence[Fact], commands: Sequence[Command], generation: int | None = None
    ) -> Position:
        """Append facts and commands in one atomic step if the last commit is `after`.

        `generation` is the one that the caller's fold is in; without it `after` tells.
        Raises `CommitConflict` otherwise, with nothing appended.
        """
        ...

    async def read(self, after: Position, *, count: int = 500, wait_ms: int = 0) -> list[Entry]:
        """Entries behind `after`, oldest first, at most `count`; waits up to `wait_ms` for the first.

        Entries never go backwards; a hole in positions is visible to the caller.
        """
        ...

    async def tail(self) -> LogTail:
        """Where the log begins and ends. Opens a generation if none is open."""
        ...

    async def open_generation(self, above: int, *, cause: str) -> int:
        """Open a generation above `above` unless one is open; return the open one.

        Its number is the server's time in ms, or one more than the highest number known if that is higher.
        """
        ...

    async def trim(self, below: Position) -> int:
        """Forget entries before `below`; return how many."""
        ...

    async def read_commands(
        self, instance: str, after: str, *, count: int = 64, wait_ms: int = 0
    ) -> list[DeliveredCommand]:
        """Commands for one instance behind cursor `after` (`0-0` for all), oldest first."""
        ...

    async def forget_commands(self, instance: str, through: str) -> None:
        """Drop an instance's commands up to and including a cursor, after their outcome is a fact."""
        ...

    async def save_snapshot(self, position: Position, state: bytes) -> None:
        """Keep one encoded fold; a later position replaces an earlier one, never the reverse."""
        ...

    async def load_snapshot(self) -> tuple[Position, bytes] | None:
        """The kept fold, if any."""
        ...

    async def memory_used_ratio(self) -> float:
        """Memory used by the server over its limit (the machine's memory if it has none), 0 to 1 and more."""
        ...

    async def close(self) -> None:
        """Give up connections."""
        ...


class Hole(msgspec.Struct, frozen=True, order=True):
    """Numbers `from_seq` to `to_seq` of one incarnation of a source that the archive does not have."""

    source: str
    incarnation: int
    from_seq: int
    to_seq: int


class Archive(Protocol):
    """Every fact of the log, once, for ever.

    The first appearance of a fact is kept with its body; later ones (a producer said it again) keep only their
    place, so that `history` is the log exactly as it was. Every method raises `ArchiveUnavailable` when the
    database is away; every write may be repeated.
    """

    async def store(self, entries: Sequence[Entry]) -> None:
        """Keep entries, in log order, and move the archived position to the last one: all in one transaction.

        What cannot be kept as a fact is kept as a dead letter. Raises `ArchiveForked`, with nothing stored, if
        another fact holds one of the positions.
        """
        ...

    async def position(self) -> Position:
        """Everything up to here is archived."""
        ...

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
        """Facts behind `after` that fit, each once, in log order. Raises `BadInput` for a bad count."""
        ...

    async def history(self, after: Position, count: int = 500, *, upto: Position | None = None) -> list[Entry]:
        """The log as it was, behind `after`, with repeats and dead letters in their places: what a fold must see."""
        ...

    async def holes(self) -> list[Hole]:
        """Every gap in every source's numbers: an empty list proves that no fact is missing."""
        ...

    async def marks(self) -> dict[str, SourceMark]:
        """The highest number of the newest incarnation of each source."""
        ...

    async def counts(self) -> dict[str, int]:
        """Facts by kind."""
        ...

    async def story(self, request: str) -> list[Entry]:
        """Everything about one request, its moves included, in log order: the first 10,000 facts."""
        ...

    async def state_at(self, position: Position) -> State:
        """The fold of the log up to and including `position` (or to the archive's end, if that comes first)."""
        ...

    async def position_at(self, at_ms: int) -> Position:
        """Where the log stood at a wall-clock time: the fact with the latest `at_ms` that is not later."""
        ...

    async def save_snapshot(self, position: Position, state: bytes) -> None:
        """Keep one encoded fold, so that `state_at` starts near; a repeat is a no-op."""
        ...

    async def close(self) -> None:
        """Finish what was begun and give up connections and threads."""
        ...


class Scaler(Protocol):
    """Who starts and ends instances. Both calls may come twice, also from two processes: twice is once."""

    async def add(self, instance: str, scaling: str) -> None:
        """See that an instance of that name starts, unless it does already. Raises `ScalerFailed`."""
        ...

    async def remove(self, instance: str, scaling: str) -> None:
        """See that an instance, which is empty, ends in good order, if it is there. Raises `ScalerFailed`."""
        ...


class Recorder(Protocol):
    """Where a process says its facts. Never blocks, never raises, keeps order."""

    def record(self, event: object) -> None:
        """Queue an event as this source's next fact."""
        ...
