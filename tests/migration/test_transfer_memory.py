"""The transfer of the simulation takes virtual time and breaks as a real one would: with bytes half written."""

from __future__ import annotations

import asyncio
import random

import pytest

from midstream.control.errors import TransferFailed, UnknownThing
from midstream.control.ids import Node
from midstream.control.simulate.faults import CorruptBlock, Cut, Fault, FaultPlan, Slow
from midstream.control.simulate.loop import run_virtual
from midstream.migration.transfers.memory import MemoryTransfer
from midstream.migration.transfers.registry import make_transfer
from midstream.migration.wires.memory import MemoryNetwork
from tests.contracts.test_transfer import Memory

A, B = "llumlet/a", "llumlet/b"


async def linked(*faults: Fault) -> tuple[MemoryNetwork, MemoryTransfer, MemoryTransfer, str]:
    """Two nodes with 1,000 bytes a millisecond between them."""
    network = MemoryNetwork(random.Random(1), FaultPlan(faults))
    source, target = (MemoryTransfer(network, Node(name, 1, name), bytes_per_ms=1000.0) for name in (A, B))
    await source.start()
    return network, source, target, await target.start()


def copy(*faults: Fault, checksum: bool = False, break_at_s: float | None = None) -> tuple[str, Memory, Memory, float]:
    """Copy 10 blocks of 10,000 bytes (100 ms) under faults; return how it ended, both memories and how long it took."""

    async def main() -> tuple[str, Memory, Memory, float]:
        network, source, target, address = await linked(*faults)
        sent, got = Memory(10, 10_000, seed=1), Memory(10, 10_000)
        target.expect("h", got.block)
        channel = await source.open(address, "h")
        if break_at_s is not None:
            asyncio.get_running_loop().call_later(break_at_s, network.crash, B)
        started = asyncio.get_running_loop().time()
        try:
            await channel.send(sent.all(), checksum=checksum)
            how = "stored"
        except TransferFailed as error:
            how = str(error)
        return how, sent, got, asyncio.get_running_loop().time() - started

    return run_virtual(main, seed=1)


def test_a_copy_takes_bytes_over_bandwidth():
    how, sent, got, seconds = copy()
    assert (how, got.data) == ("stored", sent.data)
    assert seconds == pytest.approx(0.1, rel=0.02)


def test_a_slow_node_takes_longer():
    how, _, _, seconds = copy(Slow(at_ms=0, until_ms=10_000, node=B, factor=5.0))
    assert how == "stored"
    assert seconds == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("break_at_s", [0.01, 0.05, 0.099])
def test_a_crash_leaves_torn_blocks_and_an_error_at_once(break_at_s):
    how, sent, got, seconds = copy(break_at_s=break_at_s)
    assert "died" in how
    assert any(got.data) and got.data != sent.data
    assert seconds < break_at_s + 0.1


def test_P13_a_cut_is_noticed_after_about_a_second():
    how, sent, got, seconds = copy(Cut(at_ms=50, until_ms=5000, a=A, b=B))
    assert "cut off" in how
    assert got.data != sent.data
    assert seconds < 1.5


def test_corruption_is_caught_by_checksums_and_only_by_them():
    spoiled = CorruptBlock(at_ms=0, until_ms=1000, source=A, probability=0.5)
    assert "checksum" in copy(spoiled, checksum=True)[0]
    how, sent, got, _ = copy(spoiled)
    assert how == "stored"
    assert got.data != sent.data


def test_a_next_life_of_the_target_is_not_reached_at_the_old_address():
    async def main() -> None:
        network, source, target, address = await linked()
        target.expect("h", Memory(1).block)
        channel = await source.open(address, "h")
        network.crash(B)
        again = MemoryTransfer(network, Node(B, 2, B))
        assert await again.start() != address
        again.expect("h", Memory(1).block)
        with pytest.raises(TransferFailed):
            await channel.send(Memory(1, seed=1).all())
        with pytest.raises(TransferFailed):
            await source.open(address, "h")

    run_virtual(main, seed=1)


def test_an_unknown_transfer_lists_the_known_ones():
    with pytest.raises(UnknownThing, match="memory, nccl, rpc"):
        make_transfer("pigeon")
