"""The archiver: copies the log into the archive, trims the log behind it, and notices when the log lost its memory."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

import structlog

from midstream.control.codec import POISON_KIND, UnknownEvent
from midstream.control.errors import ArchiveForked, ArchiveUnavailable, LogUnavailable
from midstream.control.events import Entry, Fact, FactsMissed
from midstream.control.ids import START, Position
from midstream.control.ports import Archive, Clock, FactLog, Recorder
from midstream.control.state import SourceMark

BATCH_MAX: Final = 500
"""Facts per transaction."""

LINGER_S: Final = 0.02
"""Pause after a batch that was not full, so that facts trickling in share a transaction."""

READ_WAIT_MS: Final = 1_000
CHECK_S: Final = 5.0
"""How often the log is asked whether it still holds what was archived last."""

TIDY_S: Final = 5.0
"""How often the log is trimmed and its snapshot copied."""

RETAIN_MS: Final = 15 * 60 * 1_000
"""What was archived stays in the log for so long, for readers that fell behind."""

MEMORY_USED_WARN: Final = 0.7
"""From this share of its server's memory on, every tidying warns (rules R10): a full one takes no facts."""

RETENTION_MARKS_MAX: Final = 128
SNAPSHOT_EVERY: Final = 10_000
"""Facts between two snapshots kept in the archive."""

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0

SEQ_LAST: Final = 2**32
"""Above every position of a generation, for reading across into the next one."""

logger = structlog.get_logger(__name__)


