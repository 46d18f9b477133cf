"""What leaves an instance stays within its budget, however many moves share it."""

from __future__ import annotations

import asyncio

import pytest

from midstream.migration.transfers.base import Where
from midstream.migration.transfers.budget import Budget
from midstream.migration.transfers.registry import make_transfers
from tests.contracts.test_transfer import Memory


async def test_no_budget_is_no_wait():
    await asyncio.wait_for(Budget().take(1 << 60), 0.001)


@pytest.mark.parametrize("backend", ["shm", "rpc"])
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
