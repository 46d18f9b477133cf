"""What only `nccl` can get wrong: fusing, order, giving up, being absent. Its device here is made of host memory."""

from __future__ import annotations

import asyncio
import ctypes
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - only where torch is

from midstream.control.errors import TransferFailed  # noqa: E402
from midstream.migration.transfers.base import Where  # noqa: E402
from midstream.migration.transfers.device_range import DeviceRange  # noqa: E402
from midstream.migration.transfers.fused import gather, scatter  # noqa: E402
from midstream.migration.transfers.nccl import NcclGroup, NcclTransfer  # noqa: E402
from midstream.migration.transfers.nccl_cuda import IN_PROGRESS, SUCCESS, NcclCommunicator  # noqa: E402
from midstream.migration.transfers.paired import SOURCE, TARGET  # noqa: E402
from midstream.migration.transfers.slots import Slot  # noqa: E402
from tests.migration.nccl_on_cpu import CpuCommunicator, CpuDevice  # noqa: E402

HERE = Where(bind_host="127.0.0.1", secret=b"a secret")
STALL_S = 0.3
EMPTY = [DeviceRange(torch.zeros(64, dtype=torch.uint8), 0, 64)]


class Kernels(TorchDispatchMode):
    """Counts what touches blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.index_select, torch.ops.aten.index_copy_)
        return func(*args, **(kwargs or {}))


def noise(size: int, seed: int) -> Any:
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(size)), dtype=torch.uint8)


@pytest.mark.parametrize(("length", "shift"), [(4096, 0), (24, 8), (100, 4), (7, 3), (1, 0)])
def test_P05_ranges_of_several_allocations_are_gathered_and_scattered_exactly(length: int, shift: int) -> None:
    homes = [noise(40 * length + shift, seed) for seed in (1, 2)]
    order = random.Random(3).sample(range(80), 30)
    ranges = [DeviceRange(homes[n % 2], shift + n // 2 * length, length) for n in order]
    expected = torch.cat([piece.flat[piece.start : piece.start + length] for piece in ranges])
    buffer = torch.zeros(30 * length, dtype=torch.uint8)
    gather(buffer, ranges)
    assert buffer.equal(expected)
    empty = [torch.zeros_like(home) for home in homes]
    scatter(buffer, [DeviceRange(empty[n % 2], shift + n // 2 * length, length) for n in order])
    again = torch.zeros_like(buffer)
    gather(again, [DeviceRange(empty[n % 2], shift + n // 2 * length, length) for n in order])
    assert again.equal(expected)
    assert sum(int(home.count_nonzero()) for home in empty) == int(expected.count_nonzero())


def test_blocks_of_all_layers_are_one_kernel_where_layers_share_an_allocation() -> None:
    layers, blocks, length = 32, 10, 512
    home = noise(layers * blocks * length, 1)
    ranges = [
        DeviceRange(home, (layer * blocks + block) * length, length) for block in (7, 2) for layer in range(layers)
    ]
    with Kernels() as kernels:
        gather(torch.zeros(len(ranges) * length, dtype=torch.uint8), ranges)
    assert kernels.count == 1


async def test_P26_where_nccl_cannot_work_it_offers_its_reason_and_opens_nothing() -> None:
    for device, reason in ((None, "KV is in host memory"), ("cuda:0", "no CUDA")):
        if device is not None and torch.cuda.is_available():
            continue
        transfer = NcclTransfer(Where(bind_host="127.0.0.1", secret=b"a secret", kv_device=device))
        assert transfer.offer == f"nccl!{reason}"
        assert await transfer.start() == ""
        with pytest.raises(TransferFailed, match=reason):
            await transfer.open("tcp://127.0.0.1:1", "h")
        await transfer.stop()


def groups() -> tuple[NcclGroup, NcclGroup]:
    """Target and source, connected."""
    device = CpuDevice()
    unique_id = device.new_id()

    def meet(rank: int) -> NcclGroup:
        group = NcclGroup(device, device.communicator(unique_id, rank, 5.0), STALL_S)
        group.connect(device.memory(1), rank)
        return group

    with ThreadPoolExecutor(2) as threads:
        target, source = threads.map(meet, (TARGET, SOURCE))
    return target, source


def test_P13_bytes_that_never_come_are_given_up_and_the_slot_stays_untouched() -> None:
    target, source = groups()
    slot = Slot(torch.zeros(64, dtype=torch.uint8), 0)
    begun_s = time.monotonic()
    with pytest.raises(RuntimeError, match="no progress"):
        target.receive(slot, EMPTY).wait(lambda: True)
    assert time.monotonic() - begun_s < 20 * STALL_S
    with pytest.raises(RuntimeError):  # messages that were expected behind it do not count as arrived either
        target.receive(slot, EMPTY).wait(lambda: True)
    source.close()
    target.close()
    assert not slot.memory.any()


def test_P05_who_is_told_to_stop_waits_no_longer_and_stores_nothing() -> None:
    target, source = groups()
    block = torch.zeros(64, dtype=torch.uint8)
    slot = Slot(torch.ones(64, dtype=torch.uint8), 0)
    assert not target.store(slot, [DeviceRange(block, 0, 64)], lambda: False)
    with pytest.raises(RuntimeError, match="not wanted"):
        target.receive(slot, EMPTY).wait(lambda: False)
    source.close()
    target.close()
    assert not block.any()


def test_P13_one_side_that_ends_breaks_the_other() -> None:
    target, source = groups()
    slot = Slot(torch.zeros(64, dtype=torch.uint8), 0)
    work = target.receive(slot, EMPTY)
    source.close()
    with pytest.raises(RuntimeError):
        work.wait(lambda: True)
    target.close()


class Counting(CpuDevice):
    """Remembers its communicators."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[CpuCommunicator] = []

    def communicator(self, unique_id: bytes, rank: int, deadline_s: float) -> CpuCommunicator:
        met = super().communicator(unique_id, rank, deadline_s)
        self.made.append(met)
        return met


