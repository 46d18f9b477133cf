"""The log in memory: the same contract as the Redis log, for the simulation and for tests.

One `MemoryLogStore` stands for one Redis server; each process has its own `MemoryLog` handle on it. There are
no threads and no clock but the event loop's, so it runs on a virtual-time loop.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

from midstream.control.codec import decode_command, decode_fact, encode_command, encode_fact
from midstream.control.commands import Command
from midstream.control.errors import BadInput, CommitConflict, GenerationChanged, LogUnavailable
from midstream.control.events import Entry, Fact, GenerationOpened
from midstream.control.ids import START, Position, parse_position
from midstream.control.ports import Clock, DeliveredCommand, LogTail

Fault = Callable[[str], Literal["", "before", "after"]]
"""Asked with the method's name at each call: fail before the effect, after it, or not."""

LOG_SOURCE = "log"
"""Who says `GenerationOpened`: its incarnation is the generation."""

T = TypeVar("T")


def no_fault(method: str) -> Literal["", "before", "after"]:
    """Nothing fails."""
    return ""


class MemoryLogStore:
    """What one Redis server would hold, and the switches that break it.

    `is_down` makes every call fail before its effect. `fault` is asked at every call of every handle that has
    none of its own. `memory_used_ratio` is what `FactLog.memory_used_ratio` answers.
    """

    def __init__(self, *, clock: Clock | None = None, fault: Fault = no_fault) -> None:
        self.fault = fault
        self.memory_used_ratio = 0.0
        self.generation = 0
        self.is_open = False
        self.committed = START
        self.last = START
        self.entries: list[Entry] = []
        self.commands: dict[str, list[tuple[Position, Position, Command]]] = {}
        """Per instance: (cursor, position of the fact that explains it, command)."""
        self.snapshot: tuple[Position, bytes] | None = None
        self._cursors: dict[str, Position] = {}
        self._clock = clock
        self._is_down = False
        self._changed = asyncio.Event()
        self._ordered: dict[str, asyncio.Event] = {}

    @property
    def is_down(self) -> bool:
        """Does the server refuse every call."""
        return self._is_down

    @is_down.setter
    def is_down(self, value: bool) -> None:
        self._is_down = value
        self.wake()

    def restart(self, lose: int = 0) -> None:
        """The server died and came back without its last `lose` entries and what was written with them."""
        kept = self.entries[: max(0, len(self.entries) - lose)]
        lost = self.entries[len(kept) :]
        self.entries = kept
        self.is_open = False
        if lost:
            self._forget_from(lost[0].position)
        self.wake()

    def flush(self) -> None:
        """FLUSHALL: the server runs on with nothing in it."""
        self.entries, self.commands, self._cursors = [], {}, {}
        self.generation, self.is_open = 0, False
        self.committed = self.last = START
        self.snapshot = None
        self.wake()

    def open_generation(self, above: int, cause: str, opened_by: str) -> int:
        """As the server-side function of the Redis log."""
        if self.is_open and self.generation > above:
            return self.generation
        now_ms = self._now_ms()
        self.generation = max(self.generation + 1, self.last.generation + 1, above + 1, now_ms)
        self.is_open = True
        self.committed = START
        event = GenerationOpened(generation=self.generation, cause=cause, opened_by=opened_by)
        self.extend([Fact(LOG_SOURCE, self.generation, 1, now_ms, event)])
        return self.generation

    def extend(self, facts: Sequence[Fact]) -> Position:
        """Append to the open generation; positions are dense from 0."""
        for fact in facts:
            seq = self.last.seq + 1 if self.last.generation == self.generation else 0
            self.last = Position(self.generation, seq)
            self.entries.append(Entry(self.last, fact))
        self._wake_readers()
        return self.last

    def order(self, command: Command, explained_at: Position) -> None:
        """Append one command to its instance's stream."""
        last = self._cursors.get(command.instance, START)
        seq = last.seq + 1 if last.generation == self.generation else 0
        cursor = self._cursors[command.instance] = Position(self.generation, seq)
        self.commands.setdefault(command.instance, []).append((cursor, explained_at, command))
        _set(self._ordered.pop(command.instance, None))

    def wake(self) -> None:
        """Let every waiting reader look again."""
        for ordered in self._ordered.values():
            ordered.set()
        self._ordered.clear()
        self._wake_readers()

    def _wake_readers(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change; take it before looking, wait for it after."""
        return self._changed

    def ordered(self, instance: str) -> asyncio.Event:
        """Set at the next command for an instance; to be used as `changed`."""
        return self._ordered.setdefault(instance, asyncio.Event())

    def _forget_from(self, first_lost: Position) -> None:
        self.last = self.entries[-1].position if self.entries else _before(first_lost)
        self.generation = self.last.generation
        self.commands = {
            instance: [order for order in orders if order[1] < first_lost] for instance, orders in self.commands.items()
        }
        self._cursors = {instance: orders[-1][0] for instance, orders in self.commands.items() if orders}
        if self.snapshot is not None and self.snapshot[0] >= first_lost:
            self.snapshot = None

    def _now_ms(self) -> int:
        if self._clock is not None:
            return self._clock.now_ms()
        return int(asyncio.get_running_loop().time() * 1000)


class MemoryLog:
    """`control.ports.FactLog` on a shared store. `opened_by` names this client in `GenerationOpened`."""

    def __init__(self, store: MemoryLogStore, *, opened_by: str, fault: Fault | None = None) -> None:
        self._store = store
        self._opened_by = opened_by
        self._fault = fault
        self._known = 0

    async def append(self, facts: Sequence[Fact], *, generation: int | None = None) -> Position:
        """See `FactLog.append`."""
        stored = _round_trip(facts)
        return await self._call("append", lambda: self._append(stored, generation))

    async def commit(
        self, *, after: Position, facts: Sequence[Fact], commands: Sequence[Command], generation: int | None = None
    ) -> Position:
        """See `FactLog.commit`."""
        stored = _round_trip(facts)
        orders = [decode_command(encode_command(command)) for command in commands]
        return await self._call("commit", lambda: self._commit(after, stored, orders, generation))

    async def read(self, after: Position, *, count: int = 500, wait_ms: int = 0) -> list[Entry]:
        """See `FactLog.read`."""
        return await self._wait_for("read", wait_ms, lambda: self._store.changed, lambda: self._read(after, count))

    async def tail(self) -> LogTail:
        """See `FactLog.tail`."""
        return await self._call("tail", self._tail)

    async def open_generation(self, above: int, *, cause: str) -> int:
        """See `FactLog.open_generation`."""
        return await self._call("open_generation", lambda: self._open(above, cause))

    async def trim(self, below: Position) -> int:
        """See `FactLog.trim`."""
        return await self._call("trim", lambda: self._trim(below))

    async def read_commands(
        self, instance: str, after: str, *, count: int = 64, wait_ms: int = 0
    ) -> list[DeliveredCommand]:
        """See `FactLog.read_commands`."""
        cursor = parse_position(after)
        self._known = max(self._known, cursor.generation)
        return await self._wait_for(
            "read_commands",
            wait_ms,
            lambda: self._store.ordered(instance),
            lambda: self._read_commands(instance, cursor, count),
        )

    async def forget_commands(self, instance: str, through: str) -> None:
        """See `FactLog.forget_commands`."""
        cursor = parse_position(through)
        await self._call("forget_commands", lambda: self._forget_commands(instance, cursor))

    async def save_snapshot(self, position: Position, state: bytes) -> None:
        """See `FactLog.save_snapshot`."""
        await self._call("save_snapshot", lambda: self._save_snapshot(position, state))

    async def load_snapshot(self) -> tuple[Position, bytes] | None:
        """See `FactLog.load_snapshot`."""
        return await self._call("load_snapshot", lambda: self._store.snapshot)

    async def memory_used_ratio(self) -> float:
        """See `FactLog.memory_used_ratio`."""
        return await self._call("memory_used_ratio", lambda: self._store.memory_used_ratio)

    async def close(self) -> None:
        """Nothing to give up."""

    async def _call(self, method: str, effect: Callable[[], T]) -> T:
        await asyncio.sleep(0)
        verdict = (self._fault or self._store.fault)(method)
        if self._store.is_down or verdict == "before":
            raise LogUnavailable(f"{method}: the log is away")
        result = effect()
        await asyncio.sleep(0)
        if verdict == "after":
            raise LogUnavailable(f"{method}: the reply was lost")
        return result

    async def _wait_for(
        self, method: str, wait_ms: int, next_change: Callable[[], asyncio.Event], look: Callable[[], list[T]]
    ) -> list[T]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        while True:
            changed = next_change()
            found = await self._call(method, look)
            if found or loop.time() >= deadline:
                return found
            await _until(deadline, changed.wait())

    def _append(self, facts: Sequence[Fact], generation: int | None) -> Position:
        self._known = max(self._known, generation or 0)
        self._ensure_open()
        if generation is not None and generation != self._store.generation:
            raise GenerationChanged(self._store.generation)
        return self._store.extend(facts)

    def _commit(
        self, after: Position, facts: Sequence[Fact], commands: Sequence[Command], generation: int | None
    ) -> Position:
        wanted = after.generation or generation or self._known
        self._ensure_open()
        store = self._store
        if wanted not in (0, store.generation) or after != store.committed:
            raise CommitConflict(f"the last commit is at {store.committed} of {store.generation}, not {after}")
        store.committed = store.extend(facts)
        for command in commands:
            store.order(command, store.committed)
        return store.committed

    def _read(self, after: Position, count: int) -> list[Entry]:
        store = self._store
        if store.is_open and store.generation < after.generation:
            store.open_generation(after.generation, "a reader had seen a higher generation", self._opened_by)
        start = bisect_right(store.entries, after, key=lambda entry: entry.position)
        found = store.entries[start : start + count]
        self._known = max(self._known, found[-1].position.generation if found else after.generation)
        return found

    def _tail(self) -> LogTail:
        self._ensure_open()
        store = self._store
        first = store.entries[0].position if store.entries else Position(store.generation, store.last.seq + 1)
        return LogTail(store.generation, first, store.last, store.committed)

    def _open(self, above: int, cause: str) -> int:
        self._known = self._store.open_generation(above, cause, self._opened_by)
        return self._known

    def _ensure_open(self) -> None:
        store = self._store
        if not store.is_open or store.generation < self._known:
            store.open_generation(self._known, "no generation was open", self._opened_by)
        self._known = store.generation

    def _trim(self, below: Position) -> int:
        index = bisect_left(self._store.entries, below, key=lambda entry: entry.position)
        self._store.entries = self._store.entries[index:]
        return index

    def _read_commands(self, instance: str, after: Position, count: int) -> list[DeliveredCommand]:
        orders = self._store.commands.get(instance, [])
        start = bisect_right(orders, after, key=lambda order: order[0])
        return [DeliveredCommand(str(cursor), command) for cursor, _, command in orders[start : start + count]]

    def _forget_commands(self, instance: str, through: Position) -> None:
        orders = self._store.commands.get(instance, [])
        self._store.commands[instance] = [order for order in orders if order[0] > through]

    def _save_snapshot(self, position: Position, state: bytes) -> None:
        kept = self._store.snapshot
        if kept is None or kept[0] < position:
            self._store.snapshot = (position, state)


def _before(position: Position) -> Position:
    """The end of a log that lost everything from `position` on and holds nothing before it."""
    return Position(position.generation, position.seq - 1) if position.seq else START


def _round_trip(facts: Sequence[Fact]) -> list[Fact]:
    """What a reader of the real log would get: so a fact that does not survive its encoding fails here too."""
    if not facts:
        raise BadInput("there is no fact to append")
    return [decode_fact(encode_fact(fact)) for fact in facts]


async def _until(deadline: float, waiting: Awaitable[object]) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            await waiting
    except TimeoutError:
        return


def _set(event: asyncio.Event | None) -> None:
    if event is not None:
        event.set()
