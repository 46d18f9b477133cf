"""Says one source's facts to the log: in order, each once, through outages and rewinds (rules R2, R3, R12).

`record` only queues. A fact gets its number when it is taken for sending, and keeps it for every repetition;
one append is in flight at a time. Facts of the last seconds are kept after they were confirmed and said again,
before newer ones, when the log comes back as a new generation.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

import msgspec
import structlog

from midstream.control.codec import decode_fact, encode_fact
from midstream.control.errors import BadInput, GenerationChanged, LogUnavailable
from midstream.control.events import Event, Fact, FactsDropped, LoadReported, RequestsReported
from midstream.control.ids import START, Position
from midstream.control.ports import Clock, FactLog

BUFFER_MAX: Final = 10_000
"""Events that wait at most; at three quarters load reports are coalesced, here the oldest go."""

COALESCE_AT: Final = BUFFER_MAX * 3 // 4
BATCH_MAX: Final = 500
LINGER_S: Final = 0.002
"""A first event waits so long for others to share its append."""

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
CHECK_S: Final = 5.0
"""A source with nothing to say looks so often whether the log lost its memory."""

RING_S: Final = 10.0
RING_MAX: Final = 10_000

logger = structlog.get_logger(__name__)

ReportKey = tuple[type[Event], str]


class Publisher:
    """`control.ports.Recorder` for one source in one incarnation.

    `run` sends until cancelled and survives being restarted. `rng` spreads the retries of many producers; without
    it they are regular. Bounds are constructor arguments for tests alone.
    """

    def __init__(
        self,
        log: FactLog,
        source: str,
        incarnation: int,
        clock: Clock,
        *,
        rng: random.Random | None = None,
        buffer_max: int = BUFFER_MAX,
    ) -> None:
        self._log = log
        self._source = source
        self._incarnation = incarnation
        self._clock = clock
        self._rng = rng
        self._waiting = _Buffer(buffer_max)
        self._sending: list[Fact] = []
        """Numbered, not yet confirmed: sent again unchanged until they are."""
        self._ring: deque[tuple[float, Fact]] = deque(maxlen=RING_MAX)
        self._next_seq = 1
        self._generation: int | None = None
        self._confirmed = START
        self._some = asyncio.Event()
        self._sender = asyncio.Lock()

    @property
    def confirmed(self) -> Position:
        """Where the last confirmed fact stands, `START` before the first."""
        return self._confirmed

    @property
    def unsent(self) -> int:
        """Facts that the log has not confirmed yet."""
        return len(self._waiting) + len(self._sending)

    @property
    def dropped(self) -> int:
        """Events given up since the start, because the buffer was full or they could not be encoded."""
        return self._waiting.dropped_total

    def record(self, event: object) -> None:
        """See `Recorder.record`. What is no encodable event is logged and counted as dropped."""
        at_ms = self._clock.now_ms()
        if isinstance(event, Event) and self._is_sayable(event, at_ms):
            self._waiting.push(at_ms, event)
        else:
            self._waiting.give_up()
            logger.error("unsayable fact", source=self._source, kind=type(event).__name__)
        self._some.set()

    async def run(self) -> None:
        """Send what is recorded, for ever. A log that is away costs retries, nothing else."""
        backoff = BACKOFF_FIRST_S
        while True:
            try:
                if await self._has_news():
                    await asyncio.sleep(LINGER_S)
                    await self._send_all()
                else:
                    await self._check_generation()
                backoff = BACKOFF_FIRST_S
            except LogUnavailable as error:
                logger.warning("log away", source=self._source, unsent=self.unsent, error=str(error))
                await asyncio.sleep(self._spread(backoff))
                backoff = min(2 * backoff, BACKOFF_MAX_S)

    async def _has_news(self) -> bool:
        """Wait for something to say; `False` when it is time to look at the log instead."""
        if not self._ring:
            await self._some.wait()
            return True
        try:
            async with asyncio.timeout(CHECK_S):
                await self._some.wait()
        except TimeoutError:
            return False
        return True

    async def _check_generation(self) -> None:
        generation = (await self._log.tail()).generation
        async with self._sender:
            if generation != self._generation:
                await self._say_again(generation)

    async def flush(self, timeout_s: float) -> bool:
        """Send everything recorded so far, also without `run`; false if that took longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.unsent:
                    await self._try_all()
        except TimeoutError:
            return False
        return True

    async def _try_all(self) -> None:
        try:
            await self._send_all()
        except LogUnavailable:
            await asyncio.sleep(self._spread(BACKOFF_FIRST_S))

    async def _send_all(self) -> None:
        async with self._sender:
            while self._sending or self._take():
                await self._send_batch()
            self._some.clear()

    def _take(self) -> bool:
        """Number the next batch."""
        for at_ms, event in self._waiting.take(BATCH_MAX, self._clock.now_ms()):
            self._sending.append(Fact(self._source, self._incarnation, self._next_seq, at_ms, event))
            self._next_seq += 1
        return bool(self._sending)

    async def _send_batch(self) -> None:
        try:
            self._confirm(await self._log.append(self._sending, generation=self._generation))
        except GenerationChanged as changed:
            await self._say_again(changed.generation)

    async def _say_again(self, generation: int) -> None:
        """The log may have forgotten what it had confirmed: repeat that first, so that order is kept."""
        recent = [fact for _, fact in self._ring]
        logger.info("log in a new generation", source=self._source, generation=generation, repeated=len(recent))
        try:
            for start in range(0, len(recent), BATCH_MAX):
                await self._log.append(recent[start : start + BATCH_MAX], generation=generation)
        except GenerationChanged:
            return
        self._generation = generation

    def _confirm(self, position: Position) -> None:
        now = asyncio.get_running_loop().time()
        self._generation = position.generation
        self._confirmed = position
        self._ring.extend((now, fact) for fact in self._sending)
        self._sending = []
        while self._ring[0][0] < now - RING_S:
            self._ring.popleft()

    def _is_sayable(self, event: Event, at_ms: int) -> bool:
        """Could every reader read this: one such fact must not hold up all others."""
        try:
            decode_fact(encode_fact(Fact(self._source, self._incarnation, self._next_seq, at_ms, event)))
        except (BadInput, TypeError, ValueError, msgspec.MsgspecError):
            return False
        return True

    def _spread(self, delay_s: float) -> float:
        return delay_s if self._rng is None else delay_s * (0.5 + self._rng.random() / 2)