async def test_P08_whoever_gives_up_while_ranks_meet_leaves_no_communicator() -> None:
    device = Counting()
    source, target = (NcclTransfer(HERE, opening=lambda _: device) for _ in range(2))
    address = await target.start()
    target.expect("h", lambda _: EMPTY[0])
    for number in range(40):
        opening = asyncio.create_task(source.open(address, "h"))
        await asyncio.sleep(number * 0.0002)
        opening.cancel()
        await asyncio.wait({opening})
        if not opening.cancelled():
            await opening.result().close()
    await target.forget("h")
    async with asyncio.timeout(20):
        while not all(communicator.is_aborted for communicator in device.made):
            await asyncio.sleep(0.05)
    assert device.made
    await source.stop()
    await target.stop()


class Library:
    """NCCL as far as meeting goes: it is done after so many questions, or never."""

    def __init__(self, questions: float, error: int = SUCCESS) -> None:
        self.left, self.error, self.aborted = questions, error, 0
        self.calls = {
            "ncclCommInitRankConfig": self._init,
            "ncclCommGetAsyncError": self._state,
            "ncclCommAbort": self._abort,
        }

    def _init(self, handle: Any, ranks: int, unique_id: Any, rank: int, config: Any) -> int:
        handle._obj.value = 1
        assert (ranks, config._obj.blocking) == (2, 0)
        return IN_PROGRESS

    def _state(self, _: Any, state: Any) -> int:
        self.left -= 1
        state._obj.value = IN_PROGRESS if self.left > 0 else self.error
        return SUCCESS

    def _abort(self, _: ctypes.c_void_p) -> int:
        self.aborted += 1
        return SUCCESS


def test_P13_meeting_over_nccl_has_a_deadline_and_leaves_nothing() -> None:
    library = Library(float("inf"))
    with pytest.raises(RuntimeError, match=r"no progress for 0\.05 s"):
        NcclCommunicator(library.calls, bytes(128), SOURCE, 0.05)
    assert library.aborted == 1


def test_an_error_of_nccl_is_an_error_here_and_an_abort_is_done_once() -> None:
    library = Library(3, error=6)
    with pytest.raises(RuntimeError, match="error 6"):
        NcclCommunicator(library.calls, bytes(128), SOURCE, 5.0)
    good = Library(3)
    communicator = NcclCommunicator(good.calls, bytes(128), SOURCE, 5.0)
    communicator.abort()
    communicator.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        communicator.check()
    assert (library.aborted, good.aborted) == (1, 1)
