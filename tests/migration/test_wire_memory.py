"""The network of the simulation does what its fault plan says, and nothing else."""

from __future__ import annotations

import asyncio
import random

from midstream.control.simulate.faults import Cut, Fault, FaultPlan, Lossy, Slow
from midstream.control.simulate.loop import run_virtual
from midstream.migration.wires.memory import MemoryNetwork, MemoryWire
from tests.contracts.test_wire import A, B, Inbox, tokens


def play(*faults: Fault, count: int = 400, seed: int = 1, encode: bool = False) -> tuple[list[int], MemoryNetwork]:
    """Send tokens 0.. from A to B, one a millisecond, under faults; return the order of arrival."""

    async def main() -> tuple[list[int], MemoryNetwork]:
        network = MemoryNetwork(random.Random(seed), FaultPlan(faults), encode=encode)
        a, b, inbox = MemoryWire(network, A, 1), MemoryWire(network, B, 1), Inbox()
        await a.start(Inbox())
        await b.start(inbox)
        for first in range(count):
            a.send(b.node, tokens(first))
            await asyncio.sleep(0.001)
        await asyncio.sleep(10)
        return [message.first for message in inbox.messages], network

    return run_virtual(main, seed=seed)


def test_without_faults_all_arrive_once_in_order():
    assert play()[0] == list(range(400))
    assert play(encode=True)[0] == list(range(400))


def test_a_drop_window_loses_only_inside_itself():
    got, network = play(Lossy(at_ms=100, until_ms=200, source=A, target=B, drop=1.0))
    assert set(range(400)) - set(got) == set(range(100, 200))
    assert network.counters["dropped"] == 100


def test_a_lossy_link_has_one_direction():
    assert play(Lossy(at_ms=0, until_ms=400, source=B, target=A, drop=1.0))[0] == list(range(400))


def test_duplicates_arrive_twice_and_are_counted():
    got, network = play(Lossy(at_ms=0, until_ms=400, source=A, target=B, duplicate=0.5))
    assert len(got) == 400 + network.counters["duplicated"]
    assert network.counters["duplicated"] > 100
    assert set(got) == set(range(400))


def test_reordered_messages_overtake_and_none_is_lost():
    got, network = play(Lossy(at_ms=0, until_ms=400, source=A, target=B, reorder=0.5))
    assert got != sorted(got)
    assert sorted(got) == list(range(400))
    assert network.counters["reordered"] > 100


def test_delay_keeps_order_and_loses_nothing():
    assert play(Lossy(at_ms=50, until_ms=100, source=A, target=B, delay_ms=500))[0] == list(range(400))


def test_a_cut_loses_what_is_sent_and_what_is_on_its_way():
    late = Lossy(at_ms=0, until_ms=100, source=A, target=B, delay_ms=150)
    got, network = play(late, Cut(at_ms=100, until_ms=200, a=B, b=A))
    assert network.counters["cut"] == 400 - len(got) > 100
    assert set(range(201, 400)) <= set(got)


def test_a_slow_node_delays_but_loses_nothing():
    assert play(Slow(at_ms=0, until_ms=400, node=B, factor=50.0))[0] == list(range(400))


def test_P17_equal_seeds_give_equal_deliveries():
    fault = Lossy(at_ms=0, until_ms=400, source=A, target=B, drop=0.2, duplicate=0.2, reorder=0.3)
    assert play(fault, seed=4)[0] == play(fault, seed=4)[0]
    assert play(fault, seed=4)[0] != play(fault, seed=5)[0]


def test_a_crashed_node_says_and_hears_nothing_and_its_next_life_gets_no_old_mail():
    async def main() -> None:
        network = MemoryNetwork(random.Random(1), delay_ms_min=10, delay_ms_max=10)
        a, b, inbox_a, inbox_b = MemoryWire(network, A, 1), MemoryWire(network, B, 1), Inbox(), Inbox()
        await a.start(inbox_a)
        await b.start(inbox_b)
        a.send(b.node, tokens(1))
        network.crash(B)
        assert not network.is_alive(b.node)
        b.send(a.node, tokens(2))
        again, inbox_again = MemoryWire(network, B, 2), Inbox()
        await again.start(inbox_again)
        a.send(b.node, tokens(3))
        a.send(again.node, tokens(4))
        await asyncio.sleep(1)
        assert inbox_b.got == inbox_a.got == []
        assert inbox_again.messages == [tokens(4)]
        assert network.counters["stale"] == 2

    run_virtual(main, seed=1)


def test_what_a_node_sent_just_before_its_crash_may_or_may_not_arrive():
    async def main() -> int:
        network = MemoryNetwork(random.Random(1))
        a, b, inbox = MemoryWire(network, A, 1), MemoryWire(network, B, 1), Inbox()
        await a.start(inbox)
        await b.start(Inbox())
        for first in range(100):
            b.send(a.node, tokens(first))
        network.crash(B)
        await asyncio.sleep(1)
        return len(inbox.got)

    assert 10 < run_virtual(main, seed=1) < 90