class _Buffer:
    """Events without a number yet, oldest first. Full, it forgets load reports before anything else."""

    def __init__(self, size_max: int) -> None:
        self.dropped_total = 0
        self._size_max = size_max
        self._coalesce_at = size_max * COALESCE_AT // BUFFER_MAX
        self._events: OrderedDict[int, tuple[int, Event]] = OrderedDict()
        self._reports: OrderedDict[int, ReportKey] = OrderedDict()
        """Those of `_events` that a newer report of the same instance replaces."""
        self._newest: dict[ReportKey, int] = {}
        self._next = 0
        self._dropped_unsaid = 0

    def __len__(self) -> int:
        return len(self._events) + bool(self._dropped_unsaid)

    def push(self, at_ms: int, event: Event) -> None:
        key = _report_key(event)
        if key is not None and len(self._events) >= self._coalesce_at and key in self._newest:
            self._drop(self._newest[key])
        if len(self._events) >= self._size_max:
            self._drop(next(iter(self._reports or self._events)))
        self._events[self._next] = (at_ms, event)
        if key is not None:
            self._reports[self._next] = key
            self._newest[key] = self._next
        self._next += 1

    def take(self, count: int, now_ms: int) -> Sequence[tuple[int, Event]]:
        """The oldest `count`; after a loss the first thing said is how many were dropped."""
        taken: list[tuple[int, Event]] = []
        if self._dropped_unsaid:
            taken.append((now_ms, FactsDropped(count=self._dropped_unsaid)))
            self._dropped_unsaid = 0
        while self._events and len(taken) < count:
            index, pair = self._events.popitem(last=False)
            self._forget_report(index)
            taken.append(pair)
        return taken

    def give_up(self) -> None:
        """Count one event that never got in or had to go."""
        self.dropped_total += 1
        self._dropped_unsaid += 1

    def _drop(self, index: int) -> None:
        del self._events[index]
        self._forget_report(index)
        self.give_up()

    def _forget_report(self, index: int) -> None:
        key = self._reports.pop(index, None)
        if key is not None and self._newest.get(key) == index:
            del self._newest[key]


def _report_key(event: Event) -> ReportKey | None:
    if isinstance(event, LoadReported | RequestsReported):
        return type(event), event.owner.instance
    return None
