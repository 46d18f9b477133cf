"""The controller: fold, decide, commit, again. Any number of them may run on one log without knowing each other.

Each tick's decision is committed on condition that nobody committed since the fold it was made from, so of two
controllers that decide at once one is refused, with nothing done, and follows the other's tick instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from midstream.control.codec import digest, encode_state
from midstream.control.commands import Command
from midstream.control.decide import decide
from midstream.control.errors import CommitConflict, LogUnavailable
from midstream.control.events import Event, Fact, StateCarried, TickElapsed
from midstream.control.fold.operations import is_operation_open
from midstream.control.follower import Follower
from midstream.control.ids import COMMIT_SOURCE, START, Position
from midstream.control.ports import Clock, FactLog
from midstream.control.state import State

TICK_MS: Final = 250
IDLE_TICK_MS: Final = 1_000
"""Between ticks while there is nothing to decide on but health."""

DUE_S: Final = 0.001
"""A tick that is due within this is due."""

STANDBY_FACTOR: Final = 1.3
"""A controller whose commit lost a race waits so much longer than the winner, which so keeps the lead."""

SNAPSHOT_ENTRIES: Final = 10_000
SNAPSHOT_S: Final = 60.0
FOLD_WAIT_S: Final = 1.0
"""How long to wait for one's own commit to come back through the log."""

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0

logger = structlog.get_logger(__name__)


class Controller:
    """`run` decides until cancelled; `follower.run` must be running beside it.

    `seed_source` is asked once per tick; the seed becomes part of the tick's fact.
    """

    def __init__(
        self,
        *,
        log: FactLog,
        follower: Follower,
        clock: Clock,
        name: str,
        seed_source: Callable[[], int],
        tick_ms: int = TICK_MS,
        snapshot_entries: int = SNAPSHOT_ENTRIES,
        snapshot_s: float = SNAPSHOT_S,
    ) -> None:
        self.commits = 0
        self.conflicts = 0
        self._log = log
        self._follower = follower
        self._clock = clock
        self._name = name
        self._seed_source = seed_source
        self._tick_ms = tick_ms
        self._pace = _Pace()
        self._snapshots = _Snapshots(log, snapshot_entries, snapshot_s)

    async def run(self) -> None:
        """Tick, whenever a tick is due; outlive outages of the log."""
        backoff = BACKOFF_FIRST_S
        while True:
            try:
                await self._step()
                backoff = BACKOFF_FIRST_S
            except LogUnavailable as error:
                logger.debug("log away", controller=self._name, error=str(error), retry_s=backoff)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, BACKOFF_MAX_S)

    async def _step(self) -> None:
        state = self._follower.state
        if state.generation == 0:
            await self._log.tail()
            await self._pass(state.position)
        elif state.control_seq == 0:
            await self._carry(state)
        else:
            self._pace.look(state)
            wait_s = self._due_s(state)
            if wait_s > DUE_S:
                await self._wait(wait_s)
            else:
                await self._tick(state)
                await self._snapshots.keep(self._follower.state)

    def _due_s(self, state: State) -> float:
        """Seconds until this controller should tick, if nobody else does before."""
        tick_ms = self._tick_ms if is_busy(state) else max(self._tick_ms, IDLE_TICK_MS)
        factor = STANDBY_FACTOR if self._pace.is_standby else 1.0
        return tick_ms * factor / 1000 - self._pace.elapsed_s()

    async def _wait(self, seconds: float) -> None:
        """While idle, wake at every change: it may be the end of idleness."""
        if is_busy(self._follower.state):
            await asyncio.sleep(seconds)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._follower.changed()
        except TimeoutError:
            return

    async def _tick(self, state: State) -> None:
        now_ms = max(self._clock.now_ms(), state.last_tick_ms + int(self._pace.elapsed_s() * 1000))
        tick = TickElapsed(now_ms=now_ms, seed=self._seed_source(), decided_at=state.position)
        decision = decide(state, tick)
        await self._commit(state, now_ms, (tick, *decision.events), decision.commands)

    async def _carry(self, state: State) -> None:
        """Begin a generation's decisions by making every fold equal to this one (R12)."""
        encoded = encode_state(state)
        event = StateCarried(state=encoded.decode(), digest=digest(encoded))
        await self._commit(state, self._clock.now_ms(), (event,), ())

    async def _commit(
        self,
        state: State,
        now_ms: int,
        events: Sequence[Event],
        commands: Sequence[Command],
    ) -> None:
        numbers = range(state.control_seq + 1, state.control_seq + 1 + len(events))
        facts = [
            Fact(COMMIT_SOURCE, state.generation, seq, now_ms, event)
            for seq, event in zip(numbers, events, strict=True)
        ]
        decided_at = state.position
        try:
            committed = await self._log.commit(
                after=state.committed, facts=facts, commands=commands, generation=state.generation
            )
        except CommitConflict as conflict:
            self.conflicts += 1
            self._pace.is_standby = True
            logger.debug("another controller was first", controller=self._name, conflict=str(conflict))
            await self._pass(decided_at)
        else:
            self.commits += 1
            self._pace.is_standby = False
            await self._pass(Position(committed.generation, committed.seq - 1))

    async def _pass(self, position: Position) -> None:
        """Give the fold a moment to get behind `position`: deciding again before would only conflict."""
        try:
            async with asyncio.timeout(FOLD_WAIT_S):
                while self._follower.state.position <= position:
                    await self._follower.changed()
        except TimeoutError:
            return


def is_busy(state: State) -> bool:
    """Is there anything to decide on besides health: requests, orders, drains."""
    return (
        bool(state.requests)
        or any(is_operation_open(operation) for operation in state.operations.values())
        or any(view.is_draining and not view.is_drained for view in state.instances.values())
    )


class _Pace:
    """When the last tick was seen, by this process's own steady time, whoever made it."""

    def __init__(self) -> None:
        self.is_standby = False
        self._tick_ms = -1
        self._seen_at = 0.0

    def look(self, state: State) -> None:
        """Note a new tick."""
        if state.last_tick_ms != self._tick_ms:
            self._tick_ms, self._seen_at = state.last_tick_ms, _now_s()

    def elapsed_s(self) -> float:
        """Seconds since."""
        return _now_s() - self._seen_at


class _Snapshots:
    """Saves the fold every so many entries or seconds, so that others start from there."""

    def __init__(self, log: FactLog, entries: int, seconds: float) -> None:
        self._log = log
        self._entries = entries
        self._seconds = seconds
        self._at = START
        self._saved_at = float("-inf")

    async def keep(self, state: State) -> None:
        """Save if it is time."""
        position = state.position
        is_many = position.generation != self._at.generation or position.seq - self._at.seq >= self._entries
        is_long = _now_s() - self._saved_at >= self._seconds
        if position != self._at and (is_many or is_long):
            self._at, self._saved_at = position, _now_s()
            await self._log.save_snapshot(position, encode_state(state))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
