"""Supervised tasks end when they are told to, and never in silence before."""

from __future__ import annotations

import asyncio

from midstream.control.events import TaskFailed
from midstream.control.supervise import CANCEL_AGAIN_S, Supervisor

DEADLINE_S = 20 * CANCEL_AGAIN_S


class Facts:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def record(self, event: object) -> None:
        self.said.append(event)


async def test_P14_a_failure_is_a_fact_and_the_loop_goes_on() -> None:
    facts, runs, again = Facts(), 0, asyncio.Event()

    async def fail_once() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise ValueError("no")
        again.set()
        await asyncio.sleep(DEADLINE_S)

    tasks = Supervisor(facts)
    tasks.loop("loop", fail_once)
    async with asyncio.timeout(DEADLINE_S):
        await again.wait()
        await tasks.stop()
    assert facts.said == [TaskFailed(task="loop", error="ValueError: no")]


async def test_P13_a_lost_cancellation_delays_a_stop_but_never_prevents_it() -> None:
    """Found by stopping a stack: a controller that was just sending a command to Redis lived on."""
    lost, started = 0, asyncio.Event()

    async def lose_one() -> None:
        nonlocal lost
        while True:
            started.set()
            try:
                await asyncio.sleep(DEADLINE_S)
            except asyncio.CancelledError:
                lost += 1
                if lost > 1:
                    raise

    tasks = Supervisor(Facts())
    loop = tasks.loop("loop", lose_one)
    async with asyncio.timeout(DEADLINE_S):
        await started.wait()
        await tasks.stop()
    assert loop.cancelled()
    assert lost == 2
