"""One source's facts reach the log in order and each once in effect, whatever happens to the log meanwhile.

All on virtual time. What readers believe is checked with the production fold: `said` is what it applies.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest

from midstream.control import fold
from midstream.control.adapters.memory_log import MemoryLog, MemoryLogStore
from midstream.control.events import Entry, Event, Fact, FactsDropped, LoadReported, RequestsReported, TaskFailed
from midstream.control.ids import START, Owner, Position
from midstream.control.ports import FactLog
from midstream.control.publisher import CHECK_S, RING_S, Publisher
from midstream.control.simulate.loop import VirtualClock, run_virtual
from midstream.control.state import Load, State

SOURCE = "llumlet/a"
OWNER = Owner("a", 1)


def happened(number: int) -> TaskFailed:
    return TaskFailed(task="t", error=str(number))


def load(running: int, instance: str = "a") -> LoadReported:
    return LoadReported(owner=Owner(instance, 1), load=Load(running=running))


def publisher_on(log: FactLog, **options: Any) -> Publisher:
    clock = VirtualClock(asyncio.get_running_loop(), 1_000)
    return Publisher(log, SOURCE, 7, clock, **options)


@asynccontextmanager
async def running(publisher: Publisher) -> AsyncIterator[None]:
    task = asyncio.create_task(publisher.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def said(entries: Sequence[Entry]) -> tuple[list[Event], int]:
    """The source's events that the fold applies, in order, and the holes it sees."""
    state = State()
    applied = [entry.fact for entry in entries if fold.apply(state, entry)]
    return [fact.event for fact in applied if fact.source == SOURCE], state.gaps


def numbers(entries: Sequence[Entry]) -> list[int]:
    return [entry.fact.source_seq for entry in entries if entry.fact.source == SOURCE]


def virtual(main: Callable[[MemoryLogStore], Any]) -> None:
    async def run() -> None:
        await main(MemoryLogStore())

    run_virtual(run, seed=1)


def test_P19_facts_are_numbered_from_1_without_gaps_in_the_order_of_recording() -> None:
    async def main(store: MemoryLogStore) -> None:
        publisher = publisher_on(MemoryLog(store, opened_by="a"))
        async with running(publisher):
            publisher.record(happened(1))
            await asyncio.sleep(1)
            for number in range(2, 1_500):
                publisher.record(happened(number))
            assert await publisher.flush(5)
        assert numbers(store.entries) == list(range(1, 1_500))
        assert said(store.entries) == ([happened(number) for number in range(1, 1_500)], 0)
        first, last = store.entries[1].fact, store.entries[-1].fact
        assert (first.incarnation, first.at_ms, last.at_ms) == (7, 1_000, 2_000)
        assert publisher.confirmed == store.last == Position(store.generation, 1_499)
        assert (publisher.unsent, publisher.dropped) == (0, 0)

    virtual(main)


def test_R3_one_append_is_in_flight_and_short_bursts_share_one() -> None:
    class Watched(MemoryLog):
        in_flight = in_flight_max = calls = 0

        async def append(self, facts: Sequence[Fact], *, generation: int | None = None) -> Position:
            self.calls += 1
            self.in_flight += 1
            self.in_flight_max = max(self.in_flight, self.in_flight_max)
            await asyncio.sleep(0.01)
            end = await super().append(facts, generation=generation)
            self.in_flight -= 1
            return end

    async def main(store: MemoryLogStore) -> None:
        log = Watched(store, opened_by="a")
        publisher = publisher_on(log)
        async with running(publisher):
            for number in range(100):
                publisher.record(happened(number))
            await asyncio.sleep(0.005)
            publisher.record(happened(100))
            await asyncio.gather(publisher.flush(5), publisher.flush(5))
        assert (log.calls, log.in_flight_max) == (2, 1)

    virtual(main)


def test_R2_a_lost_reply_repeats_the_same_numbers() -> None:
    async def main(store: MemoryLogStore) -> None:
        verdicts: list[Literal["", "before", "after"]] = ["after", "before", "after"]
        store.fault = lambda method: verdicts.pop() if verdicts else ""
        publisher = publisher_on(MemoryLog(store, opened_by="a"))
        async with running(publisher):
            publisher.record(happened(1))
            publisher.record(happened(2))
            assert await publisher.flush(60)
        assert numbers(store.entries) == [1, 2, 1, 2, 1, 2]
        assert said(store.entries) == ([happened(1), happened(2)], 0)

    virtual(main)


