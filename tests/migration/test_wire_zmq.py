"""What only the wire over TCP can get wrong: keys, garbage, reconnects, sockets left behind."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from midstream.control.errors import BadInput
from midstream.control.ids import Node
from midstream.migration.wires.curve import cluster_keys
from midstream.migration.wires.frames import FRAME_BYTES_MAX, encode_frame
from midstream.migration.wires.zmq import MESSAGES_PER_TURN_MAX, PENDING_MESSAGES_MAX, ZmqWire
from tests.contracts.test_wire import A, B, Inbox, settle, tokens

SECRET = b"a secret of the cluster"


def wire(name: str, incarnation: int = 1, *, port: int = 0, secret: bytes = SECRET) -> ZmqWire:
    return ZmqWire(name, incarnation, "127.0.0.1", port, secret=secret)


@pytest.fixture
async def pair():
    a, b, inbox = wire(A), wire(B), Inbox()
    await a.start(Inbox())
    await b.start(inbox)
    yield a, b, inbox
    await a.stop()
    await b.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - a test may poll
            await asyncio.sleep(0.01)


def raw_dealer(context: zmq.Context, to: Node, secret: bytes | None) -> zmq.Socket:
    """A peer that does not use our code; with a secret it is a member of the cluster."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.SNDHWM, 0)
    if secret is not None:
        public, private = cluster_keys(secret)
        dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = public, private, public
    dealer.connect(to.address)
    return dealer


async def test_a_wrong_secret_gets_nothing_through(pair):
    _, b, inbox = pair
    stranger, heard = wire("llumlet/x", secret=b"another"), Inbox()
    await stranger.start(heard)
    stranger.send(b.node, tokens(1))
    b.send(stranger.node, tokens(2))
    await settle()
    await stranger.stop()
    assert inbox.got == heard.got == []


async def test_a_key_of_its_own_is_refused_at_the_door_even_if_it_knows_ours(pair):
    _, b, inbox = pair
    server_public, _ = cluster_keys(SECRET)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.curve_serverkey = server_public
        dealer.connect(b.node.address)
        dealer.send(encode_frame(b.node, Node(A, 1, "tcp://127.0.0.1:1"), [tokens(1)]))
        await until(lambda: b.counters["refused"])
        await settle()
    assert inbox.got == []


async def test_no_encryption_no_entry(pair):
    _, b, inbox = pair
    with zmq.Context() as context, raw_dealer(context, b.node, None) as dealer:
        dealer.send(encode_frame(b.node, Node(A, 1, "tcp://127.0.0.1:1"), [tokens(1)]))
        await settle()
    assert inbox.got == []


def broken_frames(rng: random.Random, valid: bytes, count: int) -> list[bytes]:
    frames = []
    for number in range(count):
        mutant = bytearray(valid)
        match number % 4:
            case 0:
                mutant = bytearray(rng.randbytes(rng.randint(0, 200)))
            case 1:
                mutant = mutant[: rng.randint(0, len(valid) - 1)]
            case 2:
                for _ in range(rng.randint(1, 8)):
                    mutant[rng.randrange(len(mutant))] = rng.randrange(256)
            case _:
                mutant = bytearray(bytes([rng.choice([0x91, 0x81, 0x93])]) * rng.randint(1, 5000))
        frames.append(bytes(mutant))
    return frames


async def test_ten_thousand_broken_frames_are_dropped_and_the_wire_lives_on(pair):
    a, b, inbox = pair
    valid = encode_frame(b.node, Node(A, 1, "tcp://127.0.0.1:1"), [tokens(1), tokens(2)])
    frames = broken_frames(random.Random(5), valid, 10_000)
    with zmq.Context() as context, raw_dealer(context, b.node, SECRET) as dealer:
        for frame in frames:
            dealer.send(frame)
        dealer.send_multipart([b"three", b"parts", b"here"])
        dealer.send(msgspec.msgpack.encode([1, {"name": "x"}, []]))
        heard = ["received", "garbage", "stale"]
        await until(lambda: sum(b.counters[key] for key in heard) >= 10_000)
    assert b.counters["garbage"] > 7_000
    before = len(inbox.got)
    a.send(b.node, tokens(99))
    await inbox.wait(before + 1)
    assert inbox.messages[-1] == tokens(99)


async def test_bytes_that_are_not_even_zeromq_do_no_harm(pair):
    a, b, inbox = pair
    rng = random.Random(2)
    for size in (1, 12, 64, 300, 100_000):
        with socket.create_connection(("127.0.0.1", int(b.node.address.rpartition(":")[2]))) as raw:
            raw.sendall(rng.randbytes(size))
    a.send(b.node, tokens(1))
    await inbox.wait(1)


