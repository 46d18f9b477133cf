"""Keeps one process's fold of the log up to date, for ever; while the log is away the last state stays usable (P20)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from midstream.control.codec import decode_state
from midstream.control.errors import BadInput, LogUnavailable
from midstream.control.events import Entry
from midstream.control.fold import apply
from midstream.control.ids import START, Position
from midstream.control.ports import FactLog
from midstream.control.state import State

READ_COUNT: Final = 500
READ_WAIT_MS: Final = 1_000
BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0

Bootstrap = Callable[[], Awaitable[State | None]]
"""Folds the archive, where the log itself no longer reaches back far enough."""

logger = structlog.get_logger(__name__)


class Follower:
    """`state` is the fold up to `state.position`; only `run` changes it, others read.

    `on_entry` is told each fact once, after the state has it. `bootstrap` is asked when neither the log nor its
    snapshot tells the whole story. Caught up, it reads again after `rest_s`: who has other things to do reads many
    facts at a time.
    """

    def __init__(
        self,
        log: FactLog,
        *,
        on_entry: Callable[[Entry], None] | None = None,
        bootstrap: Bootstrap | None = None,
        rest_s: float = 0.0,
    ) -> None:
        self.state = State()
        self.on_entry = on_entry
        self._log = log
        self._bootstrap = bootstrap
        self._rest_s = rest_s
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Follow until cancelled, through outages of the log.

        Raises `LogUnavailable` only if the log was trimmed beyond what this fold, the snapshot and the archive know;
        running again tries again.
        """
        backoff = BACKOFF_FIRST_S
        while True:
            try:
                if self.state.position == START:
                    await self._start()
                entries = await self._log.read(self.state.position, count=READ_COUNT, wait_ms=READ_WAIT_MS)
            except LogUnavailable as error:
                logger.debug("log away", error=str(error), retry_s=backoff)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, BACKOFF_MAX_S)
                continue
            backoff = BACKOFF_FIRST_S
            await self._take(entries)
            if self._rest_s and 0 < len(entries) < READ_COUNT:
                await asyncio.sleep(self._rest_s)

    async def changed(self) -> None:
        """Wait until the next entries have been folded."""
        await self._changed.wait()

    async def reached(self, position: Position) -> None:
        """Wait until the fold stands at `position` or behind it."""
        while self.state.position < position:
            await self._changed.wait()

    async def caught_up(self, timeout_s: float) -> None:
        """Wait until everything that is in the log now has been folded. Raises `LogUnavailable` after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.reached(await self._tail())
        except TimeoutError:
            raise LogUnavailable(f"not caught up with the log within {timeout_s:g} s") from None

    async def _start(self) -> None:
        state = await self._snapshot()
        if state is None and self._bootstrap is not None:
            state = await self._bootstrap()
        if state is not None:
            self.state = state
            self._wake()

    async def _take(self, entries: list[Entry]) -> None:
        for entry in entries:
            if not _follows(self.state.position, entry.position):
                await self._rejoin(entry.position)
                return
            if apply(self.state, entry) and self.on_entry is not None:
                self.on_entry(entry)
        if entries:
            self._wake()

    async def _rejoin(self, first: Position) -> None:
        """The log was trimmed above us: start again from a later fold."""
        state = await self._snapshot()
        if state is None or not _follows(state.position, first):
            state = await self._bootstrap() if self._bootstrap is not None else None
        if state is None or not _follows(state.position, first):
            raise LogUnavailable(
                f"the log goes on at {first}, this fold ends at {self.state.position}, "
                "and neither snapshot nor archive reaches that far"
            )
        logger.warning("rejoined the log", trimmed_at=str(first), at=str(state.position))
        self.state = state
        self._wake()

    async def _snapshot(self) -> State | None:
        found = await self._log.load_snapshot()
        if found is None:
            return None
        try:
            return decode_state(found[1])
        except BadInput as error:
            logger.warning("snapshot unusable", position=str(found[0]), error=str(error))
            return None

    async def _tail(self) -> Position:
        while True:
            try:
                return (await self._log.tail()).last
            except LogUnavailable:
                await asyncio.sleep(BACKOFF_FIRST_S)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _follows(position: Position, entry: Position) -> bool:
    """Is nothing missing between a fold at `position` and `entry`. A generation's numbers begin at 0."""
    if entry.generation > position.generation:
        return entry.seq == 0
    return entry.seq <= position.seq + 1