class Archiver:
    """Any number of them may run; what one has stored is a no-op for the others.

    The archived position is read from the archive, which moved it together with the rows; so a kill at any point
    repeats some rows harmlessly and skips none. While SQL is away the log keeps everything: it is only ever
    trimmed below the archived position.
    """

    def __init__(
        self,
        log: FactLog,
        archive: Archive,
        clock: Clock,
        recorder: Recorder,
        *,
        retain_ms: int = RETAIN_MS,
        read_wait_ms: int = READ_WAIT_MS,
    ) -> None:
        self.stored = 0
        """Entries stored by this archiver."""
        self.position_holes = 0
        """Jumps seen in the log's positions: it was trimmed or lost its memory before we had read it."""
        self._log = log
        self._archive = archive
        self._recorder = recorder
        self._read_wait_ms = read_wait_ms
        self._retention = Retention(clock, retain_ms)
        self._cursor: Position | None = None
        self._last: Fact | None = None
        """The fact at the cursor: while the log holds it there, the log has not forked."""
        self._sources: dict[str, SourceMark] = {}
        self._check_due = self._tidy_due = 0.0
        self._snapshot_due = 0
        self._trimmed = START

    @property
    def position(self) -> Position:
        """Where this archiver stands."""
        return self._cursor or START

    async def run(self) -> None:
        """Archive for ever; outages are waited out."""
        backoff = BACKOFF_FIRST_S
        while True:
            try:
                count = await self.step()
            except (LogUnavailable, ArchiveUnavailable) as error:
                logger.warning("archiving waits", error=str(error), retry_s=backoff)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, BACKOFF_MAX_S)
                continue
            backoff = BACKOFF_FIRST_S
            if count < BATCH_MAX:
                await asyncio.sleep(LINGER_S)

    async def step(self) -> int:
        """One batch: read, store, trim if due; return how many entries were stored.

        Raises `LogUnavailable` and `ArchiveUnavailable`; calling again goes on where the archive stands.
        """
        try:
            cursor = await self._ready()
            entries = await self._log.read(cursor, count=BATCH_MAX, wait_ms=self._read_wait_ms)
            if entries:
                await self._keep(cursor, entries)
            await self._tidy()
            return len(entries)
        except ArchiveForked as error:
            logger.error("the log forked", error=str(error))
            self._cursor = None
            return 0
        except ArchiveUnavailable:
            self._cursor = None
            raise
        except LogUnavailable:
            self._check_due = 0.0
            raise

    async def _ready(self) -> Position:
        now = asyncio.get_running_loop().time()
        if self._cursor is None:
            self._cursor = await self._archive.position()
            self._sources = await self._archive.marks()
            self._last = await self._archived_at(self._cursor)
            self._check_due = now
        if now >= self._check_due:
            await self._check()
            self._check_due = now + CHECK_S
        return self._cursor

    async def _check(self) -> None:
        """Open a higher generation unless the log still holds the last archived fact, or has opened one itself."""
        tail, cursor = await self._log.tail(), self.position
        if tail.generation > cursor.generation or cursor == START:
            return
        if tail.generation == cursor.generation:
            found = await self._log.read(_just_before(cursor), count=1)
            if found and found[0].position == cursor and _is_same(found[0].fact, self._last):
                return
        logger.error("the log is behind the archive", archived=str(cursor), log=str(tail.last))
        await self._log.open_generation(cursor.generation, cause="behind_archive")

    async def _archived_at(self, position: Position) -> Fact | None:
        if position == START:
            return None
        found = await self._archive.history(_just_before(position), 1, upto=position)
        return found[0].fact if found else None

    async def _keep(self, cursor: Position, entries: list[Entry]) -> None:
        await self._archive.store(entries)
        for entry in entries:
            self._watch(cursor, entry)
            cursor = entry.position
        self._cursor, self._last = cursor, entries[-1].fact
        self.stored += len(entries)
        self._snapshot_due -= len(entries)

    def _watch(self, before: Position, entry: Entry) -> None:
        """Notice what is missing, in positions and in the source's numbers."""
        is_next = entry.position.generation == before.generation and before != START
        if entry.position.seq != (before.seq + 1 if is_next else 0):
            self.position_holes += 1
            logger.error("the log has a hole", after=str(before), before=str(entry.position))
        fact = entry.fact
        if isinstance(fact.event, UnknownEvent) and fact.event.kind == POISON_KIND:
            return
        mark = self._sources.get(fact.source)
        if mark is not None and mark.incarnation > fact.incarnation:
            return
        seen = mark.seq if mark is not None and mark.incarnation == fact.incarnation else 0
        if fact.source_seq > seen + 1:
            self._recorder.record(
                FactsMissed(
                    source=fact.source, incarnation=fact.incarnation, from_seq=seen + 1, to_seq=fact.source_seq - 1
                )
            )
        if fact.source_seq > seen:
            self._sources[fact.source] = SourceMark(fact.incarnation, fact.source_seq)

    async def _tidy(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._tidy_due:
            return
        self._tidy_due = now + TIDY_S
        await self._watch_memory()
        self._retention.note(self.position)
        snapshot = await self._log.load_snapshot()
        if snapshot is None:
            return
        position, state = snapshot
        if position <= self.position and self._snapshot_due <= 0:
            await self._archive.save_snapshot(position, state)
            self._snapshot_due = SNAPSHOT_EVERY
        below = min(self.position, position, self._retention.position())
        if below > self._trimmed:
            await self._log.trim(below)
            self._trimmed = below

    async def _watch_memory(self) -> None:
        ratio = await self._log.memory_used_ratio()
        if ratio >= MEMORY_USED_WARN:
            logger.warning("the log's server is filling up", memory_used_ratio=round(ratio, 3))


class Retention:
    """Remembers, on a coarse grid of time, how far the archive was, so as to tell what is older than `retain_ms`."""

    def __init__(self, clock: Clock, retain_ms: int) -> None:
        self._clock = clock
        self._retain_ms = retain_ms
        self._grid_ms = 2 * retain_ms // RETENTION_MARKS_MAX
        self._marks: deque[tuple[int, Position]] = deque(maxlen=RETENTION_MARKS_MAX)
        self._position = START

    def note(self, position: Position) -> None:
        """The archive stands here now."""
        now_ms = self._clock.now_ms()
        if not self._marks or now_ms >= self._marks[-1][0] + self._grid_ms:
            self._marks.append((now_ms, position))

    def position(self) -> Position:
        """Everything up to here was archived at least `retain_ms` ago."""
        cutoff_ms = self._clock.now_ms() - self._retain_ms
        while self._marks and self._marks[0][0] <= cutoff_ms:
            self._position = self._marks.popleft()[1]
        return self._position


def _just_before(position: Position) -> Position:
    if position.seq > 0:
        return Position(position.generation, position.seq - 1)
    return Position(position.generation - 1, SEQ_LAST)


def _is_same(fact: Fact, other: Fact | None) -> bool:
    if other is None:
        return False
    return (fact.source, fact.incarnation, fact.source_seq) == (other.source, other.incarnation, other.source_seq)