async def test_a_frame_above_the_bound_is_neither_sent_nor_taken(pair):
    a, b, inbox = pair
    huge = msgspec.structs.replace(tokens(1), logprobs=(bytes(FRAME_BYTES_MAX),))
    a.send(b.node, huge)
    a.send(b.node, tokens(2))
    await inbox.wait(1)
    assert inbox.messages == [tokens(2)]
    assert a.counters["large"] == 1
    with zmq.Context() as context, raw_dealer(context, b.node, SECRET) as dealer:
        dealer.send(bytes(FRAME_BYTES_MAX + 1))
        await settle()
    a.send(b.node, tokens(3))
    await inbox.wait(2)


async def test_many_large_messages_of_one_turn_are_split_into_frames(pair):
    a, b, inbox = pair
    large = msgspec.structs.replace(tokens(1), logprobs=(bytes(FRAME_BYTES_MAX // 3),))
    for _ in range(5):
        a.send(b.node, large)
    await inbox.wait(5)
    assert a.counters["large"] == 0


async def test_B10_a_peer_that_was_away_is_reached_again_on_the_same_port(pair):
    a, b, inbox = pair
    a.send(b.node, tokens(1))
    await inbox.wait(1)
    await b.stop()
    for first in range(20):
        a.send(b.node, tokens(first))
        await asyncio.sleep(0.01)
    again, heard = wire(B, 2, port=int(b.node.address.rpartition(":")[2])), Inbox()
    await again.start(heard)
    a.send(again.node, tokens(77))
    await heard.wait(1)
    await again.stop()
    assert heard.messages == [tokens(77)], "what was meant for the dead incarnation must not arrive"


async def test_P14_a_handler_that_raises_does_not_deafen_the_wire(pair):
    a, _, _ = pair
    heard: list[int] = []

    def handler(sender: Node, message: object) -> None:
        heard.append(len(heard))
        if len(heard) == 1:
            raise ValueError("the handler's fault")

    c = wire("llumlet/c")
    await c.start(handler)
    a.send(c.node, tokens(1))
    a.send(c.node, tokens(2))
    await until(lambda: len(heard) == 2)
    assert c.counters["handler_failed"] == 1
    await c.stop()


async def test_P28_what_does_not_fit_a_dead_peers_queue_is_counted(pair):
    a, _, _ = pair
    dead = Node("llumlet/dead", 1, "tcp://127.0.0.1:1")
    for first in range(PENDING_MESSAGES_MAX + 5):
        a.send(dead, tokens(first))
    assert a.counters["full"] == 5
    for _ in range(1200):
        a.send(dead, tokens(0))
        await asyncio.sleep(0)
    assert a.counters["full"] > 5


async def test_a_taken_port_is_one_clear_error(pair):
    _, b, _ = pair
    port = int(b.node.address.rpartition(":")[2])
    second = wire("llumlet/second", port=port)
    with pytest.raises(BadInput, match=f"127.0.0.1:{port}"):
        await second.start(Inbox())
    await second.stop()


def test_P30_a_wire_on_all_interfaces_must_say_how_it_is_reached():
    for host in ("0.0.0.0", "::", "*"):
        with pytest.raises(BadInput, match="advertised"):
            ZmqWire(A, 1, host, secret=SECRET)
    with pytest.raises(BadInput, match="secret"):
        ZmqWire(A, 1, "127.0.0.1", secret=b"")


async def test_P30_the_advertised_host_is_in_the_address_with_the_bound_port():
    reachable = ZmqWire(A, 1, "127.0.0.1", secret=SECRET, advertise_host="localhost")
    inbox = Inbox()
    await reachable.start(inbox)
    assert reachable.node.address.startswith("tcp://localhost:")
    reachable.send(reachable.node, tokens(1))
    await inbox.wait(1)
    await reachable.stop()


async def test_P07_no_descriptor_is_left_behind():
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = 0
    for round_number in range(4):
        wires = [wire(f"llumlet/{n}") for n in range(3)]
        inboxes = [Inbox() for _ in wires]
        for one, inbox in zip(wires, inboxes, strict=True):
            await one.start(inbox)
        for one in wires:
            for other in wires:
                one.send(other.node, tokens(1))
        for inbox in inboxes:
            await inbox.wait(3)
        for one in wires:
            await one.stop()
        if round_number == 0:
            before = descriptors()
    assert descriptors() <= before


async def test_P15_a_flood_of_messages_gives_way_to_other_tasks(pair):
    a, b, inbox = pair
    for first in range(PENDING_MESSAGES_MAX):
        a.send(b.node, tokens(first))
    turns, most = 0, 0
    while len(inbox.got) < PENDING_MESSAGES_MAX:
        before = len(inbox.got)
        await asyncio.sleep(0)
        most, turns = max(most, len(inbox.got) - before), turns + 1
    assert most <= 3 * MESSAGES_PER_TURN_MAX
