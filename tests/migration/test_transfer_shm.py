"""What only the transfer through shared memory can get wrong: what is lent, mapped, hung, and left behind."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import signal
import socket

import numpy as np
import pytest

from midstream.control.errors import BadInput, TransferFailed
from midstream.migration.transfers import frame_format as wire
from midstream.migration.transfers.base import Where
from midstream.migration.transfers.endpoint import introduce
from midstream.migration.transfers.pieces import copy_pieces, runs
from midstream.migration.transfers.rpc_format import BAD_FRAME, wire_handle
from midstream.migration.transfers.rpc_socket import Stream
from midstream.migration.transfers.shm import ShmTransfer
from midstream.migration.transfers.shm_copier import Copier
from midstream.migration.transfers.shm_mappings import Mapping, Mappings
from midstream.migration.transfers.shm_memory import Region, Regions
from tests.contracts.test_transfer import Memory
from tests.migration.transfer_storm import HERE, peer


@pytest.fixture
async def pair():
    source, target = ShmTransfer(HERE), ShmTransfer(HERE)
    await source.start()
    yield source, target, await target.start()
    await source.stop()
    await target.stop()


async def introduced(address: str) -> Stream:
    """A member of the cluster with a mind of its own: past the handshake, then free to send anything."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect("\0" + address.removeprefix("shm:"))
    stream = Stream(sock, 2.0)
    await introduce(stream, wire_handle("h"), HERE.secret)
    return stream


def frame(*, region: int, pieces: int, length: int, offset: int) -> bytes:
    header = wire.Header(wire.OP_BLOCKS, 0, region, pieces, length, length, 0)
    return wire.pack_header(header) + bytes(4) * pieces + offset.to_bytes(8, "little") * pieces


async def lend(stream: Stream, number: int) -> None:
    await stream.write([memoryview(wire.pack_header(wire.Header(wire.OP_REGION, 0, 0, 0, 0, 0, 0)))])
    await stream.write_descriptor(number)


async def test_another_secret_opens_nothing(pair):
    _, target, address = pair
    target.expect("h", Memory(1).block)
    stranger = ShmTransfer(Where(bind_host="", secret=b"another"))
    with pytest.raises(TransferFailed, match="secret"):
        await stranger.open(address, "h")
    with pytest.raises(BadInput, match="secret"):
        ShmTransfer(Where(bind_host="", secret=b""))


async def test_blocks_in_a_region_take_no_slot_and_others_do():
    region, target = Region(4 * 3000), ShmTransfer(HERE)
    region.view[:] = random.Random(1).randbytes(12_000)
    source = ShmTransfer(HERE, [region])
    got, address = Memory(5), await target.start()
    target.expect("h", got.block)
    channel = await source.open(address, "h")
    await channel.send([(index, region.view[index * 3000 : (index + 1) * 3000]) for index in range(4)])
    assert source.staging._slots is None
    await channel.send([(4, memoryview(bytes([7]) * 3000))])
    assert source.staging._slots is not None
    assert got.data == bytes(region.view) + bytes([7]) * 3000
    await source.stop()
    await target.stop()