def test_P20_an_outage_delays_facts_and_loses_none() -> None:
    async def main(store: MemoryLogStore) -> None:
        publisher = publisher_on(MemoryLog(store, opened_by="a"), rng=random.Random(3))
        store.is_down = True
        async with running(publisher):
            for number in range(200):
                publisher.record(happened(number))
                await asyncio.sleep(0.1)
            assert (publisher.unsent, publisher.confirmed) == (200, START)
            assert not await publisher.flush(0.5)
            store.is_down = False
            await asyncio.sleep(2.5)
            assert publisher.unsent == 0
        assert said(store.entries) == ([happened(number) for number in range(200)], 0)

    virtual(main)


def test_P28_a_filling_buffer_coalesces_load_reports_and_counts_them() -> None:
    async def main(store: MemoryLogStore) -> None:
        publisher = publisher_on(MemoryLog(store, opened_by="a"), buffer_max=8)
        for number in range(3):
            publisher.record(happened(number))
            publisher.record(load(number))
        publisher.record(load(3, "b"))
        for number in range(4, 40):
            publisher.record(load(number))
        publisher.record(RequestsReported(owner=OWNER, requests=()))
        assert await publisher.flush(5)
        events, gaps = said(store.entries)
        assert gaps == 0
        assert events[0] == FactsDropped(count=36) and publisher.dropped == 36
        assert [event for event in events if isinstance(event, TaskFailed)] == [happened(number) for number in range(3)]
        assert events[-3:] == [load(3, "b"), load(39), RequestsReported(owner=OWNER, requests=())]

    virtual(main)


def test_P28_a_full_buffer_drops_reports_before_anything_else_and_stays_bounded() -> None:
    async def main(store: MemoryLogStore) -> None:
        publisher = publisher_on(MemoryLog(store, opened_by="a"), buffer_max=8)
        for number in range(4):
            publisher.record(load(number, f"i{number}"))
        for number in range(6):
            publisher.record(happened(number))
        assert publisher.unsent == 8 + 1
        for number in range(6, 12):
            publisher.record(happened(number))
        assert await publisher.flush(5)
        kept = [happened(number) for number in range(4, 12)]
        assert said(store.entries) == ([FactsDropped(count=8), *kept], 0)

    virtual(main)


def test_a_report_that_has_its_number_is_not_coalesced() -> None:
    async def main(store: MemoryLogStore) -> None:
        publisher = publisher_on(MemoryLog(store, opened_by="a"), buffer_max=4)
        for number in range(3):
            publisher.record(load(number))
        store.is_down = True
        assert not await publisher.flush(1)
        for number in range(3, 9):
            publisher.record(load(number))
        store.is_down = False
        assert await publisher.flush(5)
        events, gaps = said(store.entries)
        assert gaps == 0
        assert events == [load(0), load(1), load(2), FactsDropped(count=3), load(3), load(4), load(8)]

    virtual(main)


@pytest.mark.parametrize("lose", [0, 1, 5, 10])
def test_R12_a_rewound_log_gets_recent_facts_again_before_new_ones(lose: int) -> None:
    async def main(store: MemoryLogStore) -> None:
        publisher = publisher_on(MemoryLog(store, opened_by="a"))
        async with running(publisher):
            for number in range(10):
                publisher.record(happened(number))
                await asyncio.sleep(0.5)
            store.restart(lose=lose)
            for number in range(10, 13):
                publisher.record(happened(number))
            assert await publisher.flush(5)
        assert said(store.entries) == ([happened(number) for number in range(13)], 0)
        assert numbers(store.entries)[10 - lose :] == list(range(1, 14))
        assert publisher.confirmed.generation == store.generation

    virtual(main)


def test_R12_a_source_with_nothing_new_to_say_notices_a_rewound_log() -> None:
    async def main(store: MemoryLogStore) -> None:
        publisher = publisher_on(MemoryLog(store, opened_by="a"))
        async with running(publisher):
            publisher.record(happened(1))
            await asyncio.sleep(1)
            store.restart(lose=1)
            assert said(store.entries) == ([], 0)
            await asyncio.sleep(2 * CHECK_S)
        assert said(store.entries) == ([happened(1)], 0)

    virtual(main)


def test_R12_what_was_confirmed_just_before_a_long_outage_is_said_again() -> None:
    async def main(store: MemoryLogStore) -> None:
        publisher = publisher_on(MemoryLog(store, opened_by="a"))
        async with running(publisher):
            publisher.record(happened(1))
            await asyncio.sleep(2 * RING_S)
            publisher.record(happened(2))
            await asyncio.sleep(1)
            store.is_down = True
            publisher.record(happened(3))
            await asyncio.sleep(100 * RING_S)
            store.flush()
            store.is_down = False
            assert await publisher.flush(5)
        assert numbers(store.entries) == [2, 3]

    virtual(main)


