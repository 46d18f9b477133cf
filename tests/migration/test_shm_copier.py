"""The process that copies for shm: it does, it is never needed, and it never outlives anybody."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from midstream.migration.transfers.shm import ShmTransfer
from midstream.migration.transfers.shm_copier import Copier
from midstream.migration.transfers.shm_memory import Region, Regions
from tests.migration.transfer_storm import HERE, peer

PIECE = 4096
PIECES = 16


def children(of: int | str = "self") -> set[int]:
    """Processes that one has started and that have not been waited for."""
    return {int(pid) for path in Path(f"/proc/{of}/task").glob("*/children") for pid in path.read_text().split()}


def is_alive(pid: int) -> bool:
    """Whether it still runs; one that nobody has waited for does not."""
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False


def maps(pid: int) -> str:
    """What a process has mapped; nothing once it is gone."""
    try:
        return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while is_alive(pid):
            await asyncio.sleep(0.02)


class Ready:
    """A copier, what it copies from, and where to."""

    def __init__(self, stall_s: float) -> None:
        self.source, self.target = Region(PIECE * PIECES), Region(PIECE * PIECES)
        self.source.view[:] = os.urandom(self.source.size)
        self.copier = Copier(Regions([self.target]), stall_s)

    async def start(self) -> None:
        before = children()
        self.copier.start()
        (self.pid,) = children() - before
        lent = self.source.lend()
        self.number = self.copier.lend(lent, is_writable=False)
        os.close(lent)
        async with asyncio.timeout(30):
            while not await self.copy():
                await asyncio.sleep(0.02)

    async def copy(self) -> bool:
        order = np.random.default_rng(1).permutation(PIECES) * PIECE
        return await self.copier.copy(self.target.address + order, self.number, order, PIECE)


@pytest.fixture
async def ready() -> AsyncIterator[Ready]:
    ready = Ready(0.2)
    await ready.start()
    yield ready
    await ready.copier.stop()
    assert not is_alive(ready.pid)


async def test_it_copies_what_it_is_told(ready: Ready) -> None:
    assert bytes(ready.target.view) == bytes(ready.source.view)


async def test_memory_that_it_does_not_have_is_a_no(ready: Ready) -> None:
    ready.copier.take_back(ready.number)
    assert not await ready.copy()
    elsewhere = np.zeros(1, np.int64) + ready.source.address
    assert not await ready.copier.copy(elsewhere, ready.number, np.zeros(1, np.int64), PIECE)


async def test_P13_one_that_hangs_is_a_no_and_touches_nothing_more(ready: Ready) -> None:
    os.kill(ready.pid, signal.SIGSTOP)
    assert await asyncio.gather(ready.copy(), ready.copy()) == [False, False]
    assert not maps(ready.pid), "its memory is let go of before we are told"
    assert not await ready.copy()


async def test_a_copy_goes_on_without_it() -> None:
    region, memory = Region(PIECE * PIECES), Region(PIECE * PIECES)
    region.view[:] = os.urandom(region.size)
    before = children()
    source, target = ShmTransfer(HERE, [region]), ShmTransfer(HERE, [memory])
    address = await target.start()
    (pid,) = children() - before
    target.expect("h", lambda i: memory.view[i * PIECE : (i + 1) * PIECE])
    channel = await source.open(address, "h")
    for how in (signal.SIGSTOP, signal.SIGKILL):
        os.kill(pid, how)
        memory.view[:] = bytes(memory.size)
        await channel.send([(i, region.view[i * PIECE : (i + 1) * PIECE]) for i in range(PIECES)], checksum=True)
        assert bytes(memory.view) == bytes(region.view)
    await source.stop()
    await target.stop()
    assert children() == before


async def test_it_ends_with_the_one_that_it_copies_for() -> None:
    async with peer("shm") as (process, _):
        (pid,) = children(process.pid)
        process.kill()
        await until_gone(pid)
