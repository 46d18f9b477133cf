"""Copies of simulated fleets: bandwidth is shared, time passes, and what may not be written is refused."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from midstream.control.errors import TransferFailed
from midstream.control.ids import Node
from midstream.control.simulate.loop import run_virtual
from midstream.migration.transfers.base import CopyReport
from midstream.migration.transfers.paced import Links, PacedChannel, PacedTransfer

BLOCK = np.broadcast_to(np.zeros(1, dtype=np.uint8), 1_000_000).data


def transfers(links: Links, *names: str) -> list[PacedTransfer]:
    return [PacedTransfer(links, Node(name, 1, name)) for name in names]


async def opened(source: PacedTransfer, target: PacedTransfer, handle: str) -> PacedChannel:
    address = await target.start()
    target.expect(handle, _sink)
    return await source.open(address, handle)


def _sink(index: int) -> memoryview:
    if index >= 100:
        raise IndexError(index)
    return BLOCK


def test_a_copy_takes_what_its_bytes_take_on_the_link() -> None:
    async def run() -> tuple[CopyReport, float]:
        a, b = transfers(Links(100e6, 0.001), "a", "b")
        channel = await opened(a, b, "h")
        began = asyncio.get_running_loop().time()
        report = await channel.send([(i, BLOCK) for i in range(50)])
        return report, asyncio.get_running_loop().time() - began

    report, took_s = run_virtual(run, seed=1)
    assert (report.blocks, report.copied_bytes) == (50, 50_000_000)
    assert took_s == pytest.approx(0.502, abs=1e-4)
    assert report.duration_ms == pytest.approx(502, abs=0.1)


def test_two_copies_from_one_source_share_its_link_and_two_pairs_do_not() -> None:
    async def run(*pairs: tuple[str, str]) -> float:
        links = Links(100e6, 0.0)
        nodes = dict(zip("abcd", transfers(links, *"abcd"), strict=True))
        channels = [await opened(nodes[s], nodes[t], s + t) for s, t in pairs]
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(channel.send([(i, BLOCK) for i in range(40)]) for channel in channels))
        return asyncio.get_running_loop().time() - began

    assert run_virtual(lambda: run(("a", "b"), ("a", "c")), seed=1) == pytest.approx(0.8, abs=1e-3)
    assert run_virtual(lambda: run(("a", "c"), ("b", "c")), seed=1) == pytest.approx(0.8, abs=1e-3)
    assert run_virtual(lambda: run(("a", "b"), ("c", "d")), seed=1) == pytest.approx(0.4, abs=1e-3)


def test_P13_a_copy_ends_when_a_node_dies_or_is_cut_off_meanwhile() -> None:
    async def run() -> float:
        is_open = True
        a, b = transfers(Links(100e6, 0.001, lambda source, target: is_open), "a", "b")
        channel = await opened(a, b, "h")
        began = asyncio.get_running_loop().time()
        copy = asyncio.create_task(channel.send([(i, BLOCK) for i in range(80)]))
        await asyncio.sleep(0.3)
        is_open = False
        with pytest.raises(TransferFailed, match="died or is cut off"):
            await copy
        with pytest.raises(TransferFailed, match="no answer"):
            await a.open("b#1", "h")
        return asyncio.get_running_loop().time() - began

    assert run_virtual(run, seed=1) < 0.5, "not to the end of the copy"


def test_P18_the_end_of_a_former_life_does_not_end_the_next() -> None:
    async def run() -> None:
        links = Links(100e6, 0.0)
        (a,) = transfers(links, "a")
        former, following = (PacedTransfer(links, Node("b", life, "b")) for life in (1, 2))
        await former.start()
        channel = await opened(a, following, "h")
        await former.stop()
        await channel.send([(0, BLOCK)])
        await a.open("b#2", "h")

    run_virtual(run, seed=1)


@pytest.mark.parametrize("what", ["forgotten", "outside", "shorter", "closed", "gone"])
def test_what_may_not_be_written_is_refused(what: str) -> None:
    async def run() -> None:
        a, b = transfers(Links(100e6, 0.0), "a", "b")
        channel = await opened(a, b, "h")
        first, block = 0, BLOCK
        if what == "forgotten":
            await b.forget("h")
        elif what == "outside":
            first = 100
        elif what == "shorter":
            block = BLOCK[:10]
        elif what == "closed":
            await channel.close()
        else:
            await b.stop()
            await a.open("b#1", "h")
        await channel.send([(first, block)])

    with pytest.raises(TransferFailed):
        run_virtual(run, seed=1)
