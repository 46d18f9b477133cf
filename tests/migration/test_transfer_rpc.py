"""What only the transfer over TCP can get wrong: secrets, broken frames, hung and killed peers, sockets left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midstream.control.errors import BadInput, TransferFailed
from midstream.migration.transfers import endpoint, rpc_format
from midstream.migration.transfers.base import Where
from midstream.migration.transfers.rpc import RpcTransfer
from midstream.migration.transfers.rpc_socket import Stream, connect, parse_address
from tests.contracts.test_transfer import Memory

SECRET = b"a secret"
HERE = Where(bind_host="127.0.0.1", secret=SECRET)


@pytest.fixture
async def pair():
    source, target = RpcTransfer(HERE), RpcTransfer(HERE)
    await source.start()
    yield source, target, await target.start()
    await source.stop()
    await target.stop()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - a test may poll
            await asyncio.sleep(0.01)


async def introduced(address: str, handle: str) -> Stream:
    """A member of the cluster with a mind of its own: past the handshake, then free to send anything."""
    stream = await connect(address, 2.0)
    _, _, nonce = rpc_format.GREETING.unpack(await stream.read(rpc_format.GREETING.size))
    key = rpc_format.wire_handle(handle)
    mine = rpc_format.proof(SECRET, b"client", nonce + bytes(16), key)
    claim = rpc_format.CLAIM.pack(rpc_format.MAGIC, rpc_format.VERSION, bytes(16), key, mine)
    await stream.write([memoryview(claim)])
    code, _ = rpc_format.VERDICT.unpack(await stream.read(rpc_format.VERDICT.size))
    assert code == rpc_format.STORED
    return stream


async def test_another_secret_opens_nothing(pair):
    _, target, address = pair
    got = Memory(2)
    target.expect("h", got.block)
    stranger = RpcTransfer(Where(bind_host="127.0.0.1", secret=b"another"))
    with pytest.raises(TransferFailed, match="secret"):
        await stranger.open(address, "h")
    assert target.counters["refused"] == 1


async def test_a_target_that_cannot_prove_itself_gets_no_byte(pair):
    source, _, _ = pair
    seen = bytearray()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(rpc_format.GREETING.pack(rpc_format.MAGIC, rpc_format.VERSION, bytes(16)))
        await reader.readexactly(rpc_format.CLAIM.size)
        writer.write(rpc_format.VERDICT.pack(rpc_format.STORED, bytes(32)))
        seen.extend(await reader.read())
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(TransferFailed, match="secret"):
        await source.open(address, "h")
    server.close()
    await server.wait_closed()
    assert not seen


async def test_a_claim_heard_once_opens_nothing_later(pair):
    _, target, address = pair
    target.expect("h", Memory(1).block)
    first = await connect(address, 2.0)
    await first.read(rpc_format.GREETING.size)
    key = rpc_format.wire_handle("h")
    old = rpc_format.proof(SECRET, b"client", bytes(32), key)
    await first.write([memoryview(rpc_format.CLAIM.pack(rpc_format.MAGIC, rpc_format.VERSION, bytes(16), key, old))])
    code, _ = rpc_format.VERDICT.unpack(await first.read(rpc_format.VERDICT.size))
    first.close()
    assert code == rpc_format.BAD_PROOF


async def test_P05_a_frame_with_another_handle_is_refused(pair):
    _, target, address = pair
    mine, others = Memory(1, 8), Memory(1, 8)
    target.expect("mine", mine.block)
    target.expect("others", others.block)
    stream = await introduced(address, "mine")
    header = rpc_format.pack_header(rpc_format.OP_BLOCKS, rpc_format.wire_handle("others"), 1, 8)
    await stream.write([memoryview(header + bytes(4) + b"\xff" * 8)])
    code, _ = rpc_format.REPLY.unpack(await stream.read(rpc_format.REPLY.size))
    stream.close()
    assert code == rpc_format.UNKNOWN_HANDLE
    assert not any(others.data) and not any(mine.data)


@pytest.mark.parametrize("where", ["payload", "index"])
async def test_a_checksum_that_does_not_match_is_never_acknowledged(pair, where):
    _, target, address = pair
    got = Memory(4, 1000)
    target.expect("h", got.block)
    stream = await introduced(address, "h")
    handle = rpc_format.wire_handle("h")
    header = rpc_format.pack_header(rpc_format.OP_BLOCKS, handle, 1, 1000, flags=rpc_format.FLAG_CHECKSUM)
    table, payload = bytearray(4), bytearray(random.Random(1).randbytes(1000))
    trailer = await rpc_format.checksum(bytes(table), [memoryview(bytes(payload))])
    if where == "payload":
        payload[500] ^= 1
    else:
        table[0] = 1
    await stream.write([memoryview(header + table + payload + trailer)])
    await stream.write([memoryview(rpc_format.pack_header(rpc_format.OP_END, handle, 1, 0))])
    code, stored = rpc_format.REPLY.unpack(await stream.read(rpc_format.REPLY.size))
    stream.close()
    assert (code, stored) == (rpc_format.BAD_CHECKSUM, 0)


async def test_an_end_that_counts_wrong_is_refused(pair):
    _, target, address = pair
    target.expect("h", Memory(1, 8).block)
    stream = await introduced(address, "h")
    await stream.write([memoryview(rpc_format.pack_header(rpc_format.OP_END, rpc_format.wire_handle("h"), 3, 0))])
    code, _ = rpc_format.REPLY.unpack(await stream.read(rpc_format.REPLY.size))
    stream.close()
    assert code == rpc_format.BAD_FRAME


async def test_ten_thousand_broken_frames_never_hurt_the_listener(pair):
    source, target, address = pair
    rng = random.Random(3)
    got = Memory(8, 64)
    target.expect("h", got.block)
    handle = rpc_format.wire_handle("h")
    good = rpc_format.pack_header(rpc_format.OP_BLOCKS, handle, 1, 64) + bytes(4) + bytes(64)
    _, port = parse_address(address)
    for number in range(10_000):
        if number % 10 == 0:
            await _one_past_the_handshake(address, rng, good)
        else:
            _one_stranger(port, rng)
        if number % 50 == 0:
            await asyncio.sleep(0.01)
    await until(lambda: len(target._tasks) == 1)
    sent = Memory(8, 64, seed=1)
    await (await source.open(address, "h")).send(sent.all())
    assert got.data == sent.data


async def _one_past_the_handshake(address: str, rng: random.Random, good: bytes) -> None:
    stream = await introduced(address, "h")
    mutant = bytearray(good)
    for _ in range(rng.randint(1, 6)):
        mutant[rng.randrange(rpc_format.HEADER.size + 4)] = rng.randrange(256)
    await stream.write([memoryview(mutant[: rng.randint(1, len(mutant))])])
    stream.abort() if rng.random() < 0.5 else stream.close()


def _one_stranger(port: int, rng: random.Random) -> None:
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.send(rng.randbytes(rng.choice([1, 20, rpc_format.CLAIM.size, 300])))


async def test_P28_too_many_connections_are_closed_and_the_rest_works(pair, monkeypatch):
    source, target, address = pair
    monkeypatch.setattr(endpoint, "CONNECTIONS_MAX", 3)
    target.expect("h", Memory(1).block)
    channels = [await source.open(address, "h") for _ in range(3)]
    with pytest.raises(TransferFailed):
        await source.open(address, "h")
    await channels[0].close()
    await until(lambda: len(target._tasks) == 3)
    await source.open(address, "h")
    assert target.counters["refused_too_many"] == 1


async def test_P13_a_connection_that_never_introduces_itself_is_closed(pair):
    _, target, address = pair
    reader, writer = await asyncio.open_connection(*parse_address(address))
    async with asyncio.timeout(endpoint.CONNECT_S + 2):
        assert len(await reader.read()) == rpc_format.GREETING.size
    writer.close()
    await writer.wait_closed()
    assert target.counters["broken"] == 1


async def test_P08_half_a_block_is_dropped_with_its_connection(pair):
    source, target, address = pair
    got, sent = Memory(2, 1_000_000), Memory(2, 1_000_000, seed=4)
    target.expect("h", got.block)
    stream = await introduced(address, "h")
    header = rpc_format.pack_header(rpc_format.OP_BLOCKS, rpc_format.wire_handle("h"), 1, 1_000_000)
    await stream.write([memoryview(header + bytes(4) + b"\xff" * 500_000)])
    stream.close()
    await until(lambda: len(target._tasks) == 1)
    await (await source.open(address, "h")).send(sent.all())
    assert got.data == sent.data


PEER = textwrap.dedent(
    """
    import asyncio, sys
    from midstream.migration.transfers.base import Where
    from midstream.migration.transfers.rpc import RpcTransfer

    async def main():
        memory = bytearray(200_000_000)
        transfer = RpcTransfer(Where(bind_host="127.0.0.1", secret=b"a secret"))
        transfer.expect("h", lambda i: memoryview(memory)[i * 1_000_000:(i + 1) * 1_000_000])
        print(await transfer.start(), flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
    """
)


@pytest.fixture
def peer_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([sys.executable, "-c", PEER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, process.stdout.readline().strip()
    process.kill()
    process.stdout.close()
    process.wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_P13_a_killed_or_hung_target_fails_the_copy_within_about_a_second(pair, peer_process, how):
    source, _, _ = pair
    process, address = peer_process
    channel = await source.open(address, "h")
    sent = Memory(200, 1_000_000)
    os.kill(process.pid, how)
    started = asyncio.get_running_loop().time()
    with pytest.raises(TransferFailed):
        await channel.send(sent.all())
    assert asyncio.get_running_loop().time() - started < HERE.stall_s + 1.5


async def test_stop_while_a_send_waits_ends_it_at_once(pair, peer_process):
    source, _, _ = pair
    process, address = peer_process
    channel = await source.open(address, "h")
    os.kill(process.pid, signal.SIGSTOP)
    send = asyncio.create_task(channel.send(Memory(200, 1_000_000).all()))
    await asyncio.sleep(0.3)
    await source.stop()
    started = asyncio.get_running_loop().time()
    with pytest.raises(TransferFailed):
        await send
    assert asyncio.get_running_loop().time() - started < 0.5


async def test_P07_stop_leaves_no_socket_behind():
    before = 0
    for round_number in range(3):
        source, target = RpcTransfer(HERE), RpcTransfer(HERE)
        address = await target.start()
        await source.start()
        sent, got = Memory(20, seed=1), Memory(20)
        target.expect("h", got.block)
        for _ in range(3):
            await (await source.open(address, "h")).send(sent.all())
        doomed = asyncio.create_task((await source.open(address, "h")).send(sent.all()))
        await source.stop()
        await target.stop()
        await asyncio.gather(doomed, return_exceptions=True)
        if round_number == 0:
            before = descriptors()
    assert descriptors() == before


async def test_a_taken_port_is_one_clear_error(pair):
    _, _, address = pair
    _, port = parse_address(address)
    with pytest.raises(BadInput, match=f"127.0.0.1:{port}"):
        await RpcTransfer(Where(bind_host="127.0.0.1", port=port, secret=SECRET)).start()


def test_P30_all_interfaces_need_an_advertised_host_and_a_secret_is_a_must():
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(BadInput, match="advertised"):
            RpcTransfer(Where(bind_host=host, secret=SECRET))
    with pytest.raises(BadInput, match="secret"):
        RpcTransfer(Where(bind_host="127.0.0.1", secret=b""))


async def test_P30_a_host_name_is_resolved_and_the_bound_port_is_published():
    transfer = RpcTransfer(Where(bind_host="127.0.0.1", secret=SECRET, advertise_host="localhost"))
    address = await transfer.start()
    got, sent = Memory(1), Memory(1, seed=1)
    transfer.expect("h", got.block)
    assert address.startswith("tcp://localhost:")
    await (await transfer.open(address, "h")).send(sent.all())
    await transfer.stop()
    assert got.data == sent.data


def test_addresses_that_are_none():
    for text in (
        "",
        "tcp://",
        "tcp://h",
        "tcp://h:x",
        "tcp://h:0",
        "tcp://h:70000",
        "http://h:1",
        "tcp://:1",
        "tcp://h:²",
    ):
        with pytest.raises(ValueError, match="address"):
            parse_address(text)
    assert parse_address("tcp://[::1]:4000") == ("::1", 4000)


@pytest.mark.parametrize("is_checked", [False, True])
async def test_P15_other_tasks_get_their_turn_at_every_megabyte(pair, is_checked):
    source, target, address = pair
    sent, got = Memory(2, 32_000_000), Memory(2, 32_000_000)
    target.expect("h", got.block)
    channel = await source.open(address, "h")
    turns = 0

    async def bystander() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    watching = asyncio.create_task(bystander())
    await channel.send(sent.all(), checksum=is_checked)
    watching.cancel()
    assert turns >= 50, "64 MB are sent and received, at most 1 MiB of each in a turn"
