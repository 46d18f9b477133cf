"""The follower: one fold that keeps up, through outages, rewinds and trimming."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from midstream.control.adapters.memory_log import MemoryLog, MemoryLogStore
from midstream.control.codec import encode_state
from midstream.control.errors import LogUnavailable
from midstream.control.events import Entry, Fact, TaskFailed
from midstream.control.fold import fold
from midstream.control.follower import Follower
from midstream.control.ids import Position
from midstream.control.state import State

PATIENCE_S = 20.0


@asynccontextmanager
async def following(follower: Follower) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(follower.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, LogUnavailable):
            await task


class Writer:
    """One source that appends numbered facts."""

    def __init__(self, store: MemoryLogStore) -> None:
        self.log = MemoryLog(store, opened_by="writer")
        self.seq = 0

    async def write(self, count: int) -> Position:
        facts = []
        for _ in range(count):
            self.seq += 1
            facts.append(Fact("writer", 1, self.seq, 0, TaskFailed(task="t", error=str(self.seq))))
        return await self.log.append(facts)


@pytest.fixture
def store() -> MemoryLogStore:
    return MemoryLogStore()


def follower_of(store: MemoryLogStore, **more) -> Follower:
    return Follower(MemoryLog(store, opened_by="follower"), **more)


async def test_it_folds_everything_and_tells_each_fact_once(store: MemoryLogStore) -> None:
    seen: list[Entry] = []
    follower = follower_of(store, on_entry=seen.append)
    writer = Writer(store)
    await writer.write(1_200)
    async with following(follower):
        await follower.caught_up(PATIENCE_S)
        again = store.entries[5].fact
        await writer.log.append([again])
        last = await writer.write(1)
        await follower.reached(last)
    assert encode_state(follower.state) == encode_state(fold(store.entries))
    assert len(seen) == len(store.entries) - 1


async def test_who_waits_hears_of_a_fold_that_came_whole_from_the_archive(store: MemoryLogStore) -> None:
    """Nothing is written afterwards: a quiet log must not keep a new process waiting."""
    await Writer(store).write(3)

    async def archived() -> State:
        await asyncio.sleep(0.05)
        return fold(store.entries)

    follower = follower_of(store, bootstrap=archived)
    async with following(follower):
        await follower.caught_up(PATIENCE_S)


async def test_changed_wakes_at_the_next_fold(store: MemoryLogStore) -> None:
    follower, writer = follower_of(store), Writer(store)
    async with following(follower):
        await writer.write(1)
        await follower.caught_up(PATIENCE_S)
        waiting = asyncio.create_task(follower.changed())
        await asyncio.sleep(0)
        assert not waiting.done()
        await writer.write(1)
        await asyncio.wait_for(waiting, PATIENCE_S)


async def test_P20_while_the_log_is_away_the_last_state_stays_and_then_it_goes_on(store: MemoryLogStore) -> None:
    follower, writer = follower_of(store), Writer(store)
    async with following(follower) as task:
        known = await writer.write(3)
        await follower.caught_up(PATIENCE_S)
        store.is_down = True
        with pytest.raises(LogUnavailable, match="not caught up"):
            await follower.caught_up(0.2)
        assert follower.state.position == known
        assert not task.done()
        store.is_down = False
        await follower.reached(await writer.write(1))


async def test_a_new_generation_after_a_rewind_is_folded_on(store: MemoryLogStore) -> None:
    follower, writer = follower_of(store), Writer(store)
    async with following(follower):
        known = await writer.write(10)
        await follower.caught_up(PATIENCE_S)
        store.restart(lose=4)
        last = await writer.write(1)
        await follower.reached(last)
    assert follower.state.generation == last.generation > known.generation
    assert follower.state.sources["writer"].seq == 11


async def test_P19_R12_a_log_that_a_newcomer_opened_after_a_flush_is_a_new_generation(store: MemoryLogStore) -> None:
    """Nobody told it which generations there had been, and it has more facts than the log had before."""
    follower, writer = follower_of(store), Writer(store)
    async with following(follower):
        known = await writer.write(10)
        await follower.caught_up(PATIENCE_S)
        store.flush()
        await asyncio.sleep(0.003)
        writer.log = MemoryLog(store, opened_by="newcomer")
        last = await writer.write(20)
        await follower.reached(last)
    assert follower.state.generation == last.generation > known.generation
    assert (follower.state.sources["writer"].seq, follower.state.gaps) == (30, 0)


async def test_it_starts_from_a_snapshot(store: MemoryLogStore) -> None:
    writer = Writer(store)
    await writer.write(20)
    state = fold(store.entries)
    await writer.log.save_snapshot(state.position, encode_state(state))
    await writer.log.trim(state.position)
    last = await writer.write(2)
    seen: list[Entry] = []
    follower = follower_of(store, on_entry=seen.append)
    async with following(follower):
        await follower.reached(last)
    assert follower.state.sources["writer"].seq == 22
    assert follower.state.gaps == 0
    assert len(seen) == 2


async def test_it_reloads_the_snapshot_when_the_log_was_trimmed_above_it(store: MemoryLogStore) -> None:
    follower, writer = follower_of(store), Writer(store)
    async with following(follower):
        await writer.write(5)
        await follower.caught_up(PATIENCE_S)
    await writer.write(10)
    state = fold(store.entries)
    await writer.log.save_snapshot(state.position, encode_state(state))
    last = await writer.write(1)
    await writer.log.trim(last)
    async with following(follower):
        await follower.reached(last)
    assert follower.state.gaps == 0


async def test_a_log_that_nobody_can_complete_is_an_error_in_plain_words(store: MemoryLogStore) -> None:
    writer = Writer(store)
    last = await writer.write(10)
    await writer.log.trim(last)
    with pytest.raises(LogUnavailable, match=f"goes on at {last}.*neither snapshot nor archive"):
        await follower_of(store).run()


async def test_the_archive_completes_what_log_and_snapshot_do_not(store: MemoryLogStore) -> None:
    writer = Writer(store)
    last = await writer.write(10)
    archived = fold(store.entries[:-1])
    await writer.log.trim(last)

    async def bootstrap() -> State:
        return archived

    follower = follower_of(store, bootstrap=bootstrap)
    async with following(follower):
        await follower.reached(last)
    assert follower.state.gaps == 0


async def test_a_snapshot_that_cannot_be_read_is_as_none(store: MemoryLogStore) -> None:
    writer = Writer(store)
    last = await writer.write(3)
    await writer.log.save_snapshot(last, b"{nonsense")
    follower = follower_of(store)
    async with following(follower):
        await follower.caught_up(PATIENCE_S)
    assert follower.state.sources["writer"].seq == 3
