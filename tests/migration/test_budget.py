"""What leaves an instance stays within its budget, however many moves share it."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

from midstream.migration.transfers.base import Where
from midstream.migration.transfers.budget import Budget
from midstream.migration.transfers.registry import make_transfers
from tests.contracts.test_transfer import Memory


async def test_no_budget_is_no_wait():
    await asyncio.wait_for(Budget().take(1 << 60), 0.001)


BACKENDS = ["shm", "rpc", *(["gloo"] if importlib.util.find_spec("torch") else [])]


@pytest.mark.parametrize("backend", BACKENDS)
async def test_moves_share_a_budget_evenly(backend):
    here = Where(bind_host="127.0.0.1", secret=b"a secret", bytes_per_s=40e6)
    source = make_transfers([backend], here)[backend]
    target = make_transfers([backend], Where(bind_host="127.0.0.1", secret=b"a secret"))[backend]
    address = await target.start()
    loop, ends = asyncio.get_running_loop(), []

    async def move(number: int) -> None:
        got = Memory(100, 100_000)
        target.expect(f"h{number}", got.block)
        channel = await source.open(address, f"h{number}")
        await channel.send(Memory(100, 100_000).all())
        ends.append(loop.time())

    started = loop.time()
    await asyncio.gather(move(1), move(2))
    assert min(ends) - started > 0.2, "20 MB take half a second; a frame each may go early"
    assert max(ends) - started > 0.35
    await source.stop()
    await target.stop()


async def test_who_is_cancelled_gives_back_what_it_waited_for():
    budget, loop = Budget(1_000), asyncio.get_running_loop()
    await budget.take(50)
    waiting = [asyncio.create_task(budget.take(10_000)) for _ in range(8)]
    await asyncio.sleep(0.01)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    started = loop.time()
    await budget.take(50)
    assert loop.time() - started < 5.0, "eighty seconds' worth was asked for and not sent"


@pytest.mark.parametrize("backend", BACKENDS)
async def test_P13_waiting_for_the_budget_is_no_stall(backend):
    secret = b"a secret"
    source = make_transfers([backend], Where(bind_host="127.0.0.1", secret=secret, stall_s=0.3, bytes_per_s=30e6))
    target = make_transfers([backend], Where(bind_host="127.0.0.1", secret=secret, stall_s=0.3))
    sent, got = Memory(12, 1 << 20, seed=1), [Memory(12, 1 << 20) for _ in range(4)]
    address = await target[backend].start()

    async def move(number: int) -> None:
        target[backend].expect(f"h{number}", got[number].block)
        channel = await source[backend].open(address, f"h{number}")
        await channel.send(sent.all())

    await asyncio.gather(*map(move, range(4)))
    assert [memory.data for memory in got] == [sent.data] * 4
    await source[backend].stop()
    await target[backend].stop()
