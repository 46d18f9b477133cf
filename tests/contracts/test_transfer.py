"""One contract for every transfer."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import random
from collections.abc import AsyncIterator, Callable

import pytest

from midstream.control.errors import CannotConnect, TransferFailed
from midstream.control.ids import Node
from midstream.migration.transfers.base import Transfer
from midstream.migration.transfers.registry import make_transfer
from midstream.migration.wires.memory import MemoryNetwork
from tests.contracts.transfer_kinds import HERE, Mapped

BLOCK_BYTES = 3000

MakeTransfer = Callable[[str], Transfer]


class Memory:
    """An engine's block memory, as one reservation sees it."""

    def __init__(self, blocks: int, block_bytes: int = BLOCK_BYTES, *, seed: int | None = None) -> None:
        content = (
            random.Random(seed).randbytes(blocks * block_bytes) if seed is not None else bytes(blocks * block_bytes)
        )
        self.data = bytearray(content)
        self.blocks, self.block_bytes = blocks, block_bytes

    def block(self, index: int) -> memoryview:
        if not 0 <= index < self.blocks:
            raise IndexError(index)
        return memoryview(self.data)[index * self.block_bytes : (index + 1) * self.block_bytes]

    def all(self) -> list[tuple[int, memoryview]]:
        return [(index, self.block(index)) for index in range(self.blocks)]


def memories() -> MakeTransfer:
    network = MemoryNetwork(random.Random(1))
    return lambda name: make_transfer(
        "memory", network, Node(name=name, incarnation=1, address=name), bytes_per_ms=20_000.0
    )


KINDS: dict[str, Callable[[], MakeTransfer]] = {
    "memory": memories,
    "rpc": lambda: lambda _: make_transfer("rpc", HERE),
    "shm": lambda: lambda _: make_transfer("shm", HERE),
    "shm-mapped": lambda: lambda _: Mapped(),
}
"""A new transfer is held to the contract by one line here."""
if importlib.util.find_spec("torch") is not None:
    from tests.migration.nccl_on_cpu import OnCpu

    KINDS["gloo"] = lambda: lambda _: make_transfer("gloo", HERE)
    KINDS["gloo-direct"] = lambda: lambda _: make_transfer("gloo", HERE, direct_bytes=1)
    KINDS["nccl-on-cpu"] = lambda: lambda _: OnCpu(HERE)


@pytest.fixture(params=KINDS)
async def make(request) -> AsyncIterator[MakeTransfer]:
    make_kind = KINDS[request.param]()
    made: list[Transfer] = []

    def make_one(name: str) -> Transfer:
        transfer = make_kind(name)
        made.append(transfer)
        return transfer

    yield make_one
    for transfer in made:
        await transfer.stop()


@pytest.fixture
async def pair(make):
    """Source and target, and the target's address."""
    source, target = make("source"), make("target")
    await source.start()
    return source, target, await target.start()


@pytest.mark.parametrize("is_checked", [False, True])
async def test_all_bytes_arrive_equal_and_are_counted(pair, is_checked):
    source, target, address = pair
    sent, got = Memory(40, seed=1), Memory(40)
    target.expect("h", got.block)
    channel = await source.open(address, "h")
    report = await channel.send(sent.all(), checksum=is_checked)
    assert got.data == sent.data
    assert (report.blocks, report.copied_bytes) == (40, 40 * BLOCK_BYTES)
    assert report.duration_ms > 0


@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize(("blocks", "block_bytes"), [(1, 1), (1000, 16), (300, 4096), (5, 3_000_001)])
async def test_any_number_and_size_of_blocks(pair, blocks, block_bytes, is_checked):
    source, target, address = pair
    sent, got = Memory(blocks, block_bytes, seed=2), Memory(blocks, block_bytes)
    target.expect("h", got.block)
    channel = await source.open(address, "h")
    await channel.send(sent.all(), checksum=is_checked)
    assert got.data == sent.data


async def test_blocks_in_any_order_and_in_several_rounds(pair):
    source, target, address = pair
    sent, got = Memory(50, seed=3), Memory(50)
    target.expect("h", got.block)
    channel = await source.open(address, "h")
    shuffled = sent.all()
    random.Random(1).shuffle(shuffled)
    for start in range(0, 50, 7):
        await channel.send(shuffled[start : start + 7])
    assert got.data == sent.data


async def test_sending_nothing_is_sending_nothing(pair):
    source, target, address = pair
    target.expect("h", Memory(1).block)
    channel = await source.open(address, "h")
    assert (await channel.send([])).copied_bytes == 0


async def test_sending_the_same_blocks_again_is_harmless(pair):
    source, target, address = pair
    sent, got = Memory(10, seed=4), Memory(10)
    target.expect("h", got.block)
    for _ in range(2):
        channel = await source.open(address, "h")
        await channel.send(sent.all())
        await channel.send(sent.all()[3:7] * 2)
        await channel.close()
        await channel.close()
    assert got.data == sent.data


async def test_P05_an_unknown_handle_opens_nothing(pair):
    source, target, address = pair
    got = Memory(2)
    target.expect("h", got.block)
    with pytest.raises(TransferFailed, match="handle"):
        await source.open(address, "another")
    assert not any(got.data)


async def test_P05_a_block_outside_the_reservation_is_refused(pair):
    source, target, address = pair
    got, sent = Memory(4), Memory(6, seed=5)
    target.expect("h", got.block)
    channel = await source.open(address, "h")
    with pytest.raises(TransferFailed):
        await channel.send(sent.all())
    with pytest.raises(TransferFailed, match="closed"):
        await channel.send(sent.all()[:1])