def test_R12_a_log_that_restarts_while_facts_are_said_again_gets_them_all_again() -> None:
    async def main(store: MemoryLogStore) -> None:
        publisher = publisher_on(MemoryLog(store, opened_by="a"))
        for number in range(1_200):
            publisher.record(happened(number))
        assert await publisher.flush(5)
        store.flush()
        restarts = [4, 2]

        def fault(method: str) -> Literal[""]:
            if restarts and method == "append":
                restarts[0] -= 1
                if restarts[0] == 0:
                    restarts.pop(0)
                    store.flush()
            return ""

        store.fault = fault
        publisher.record(happened(1_200))
        assert await publisher.flush(5)
        assert not restarts
        assert said(store.entries) == ([happened(number) for number in range(1_201)], 0)

    virtual(main)


def test_an_idle_publisher_sleeps() -> None:
    class CountingClock:
        asked = 0

        def now_ms(self) -> int:
            self.asked += 1
            return self.asked

    async def main(store: MemoryLogStore) -> None:
        clock = CountingClock()
        publisher = Publisher(MemoryLog(store, opened_by="a"), SOURCE, 1, clock)
        async with running(publisher):
            publisher.record(happened(1))
            await asyncio.sleep(1)
            asked = clock.asked
            await asyncio.sleep(100)
            assert clock.asked == asked
        assert publisher.unsent == 0

    virtual(main)


def test_a_cancelled_run_goes_on_with_the_same_numbers() -> None:
    async def main(store: MemoryLogStore) -> None:
        publisher = publisher_on(MemoryLog(store, opened_by="a"))
        store.fault = lambda method: "after"
        async with running(publisher):
            publisher.record(happened(1))
            await asyncio.sleep(0.5)
        store.fault = lambda method: ""
        publisher.record(happened(2))
        async with running(publisher):
            await asyncio.sleep(1)
        assert said(store.entries) == ([happened(1), happened(2)], 0)
        assert publisher.unsent == 0

    virtual(main)


def test_P14_what_no_reader_could_read_is_counted_and_holds_up_nothing() -> None:
    async def main(store: MemoryLogStore) -> None:
        publisher = publisher_on(MemoryLog(store, opened_by="a"))
        unsayable = [
            "text",
            None,
            LoadReported(owner=OWNER, load=Load(step_ms=float("nan"))),
            TaskFailed(task="t", error="\ud800"),
            TaskFailed(task="t", error=object()),  # type: ignore[arg-type]
        ]
        for event in unsayable:
            publisher.record(event)
        publisher.record(happened(1))
        assert await publisher.flush(5)
        assert said(store.entries) == ([FactsDropped(count=5), happened(1)], 0)

    virtual(main)


async def _troubled(seed: int) -> tuple[MemoryLogStore, int, list[Entry]]:
    """Record 300 events while the log is killed, rewound, flushed, cut off and made to lose replies."""
    dice, store = random.Random(seed), MemoryLogStore()
    publisher = publisher_on(MemoryLog(store, opened_by="a"), rng=random.Random(seed))
    weights = (0.8, 0.1, 0.1)
    store.fault = lambda method: dice.choices(("", "before", "after"), weights)[0]
    followed: list[Entry] = []

    async def follow() -> None:
        reader, after = MemoryLog(store, opened_by="reader", fault=lambda method: ""), START
        while True:
            entries = await reader.read(after, wait_ms=1_000)
            followed.extend(entries)
            after = entries[-1].position if entries else after

    follower = asyncio.create_task(follow())
    for number in range(300):
        publisher.record(happened(number))
        if number % 30 == 29:
            trouble = dice.randrange(4)
            if trouble < 2:
                store.restart(lose=dice.randrange(6))
            elif trouble == 2:
                store.flush()
        if number % 50 == 0:
            async with running(publisher):
                await asyncio.sleep(0.01)
        async with running(publisher):
            await asyncio.sleep(dice.random() / 100)
    assert await publisher.flush(600)
    await asyncio.sleep(2)
    follower.cancel()
    return store, 300, followed


@pytest.mark.parametrize("seed", range(30))
def test_P19_whatever_happens_to_the_log_every_fact_is_applied_once_in_order(seed: int) -> None:
    store, count, followed = run_virtual(lambda: _troubled(seed), seed=seed)
    everything = [happened(number) for number in range(count)]
    assert said(store.entries) == (everything, 0)
    assert said(followed) == (everything, 0)


def test_P17_one_seed_gives_one_log() -> None:
    logs = [run_virtual(lambda: _troubled(5), seed=5)[0].entries for _ in range(2)]
    assert logs[0] == logs[1]
