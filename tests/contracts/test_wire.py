"""One contract for every wire: the one in memory and the one over TCP."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest

from midstream.control.ids import Node, Owner
from midstream.migration.protocol.messages import (
    Acknowledge,
    AnyMessage,
    Final,
    Ping,
    RequestSpec,
    RunState,
    Sampling,
    Tokens,
)
from midstream.migration.wires.base import Wire
from midstream.migration.wires.memory import MemoryNetwork, MemoryWire
from midstream.migration.wires.zmq import ZmqWire

SECRET = b"a secret of the cluster"
A, B = "gateway/g", "llumlet/i"

MakeWire = Callable[[str, int], Wire]


class Inbox:
    """Keeps what a wire delivers, and lets a test wait for it."""

    def __init__(self) -> None:
        self.got: list[tuple[Node, AnyMessage]] = []

    def __call__(self, sender: Node, message: AnyMessage) -> None:
        self.got.append((sender, message))

    @property
    def messages(self) -> list[AnyMessage]:
        return [message for _, message in self.got]

    async def wait(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.got) < count:  # noqa: ASYNC110 - a test may poll
                await asyncio.sleep(0.005)


async def settle() -> None:
    await asyncio.sleep(0.3)


def tokens(first: int) -> Tokens:
    return Tokens(
        request="r", owner=Owner("i", 1), epoch=3, first=first, ids=(first, first + 1), logprobs=(b"\x00\xff",)
    )


@pytest.fixture(params=["memory", "memory-encoded", "zmq"])
async def make(request) -> AsyncIterator[MakeWire]:
    network = MemoryNetwork(random.Random(1), encode=request.param == "memory-encoded")
    wires: list[Wire] = []

    def make_wire(name: str, incarnation: int) -> Wire:
        wire: Wire = (
            ZmqWire(name, incarnation, "127.0.0.1", secret=SECRET)
            if request.param == "zmq"
            else MemoryWire(network, name, incarnation)
        )
        wires.append(wire)
        return wire

    yield make_wire
    for wire in wires:
        await wire.stop()


async def started(make: MakeWire, name: str, incarnation: int = 1) -> tuple[Wire, Inbox]:
    wire, inbox = make(name, incarnation), Inbox()
    await wire.start(inbox)
    return wire, inbox


async def test_P30_the_node_says_who_and_where(make):
    wire, _ = await started(make, A, 7)
    assert (wire.node.name, wire.node.incarnation) == (A, 7)
    assert wire.node.address
    assert not wire.node.address.endswith(":0")


async def test_messages_arrive_equal_with_their_sender(make):
    (a, _), (b, inbox) = await started(make, A), await started(make, B)
    spec = RequestSpec(request="r", prompt=(1, 2, 3), sampling=Sampling(seed=5, temperature=0.5), payload=b"\x00\x01")
    state = RunState(spec=spec, outputs=(9, 8), computed=4, blocks=1, rng=b"\xff", logprobs=(b"x", b""))
    final = Final(
        request="r", migration="m", epoch=1, target=Owner("j", 2), state=state, acknowledged=1, frozen_at_us=12
    )
    a.send(b.node, final)
    a.send(b.node, tokens(0))
    await inbox.wait(2)
    assert inbox.got == [(a.node, final), (a.node, tokens(0))]


async def test_both_directions_keep_the_order_of_each_pair(make):
    (a, inbox_a), (b, inbox_b) = await started(make, A), await started(make, B)
    for first in range(500):
        a.send(b.node, tokens(first))
        b.send(a.node, tokens(-first))
        if first % 50 == 0:
            await asyncio.sleep(0.001)
    await inbox_a.wait(500)
    await inbox_b.wait(500)
    assert inbox_b.messages == [tokens(first) for first in range(500)]
    assert inbox_a.messages == [tokens(-first) for first in range(500)]


async def test_a_wire_can_speak_to_itself(make):
    a, inbox = await started(make, A)
    a.send(a.node, Ping(request=""))
    await inbox.wait(1)
    assert inbox.got == [(a.node, Ping(request=""))]


async def test_P13_a_dead_or_impossible_peer_never_blocks_or_raises(make):
    (a, _), (b, _), (c, inbox) = await started(make, A), await started(make, B), await started(make, "llumlet/j")
    await b.stop()
    for address in (b.node.address, "tcp://127.0.0.1:1", "tcp://nowhere.invalid:1", "garbage", ""):
        for first in range(100):
            a.send(Node(name=f"llumlet/{address}", incarnation=1, address=address), tokens(first))
    a.send(c.node, tokens(1))
    await inbox.wait(1)


async def test_P21_a_message_to_an_older_incarnation_is_not_delivered(make):
    (a, _), (b, inbox) = await started(make, A), await started(make, B, 2)
    a.send(Node(name=B, incarnation=1, address=b.node.address), tokens(1))
    await settle()
    a.send(b.node, tokens(2))
    await inbox.wait(1)
    await settle()
    assert inbox.messages == [tokens(2)]


async def test_a_restarted_peer_is_reached_at_its_new_address(make):
    (a, _), (b, inbox) = await started(make, A), await started(make, B, 1)
    a.send(b.node, tokens(1))
    await inbox.wait(1)
    await b.stop()
    a.send(b.node, tokens(2))
    again, inbox_again = await started(make, B, 2)
    a.send(again.node, tokens(3))
    await inbox_again.wait(1)
    a.send(b.node, tokens(4))
    a.send(again.node, tokens(5))
    await inbox_again.wait(2)
    assert inbox_again.messages == [tokens(3), tokens(5)]
    assert inbox.messages == [tokens(1)]


async def test_a_forgotten_peer_can_be_spoken_to_again(make):
    (a, _), (b, inbox) = await started(make, A), await started(make, B)
    a.send(b.node, tokens(1))
    await inbox.wait(1)
    a.forget(b.node)
    a.forget(b.node)
    a.send(b.node, tokens(2))
    await inbox.wait(2)


async def test_stop_flushes_and_may_come_twice(make):
    (a, _), (b, inbox) = await started(make, A), await started(make, B)
    a.send(b.node, Acknowledge(request="r", epoch=1, delivered=1))
    await inbox.wait(1)
    a.send(b.node, Acknowledge(request="r", epoch=1, delivered=2))
    await a.stop()
    await a.stop()
    await inbox.wait(2)
    a.send(b.node, Acknowledge(request="r", epoch=1, delivered=3))
    await settle()
    assert len(inbox.got) == 2


async def test_P28_a_flood_in_one_turn_is_bounded_and_counted(make):
    (a, _), (b, inbox) = await started(make, A), await started(make, B)
    flood = 150_000
    for first in range(flood):
        a.send(b.node, tokens(first))
    await settle()
    await inbox.wait(1000)
    assert len(inbox.got) < flood