async def test_P05_a_block_of_another_length_is_refused(pair):
    source, target, address = pair
    got, sent = Memory(4, 100), Memory(4, 101, seed=5)
    target.expect("h", got.block)
    channel = await source.open(address, "h")
    with pytest.raises(TransferFailed):
        await channel.send(sent.all())
    assert not any(got.data) or got.data != sent.data


async def test_P05_a_forgotten_handle_is_refused_everywhere(pair):
    source, target, address = pair
    sent, got = Memory(4, seed=6), Memory(4)
    target.expect("h", got.block)
    channel = await source.open(address, "h")
    await channel.send(sent.all()[:1])
    await target.forget("h")
    await target.forget("h")
    with pytest.raises(TransferFailed):
        await channel.send(sent.all()[1:])
    with pytest.raises(TransferFailed):
        await source.open(address, "h")
    assert not any(got.data[BLOCK_BYTES:])


@pytest.mark.parametrize("pause_s", [0.0, 0.0005, 0.002, 0.005, 0.02])
async def test_P05_forget_in_mid_copy_is_quiescent(pair, pause_s):
    source, target, address = pair
    sent, got = Memory(2000, 8000, seed=7), Memory(2000, 8000)
    target.expect("h", got.block)
    channel = await source.open(address, "h")
    send = asyncio.create_task(channel.send(sent.all()))
    await asyncio.sleep(pause_s)
    await target.forget("h")
    got.data.append(0)  # raises BufferError while somebody still holds a view
    frozen = bytes(got.data)
    if not send.done():
        with pytest.raises(TransferFailed):
            await send
    await asyncio.sleep(0.05)
    assert got.data == frozen
    await asyncio.gather(send, return_exceptions=True)


@pytest.mark.parametrize("pause_s", [0.0, 0.0003, 0.001, 0.003, 0.01])
async def test_P08_cancel_at_any_byte_closes_the_channel_and_spares_the_rest(pair, pause_s):
    source, target, address = pair
    sent, got = Memory(2000, 8000, seed=8), Memory(2000, 8000)
    target.expect("h", got.block)
    channel = await source.open(address, "h")
    send = asyncio.create_task(channel.send(sent.all()))
    await asyncio.sleep(pause_s)
    send.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await send
    if send.cancelled():
        with pytest.raises(TransferFailed, match="closed"):
            await channel.send(sent.all()[:1])
    again = await source.open(address, "h")
    await again.send(sent.all())
    assert got.data == sent.data


async def test_P13_a_target_that_stops_in_mid_copy_is_noticed_within_a_second(pair):
    source, target, address = pair
    sent, got = Memory(4000, 8000, seed=9), Memory(4000, 8000)
    target.expect("h", got.block)
    channel = await source.open(address, "h")
    send = asyncio.create_task(channel.send(sent.all()))
    await asyncio.sleep(0.001)
    await target.stop()
    async with asyncio.timeout(1.5):
        with pytest.raises(TransferFailed):
            await send
    async with asyncio.timeout(1.5):
        with pytest.raises(TransferFailed):
            await source.open(address, "h")


async def test_P13_nobody_there_is_an_error_within_the_deadline(pair):
    source, _, address = pair
    wrong = ("tcp://127.0.0.1:1", "garbage", "", "tcp://127.0.0.1:99999", f"{address}9")
    async with asyncio.timeout(3):
        answers = await asyncio.gather(*(source.open(nowhere, "h") for nowhere in wrong), return_exceptions=True)
    assert [type(answer) for answer in answers] == [CannotConnect] * len(wrong)


async def test_P05_two_copies_at_once_never_mix(pair):
    source, target, address = pair
    sent = [Memory(300, seed=10 + n) for n in range(6)]
    got = [Memory(300) for _ in range(6)]
    for number, memory in enumerate(got):
        target.expect(f"h{number}", memory.block)

    async def copy(number: int) -> None:
        channel = await source.open(address, f"h{number}")
        for start in range(0, 300, 50):
            await channel.send(sent[number].all()[start : start + 50])

    await asyncio.gather(*(copy(number) for number in range(6)))
    assert [memory.data for memory in got] == [memory.data for memory in sent]


async def test_two_sends_on_one_channel_take_turns(pair):
    source, target, address = pair
    sent, got = Memory(400, seed=20), Memory(400)
    target.expect("h", got.block)
    channel = await source.open(address, "h")
    reports = await asyncio.gather(channel.send(sent.all()[:200]), channel.send(sent.all()[200:]))
    assert [report.blocks for report in reports] == [200, 200]
    assert got.data == sent.data


async def test_both_directions_at_once(make):
    one, other = make("one"), make("other")
    address = {"one": await one.start(), "other": await other.start()}
    sent, got = [Memory(200, seed=21), Memory(200, seed=22)], [Memory(200), Memory(200)]
    one.expect("to-one", got[0].block)
    other.expect("to-other", got[1].block)
    to_one = await other.open(address["one"], "to-one")
    to_other = await one.open(address["other"], "to-other")
    await asyncio.gather(to_one.send(sent[0].all()), to_other.send(sent[1].all()))
    assert [memory.data for memory in got] == [memory.data for memory in sent]


async def test_a_new_reservation_under_an_old_handle_starts_afresh(pair):
    source, target, address = pair
    sent, first, second = Memory(4, seed=23), Memory(4), Memory(4)
    target.expect("h", first.block)
    stale = await source.open(address, "h")
    await target.forget("h")
    target.expect("h", second.block)
    with pytest.raises(TransferFailed):
        await stale.send(sent.all())
    await (await source.open(address, "h")).send(sent.all())
    assert second.data == sent.data
    assert not any(first.data)


async def test_stop_may_come_twice_and_before_start(make):
    transfer = make("never-started")
    await transfer.stop()
    await transfer.start()
    await transfer.stop()
    await transfer.stop()
