"""The log that feeds its readers: one order for all, whatever readers say meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from midstream.control.adapters.memory_feed import FedFollower, FeedRecorder, FeedStore
from midstream.control.adapters.memory_log import MemoryLog
from midstream.control.events import Entry, GatewayStarted
from midstream.control.fold import fold
from midstream.control.simulate.loop import VirtualClock, run_virtual


def test_every_reader_sees_one_order_and_what_readers_say_comes_after() -> None:
    async def run() -> tuple[list[Entry], list[Entry]]:
        clock = VirtualClock(asyncio.get_running_loop(), 1_000)
        store = FeedStore(clock)
        echo, said = FeedRecorder(store, "gateway/echo", 1, clock), FeedRecorder(store, "gateway/a", 1, clock)
        seen: tuple[list[Entry], list[Entry]] = ([], [])

        def answer(entry: Entry) -> None:
            seen[0].append(entry)
            if entry.fact.source == "gateway/a":
                echo.record(GatewayStarted(gateway="echo"))

        store.readers += (answer, seen[1].append)
        for _ in range(3):
            said.record(GatewayStarted(gateway="a"))
        return seen

    one, other = run_virtual(run, seed=1)
    assert one == other
    assert [entry.position.seq for entry in one] == list(range(7))
    assert [entry.fact.source for entry in one[1:]] == ["gateway/a", "gateway/echo"] * 3


def test_a_fed_fold_is_the_fold_of_what_was_said() -> None:
    async def run() -> bool:
        clock = VirtualClock(asyncio.get_running_loop(), 1_000)
        store = FeedStore(clock)
        follower = FedFollower(MemoryLog(store, opened_by="t"), store)
        seen: list[Entry] = []
        store.readers.append(seen.append)
        changed = asyncio.create_task(follower.changed())
        await asyncio.sleep(0)
        FeedRecorder(store, "gateway/a", 1, clock).record(GatewayStarted(gateway="a"))
        await changed
        return follower.state == fold(seen) and follower.state.gaps == 0 and len(seen) == 2

    assert run_virtual(run, seed=1)


def test_what_is_no_event_is_an_error() -> None:
    async def run() -> None:
        clock = VirtualClock(asyncio.get_running_loop(), 1_000)
        FeedRecorder(FeedStore(clock), "gateway/a", 1, clock).record("hello")

    with pytest.raises(TypeError, match="hello"):
        run_virtual(run, seed=1)