async def test_one_send_may_mix_regions_other_memory_and_lengths():
    regions, target = [Region(8 * 1000), Region(8 * 1000)], ShmTransfer(HERE)
    for seed, region in enumerate(regions):
        region.view[:] = random.Random(seed).randbytes(region.size)
    source = ShmTransfer(HERE, regions)
    lengths = [1000] * 12 + [500] * 4
    views = [regions[n // 3 % 2].view[n % 8 * 1000 :][:length] for n, length in enumerate(lengths)]
    views[5] = memoryview(bytes([7]) * 1000)
    got = [bytearray(length) for length in lengths]
    address = await target.start()
    target.expect("h", lambda index: memoryview(got[index]))
    channel = await source.open(address, "h")
    report = await channel.send(list(enumerate(views)), checksum=True)
    assert got == [bytearray(view) for view in views]
    assert report.copied_bytes == sum(lengths)
    await source.stop()
    await target.stop()


async def test_regions_are_lent_before_the_first_send():
    source, target = ShmTransfer(HERE, [Region(4096), Region(4096)]), ShmTransfer(HERE)
    address = await target.start()
    target.expect("h", Memory(1).block)
    await source.open(address, "h")
    async with asyncio.timeout(10):
        while len(target.mappings) < 2:
            await asyncio.sleep(0.01)
    await source.stop()
    await target.stop()


def test_P05_what_is_lent_cannot_be_written():
    region = Region(4096)
    number = region.lend()
    with pytest.raises(PermissionError):
        mmap.mmap(number, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError):
        os.ftruncate(number, 0)
    os.close(number)


async def test_memory_that_could_shrink_is_not_mapped(pair):
    _, target, address = pair
    target.expect("h", Memory(1, 8).block)
    stream = await introduced(address)
    number = os.memfd_create("trap")
    os.ftruncate(number, 4096)
    await lend(stream, number)
    os.close(number)
    with pytest.raises(OSError):
        await stream.read(1)
    stream.close()
    assert len(target.mappings) == 0


@pytest.mark.parametrize("sent", [
    frame(region=0, pieces=1, length=8, offset=4096 - 7),
    frame(region=0, pieces=1, length=8, offset=2**64 - 8),
    frame(region=1, pieces=1, length=8, offset=0),
])  # fmt: skip
async def test_P05_bytes_outside_of_what_was_lent_are_not_read(pair, sent):
    _, target, address = pair
    got, region = Memory(1, 8), Region(4096)
    target.expect("h", got.block)
    stream = await introduced(address)
    number = region.lend()
    await lend(stream, number)
    os.close(number)
    await stream.write([memoryview(sent)])
    code, stored = wire.REPLY.unpack(await stream.read(wire.REPLY.size))
    stream.close()
    assert (code, stored) == (BAD_FRAME, 0)
    assert not any(got.data)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_P13_a_killed_or_hung_target_fails_the_copy_in_time(pair, how):
    source, _, _ = pair
    async with peer("shm") as (process, address):
        channel = await source.open(address, "h")
        process.send_signal(how)
        started = asyncio.get_running_loop().time()
        with pytest.raises(TransferFailed):
            await channel.send([(index, memoryview(bytes(65_536))) for index in range(64)])
        assert asyncio.get_running_loop().time() - started < 2 * HERE.stall_s + 1.5


async def test_a_peers_region_is_mapped_once_and_not_for_ever(monkeypatch):
    mappings, region = Mappings(Copier(Regions([]), 1.0)), Region(4096)
    monkeypatch.setattr("midstream.migration.transfers.shm_mappings.IDLE_S", 0.05)
    first, second = region.lend(), region.lend()
    one, same = mappings.take(first), mappings.take(second)
    assert one is same
    mappings.give_back(one)
    await asyncio.sleep(0.2)
    assert len(mappings) == 1
    mappings.give_back(same)
    async with asyncio.timeout(10):
        while len(mappings):
            await asyncio.sleep(0.01)
    os.close(first)
    os.close(second)


def test_a_mapping_shows_what_is_written_later():
    region = Region(8192)
    number = region.lend()
    mapping = Mapping(number)
    os.close(number)
    region.view[5000] = 9
    target = np.zeros(1, np.uint8)
    places = np.array([target.ctypes.data]), np.array([mapping.address + 5000])
    assert copy_pieces(*places, 1, lambda: True)
    assert target[0] == 9
    mapping.close()


def test_pieces_at_even_distances_are_one_run():
    even, odd = np.arange(0, 80, 8), np.array([0, 8, 16, 32, 40, 48, 56, 90, 98, 106])
    assert list(runs(even, even, 100)) == [(0, 10)]
    assert list(runs(even, even, 4)) == [(0, 4), (4, 4), (8, 2)]
    found = list(runs(even, odd, 100))
    assert sum(count for _, count in found) == 10
    for first, count in found:
        assert len(set(np.diff(odd[first : first + count]))) <= 1


def test_every_piece_lands_whatever_the_runs():
    rng = np.random.default_rng(1)
    source, target = rng.integers(0, 255, 4096, np.uint8), np.zeros(4096, np.uint8)
    order, places = rng.permutation(64), rng.permutation(64)
    copy_pieces(target.ctypes.data + places * 64, source.ctypes.data + order * 64, 64, lambda: True)
    for at, of in zip(places, order, strict=True):
        assert (target[at * 64 : at * 64 + 64] == source[of * 64 : of * 64 + 64]).all()
