"""The controller: ticks as facts, any number of replicas, outages and new generations survived."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from midstream.control.adapters.clock import SystemClock
from midstream.control.adapters.local_valkey import LocalValkey
from midstream.control.adapters.memory_log import MemoryLog, MemoryLogStore
from midstream.control.adapters.redis_log import RedisLog
from midstream.control.codec import decode_state, encode_state
from midstream.control.commands import StartMigration
from midstream.control.decide import decide
from midstream.control.errors import LogUnavailable
from midstream.control.events import Entry, Fact, MoveDecided, MoveRequested, StateCarried, TickElapsed
from midstream.control.fold import apply, fold
from midstream.control.follower import Follower
from midstream.control.ids import COMMIT_SOURCE, START, Position
from midstream.control.ports import FactLog
from midstream.control.service import Controller
from midstream.control.simulate.loop import VirtualClock, run_virtual
from midstream.control.state import State
from tests.control.fixtures import Story, owner

A, B = owner("a"), owner("b")


class SkewedClock:
    """A clock that is wrong by a constant."""

    def __init__(self, inner: Any, by_ms: int) -> None:
        self._inner = inner
        self._by_ms = by_ms

    def now_ms(self) -> int:
        return int(self._inner.now_ms()) + self._by_ms


@asynccontextmanager
async def controlling(
    log: FactLog, clock: Any, name: str = "c0", seed: int = 1, **more: Any
) -> AsyncIterator[Controller]:
    """One controller process: its own follower, its own handle on the log."""
    follower = Follower(log)
    controller = Controller(
        log=log,
        follower=follower,
        clock=clock,
        name=name,
        seed_source=lambda: random.Random(seed).getrandbits(63),
        **more,
    )
    tasks = [asyncio.create_task(follower.run()), asyncio.create_task(controller.run())]
    try:
        yield controller
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


def facts_of(story: Story) -> list[Fact]:
    """All that others than the log and the controllers said."""
    return [e.fact for e in story.entries if e.fact.source not in ("log", COMMIT_SOURCE)]


def busy_cluster() -> Story:
    """One request that runs on `a`, so that ticks come at full pace."""
    story = Story()
    story.instance("a")
    story.instance("b")
    story.running("r", A)
    return story


def ticks(entries: list[Entry]) -> list[TickElapsed]:
    return [entry.fact.event for entry in entries if isinstance(entry.fact.event, TickElapsed)]


def committed(entries: list[Entry]) -> list[Fact]:
    return [entry.fact for entry in entries if entry.fact.source == COMMIT_SOURCE]


def check_replay(entries: list[Entry]) -> int:
    """Every tick decided again from the log alone gives what was committed with it; returns the decisions."""
    state, behind, decisions = State(), 0, 0
    for index, entry in enumerate(entries):
        tick = entry.fact.event
        if not isinstance(tick, TickElapsed):
            continue
        while entries[behind].position <= tick.decided_at:
            apply(state, entries[behind])
            behind += 1
        expected = decide(state, tick).events
        recorded = tuple(e.fact.event for e in entries[index + 1 : index + 1 + len(expected)])
        assert recorded == expected
        decisions += len(expected)
    return decisions


def in_virtual_time(main: Callable[[MemoryLogStore, VirtualClock], Any], seed: int = 1) -> MemoryLogStore:
    """Run a scenario on the virtual loop; its log is what remains."""

    async def scenario() -> MemoryLogStore:
        clock = VirtualClock(asyncio.get_running_loop(), 1_700_000_000_000)
        store = MemoryLogStore(clock=clock)
        await main(store, clock)
        return store

    return run_virtual(scenario, seed=seed)


def handle(store: MemoryLogStore, name: str) -> MemoryLog:
    return MemoryLog(store, opened_by=name)


# --- one controller -------------------------------------------------------------------------------


def test_the_first_commit_of_a_log_is_the_state_and_then_ticks_come() -> None:
    async def main(store: MemoryLogStore, clock: VirtualClock) -> None:
        await handle(store, "test").append(facts_of(busy_cluster()))
        async with controlling(handle(store, "c0"), clock):
            await asyncio.sleep(5)

    entries = in_virtual_time(main).entries
    facts = committed(entries)
    assert isinstance(facts[0].event, StateCarried)
    assert all(isinstance(fact.event, TickElapsed) for fact in facts[1:] if not is_verdict(fact))
    assert [fact.source_seq for fact in facts] == list(range(1, len(facts) + 1))
    assert {fact.incarnation for fact in facts} == {entries[0].position.generation}
    gaps = [b.now_ms - a.now_ms for a, b in zip(ticks(entries), ticks(entries)[1:], strict=False)]
    assert gaps
    assert all(250 <= gap < 400 for gap in gaps)


def is_verdict(fact: Fact) -> bool:
    return type(fact.event).__name__.startswith("Instance")


def test_an_idle_cluster_is_looked_at_once_a_second_and_wakes_at_once() -> None:
    woken: list[float] = []

    async def main(store: MemoryLogStore, clock: VirtualClock) -> None:
        story = busy_cluster()
        facts = facts_of(story)
        log = handle(store, "test")
        await log.append(facts[:2])
        async with controlling(handle(store, "c0"), clock):
            await asyncio.sleep(10)
            idle = ticks(store.entries)
            assert 8 <= len(idle) <= 11
            started = clock.now_ms()
            await log.append(facts[2:])
            while len(ticks(store.entries)) == len(idle):
                await asyncio.sleep(0.01)
            woken.append(clock.now_ms() - started)

    in_virtual_time(main)
    assert woken[0] <= 300


def test_P18_a_move_asked_for_becomes_one_fact_and_one_command_in_one_step() -> None:
    async def main(store: MemoryLogStore, clock: VirtualClock) -> None:
        story = busy_cluster()
        story.say("admin", MoveRequested(operation="o", request="r", target="b", actor="ann"))
        await handle(store, "test").append(facts_of(story))
        async with controlling(handle(store, "c0"), clock):
            await asyncio.sleep(2)

    store = in_virtual_time(main)
    moves = [e.fact.event for e in store.entries if isinstance(e.fact.event, MoveDecided)]
    commands = [command for _, _, command in store.commands["a"]]
    assert len(moves) == len(commands) == 1
    assert isinstance(commands[0], StartMigration)
    assert commands[0].migration == moves[0].migration
    assert check_replay(store.entries) >= 1


def test_P17_the_same_seed_gives_the_same_log() -> None:
    async def main(store: MemoryLogStore, clock: VirtualClock) -> None:
        await handle(store, "test").append(facts_of(busy_cluster()))
        async with controlling(handle(store, "c0"), clock), controlling(handle(store, "c1"), clock, "c1", seed=2):
            await asyncio.sleep(5)

    assert in_virtual_time(main, 5).entries == in_virtual_time(main, 5).entries


def test_snapshots_are_saved_and_equal_the_fold_of_the_log() -> None:
    async def main(store: MemoryLogStore, clock: VirtualClock) -> None:
        await handle(store, "test").append(facts_of(busy_cluster()))
        async with controlling(handle(store, "c0"), clock, snapshot_s=1.0):
            await asyncio.sleep(7)

    store = in_virtual_time(main)
    assert store.snapshot is not None
    position, text = store.snapshot
    assert position > Position(store.generation, 10)
    prefix = [entry for entry in store.entries if entry.position <= position]
    assert encode_state(fold(prefix)) == text
    assert encode_state(fold(store.entries, decode_state(text))) == encode_state(fold(store.entries))


def test_P20_it_outlives_an_outage_and_ticks_on_in_the_same_generation() -> None:
    async def main(store: MemoryLogStore, clock: VirtualClock) -> None:
        await handle(store, "test").append(facts_of(busy_cluster()))
        async with controlling(handle(store, "c0"), clock):
            await asyncio.sleep(2)
            store.is_down = True
            await asyncio.sleep(30)
            before = len(ticks(store.entries))
            store.is_down = False
            await asyncio.sleep(5)
            assert len(ticks(store.entries)) > before

    state = fold(in_virtual_time(main).entries)
    assert state.gaps == 0
    assert {view.health for view in state.instances.values()} != {"lost"}


@pytest.mark.parametrize("method", ["before", "after"])
def test_P18_a_commit_of_unknown_outcome_happens_once_or_not(method: str) -> None:
    async def main(store: MemoryLogStore, clock: VirtualClock) -> None:
        rng = random.Random(method)
        story = busy_cluster()
        story.say("admin", MoveRequested(operation="o", request="r", target="b", actor="ann"))
        await handle(store, "test").append(facts_of(story))
        store.fault = lambda name: method if name == "commit" and rng.random() < 0.5 else ""  # type: ignore[assignment, return-value]
        async with controlling(handle(store, "c0"), clock):
            await asyncio.sleep(20)

    store = in_virtual_time(main)
    assert sum(isinstance(e.fact.event, MoveDecided) for e in store.entries) == 1
    assert len(store.commands["a"]) == 1
    seqs = [fact.source_seq for fact in committed(store.entries)]
    assert seqs == list(range(1, len(seqs) + 1))
    check_replay(store.entries)


def test_P19_a_new_generation_begins_with_the_state_of_before() -> None:
    async def main(store: MemoryLogStore, clock: VirtualClock) -> None:
        await handle(store, "test").append(facts_of(busy_cluster()))
        async with controlling(handle(store, "c0"), clock):
            await asyncio.sleep(3)
            generations.append(store.generation)
            store.flush()
            await asyncio.sleep(3)

    generations: list[int] = []
    store = in_virtual_time(main)
    entries = store.entries
    assert {entry.position.generation for entry in entries} == {store.generation}
    assert store.generation > generations[0]
    first = committed(entries)[0]
    assert isinstance(first.event, StateCarried)
    assert first.source_seq == 1
    assert "r" in fold(entries).requests
    assert len(ticks(entries)) > 3


# --- several controllers --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_P18_controllers_that_race_commit_each_decision_once(seed: int) -> None:
    """Two at the same pace, one with a clock far ahead, one far behind."""

    async def main(store: MemoryLogStore, clock: VirtualClock) -> None:
        story = busy_cluster()
        log = handle(store, "test")
        await log.append(facts_of(story))
        clocks = (clock, clock, SkewedClock(clock, 60_000), SkewedClock(clock, -60_000))
        async with (
            controlling(handle(store, "c0"), clocks[0], "c0", 1),
            controlling(handle(store, "c1"), clocks[1], "c1", 2),
            controlling(handle(store, "c2"), clocks[2], "c2", 3),
            controlling(handle(store, "c3"), clocks[3], "c3", 4),
        ):
            for index in range(10):
                known = len(story.entries)
                story.say("admin", MoveRequested(operation=f"o{index}", request="nobody", target="b", actor="ann"))
                await log.append([entry.fact for entry in story.entries[known:]])
                await asyncio.sleep(1)

    entries = in_virtual_time(main, seed).entries
    seqs = [fact.source_seq for fact in committed(entries)]
    assert seqs == list(range(1, len(seqs) + 1))
    answered = [e.fact.event.operation for e in entries if type(e.fact.event).__name__ == "MoveRejected"]
    assert answered == [f"o{index}" for index in range(10)]
    times = [tick.now_ms for tick in ticks(entries)]
    assert times == sorted(times)
    assert len(times) <= 10 * 4 + 5
    assert check_replay(entries) >= 10


def test_when_the_leading_controller_dies_another_goes_on() -> None:
    async def main(store: MemoryLogStore, clock: VirtualClock) -> None:
        await handle(store, "test").append(facts_of(busy_cluster()))
        async with AsyncExitStack() as stack:
            async with controlling(handle(store, "c0"), SkewedClock(clock, 3_600_000), "c0", 1):
                await asyncio.sleep(1)
                second = await stack.enter_async_context(controlling(handle(store, "c1"), clock, "c1", 2))
                await asyncio.sleep(5)
            before, count = second.commits, len(ticks(store.entries))
            await asyncio.sleep(5)
            assert second.commits > before
            assert len(ticks(store.entries)) - count >= 15

    in_virtual_time(main)


async def test_P18_two_controllers_on_a_real_valkey(valkey: LocalValkey, cluster: str, tmp_path: Path) -> None:
    def client(name: str) -> RedisLog:
        return RedisLog(valkey.url, cluster=cluster, opened_by=name)

    logs = [client(name) for name in ("test", "c0", "c1")]
    story, clock = busy_cluster(), SystemClock()
    await logs[0].append(facts_of(story))
    async with (
        controlling(logs[1], clock, "c0", 1, tick_ms=20) as c0,
        controlling(logs[2], clock, "c1", 2, tick_ms=20) as c1,
    ):
        for index in range(20):
            known = len(story.entries)
            story.say("admin", MoveRequested(operation=f"o{index}", request="nobody", target="b", actor="ann"))
            await logs[0].append([entry.fact for entry in story.entries[known:]])
            await asyncio.sleep(0.1)
        assert c0.commits + c1.commits > 20
    entries = await read_all(logs[0])
    for log in logs:
        await log.close()
    seqs = [fact.source_seq for fact in committed(entries)]
    assert seqs == list(range(1, len(seqs) + 1))
    answered = [e.fact.event.operation for e in entries if type(e.fact.event).__name__ == "MoveRejected"]
    assert answered == sorted(set(answered), key=lambda name: int(name[1:]))
    assert len(answered) >= 19
    check_replay(entries)


async def read_all(log: FactLog) -> list[Entry]:
    entries: list[Entry] = []
    while True:
        with suppress(LogUnavailable):
            more = await log.read(entries[-1].position if entries else START)
            if not more:
                return entries
            entries += more
