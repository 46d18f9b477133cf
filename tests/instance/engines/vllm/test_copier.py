"""Two workers' copiers and their llumlets' ends, with plain tensors for KV."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch

from midstream.control.errors import TransferFailed
from midstream.instance.engines.vllm import calls, copier
from midstream.instance.engines.vllm.copier import PART_BYTES, parts, start_copier
from midstream.instance.engines.vllm.copier_link import CopierLink
from midstream.instance.engines.vllm.kv_memory import DirectMemory, StagedMemory
from midstream.migration.transfers import registry
from tests.instance.engines.vllm.proxy import VllmLink

BLOCKS, LAYERS = 9, 3
OPEN = calls.Open(transfers=("rpc",), host="127.0.0.1", port=0, advertise_host="", secret=b"a secret", stall_s=20.0)


class Side(NamedTuple):
    link: CopierLink
    tensors: list[torch.Tensor]
    threads: list[threading.Thread]


@contextlib.asynccontextmanager
async def side(
    path: Path,
    fill: int,
    workers: int = 1,
    kind: type[DirectMemory] | type[StagedMemory] = DirectMemory,
    transfer: str = "rpc",
) -> AsyncIterator[Side]:
    """One engine's copiers; every worker has tensors of its own."""
    link = CopierLink()
    await link.listen(str(path))
    tensors = [torch.full((BLOCKS, 4, 8), fill, dtype=torch.int16) for _ in range(LAYERS * workers)]
    threads = []
    for rank in range(workers):
        memory = kind(tensors[rank * LAYERS : (rank + 1) * LAYERS], BLOCKS)
        threads.append(start_copier(str(path), rank, memory))
    try:
        await link.open(workers, msgspec.structs.replace(OPEN, transfers=(transfer,)))
        yield Side(link, tensors, threads)
    finally:
        await link.stop()
        for thread in threads:
            await asyncio.to_thread(thread.join, 20.0)
            assert not thread.is_alive()


@pytest.fixture(params=[DirectMemory, StagedMemory])
async def sides(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Side, Side]]:
    async with side(tmp_path / "a", 1, kind=request.param) as a, side(tmp_path / "b", 0, kind=request.param) as b:
        yield a, b


def send(
    address: str, handle: str, block_ids: tuple[int, ...], first: int = 0, transfer: str = "rpc"
) -> calls.SendBlocks:
    return calls.SendBlocks(
        channel="run",
        transfer=transfer,
        address=address,
        handle=handle,
        first=first,
        block_ids=block_ids,
        checksum=True,
    )


async def test_P05_blocks_arrive_where_they_were_expected_and_nowhere_else(sides: tuple[Side, Side]) -> None:
    a, b = sides
    for number, tensor in enumerate(a.tensors):
        tensor[2], tensor[3] = 10 + number, 20 + number
    await b.link.all(calls.Expect(transfer="rpc", handle="h", first=0, block_ids=(7, 5)))
    (done,) = await a.link.all(send(b.link.addresses["rpc"], "h", (2, 3)))
    assert done.copied_bytes == 2 * LAYERS * 4 * 8 * 2
    await b.link.all(calls.Forget(transfer="rpc", handle="h", is_kept=True))
    for number, tensor in enumerate(b.tensors):
        assert tensor[7].eq(10 + number).all()
        assert tensor[5].eq(20 + number).all()
        assert tensor[[0, 1, 2, 3, 4, 6, 8]].eq(0).all()


async def test_P05_over_nccl_blocks_go_from_the_tensors_into_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.TRANSFERS, "nccl", "tests.migration.nccl_on_cpu:NcclOnCpu")
    to = {"kind": StagedMemory, "transfer": "nccl"}
    async with side(tmp_path / "a", 1, **to) as a, side(tmp_path / "b", 0, **to) as b:  # type: ignore[arg-type]
        for number, tensor in enumerate(a.tensors):
            tensor[2], tensor[3] = 10 + number, 20 + number
        assert b.link.offers == ("nccl@cpu",)
        await b.link.all(calls.Expect(transfer="nccl", handle="h", first=0, block_ids=(7, 5)))
        await a.link.all(send(b.link.addresses["nccl"], "h", (2, 3), transfer="nccl"))
        for number, tensor in enumerate(b.tensors):
            assert tensor[7].eq(10 + number).all()
            assert tensor[5].eq(20 + number).all()
            assert tensor[[0, 1, 2, 3, 4, 6, 8]].eq(0).all()
        await b.link.all(calls.Forget(transfer="nccl", handle="h", is_kept=True))


async def test_P26_an_engine_in_host_memory_says_why_it_has_no_nccl(tmp_path: Path) -> None:
    async with side(tmp_path / "a", 1, transfer="nccl") as a:
        assert a.link.offers == ("nccl!KV is in host memory",)
        assert a.link.addresses == {}


async def test_P05_outside_the_reservation_nothing_is_written(sides: tuple[Side, Side]) -> None:
    a, b = sides
    await b.link.all(calls.Expect(transfer="rpc", handle="h", first=2, block_ids=(7, 5)))
    for first in (0, 4):
        with pytest.raises(TransferFailed):
            await a.link.all(send(b.link.addresses["rpc"], "h", (2, 3), first))
    await b.link.all(calls.Forget(transfer="rpc", handle="h", is_kept=False))
    with pytest.raises(TransferFailed):
        await a.link.all(send(b.link.addresses["rpc"], "h", (2, 3), 2))
    assert all(tensor.eq(0).all() for tensor in b.tensors)


async def test_a_cancelled_copy_has_let_go_of_memory(sides: tuple[Side, Side]) -> None:
    a, b = sides
    link = VllmLink()
    link.gate.clear()
    await b.link.all(calls.Expect(transfer="rpc", handle="h", first=0, block_ids=(7,)))
    copy = asyncio.create_task(a.link.all(send(await link.before(b.link.addresses["rpc"]), "h", (2,))))
    async with asyncio.timeout(20):
        await link.sending.wait()
    copy.cancel()
    await asyncio.wait({copy})
    assert copy.cancelled()
    link.gate.set()
    await link.stop()
    await b.link.all(calls.Forget(transfer="rpc", handle="h", is_kept=False))
    assert all(tensor[7].eq(0).all() for tensor in b.tensors)
    await b.link.all(calls.Expect(transfer="rpc", handle="again", first=0, block_ids=(7,)))
    await a.link.all(send(b.link.addresses["rpc"], "again", (2,)))
    await b.link.all(calls.Forget(transfer="rpc", handle="again", is_kept=True))
    assert all(tensor[7].eq(1).all() for tensor in b.tensors)


async def test_equal_ranks_exchange_and_other_numbers_of_ranks_are_refused(tmp_path: Path) -> None:
    async with side(tmp_path / "a", 0, workers=2) as a, side(tmp_path / "b", 0, workers=2) as b:
        for number, tensor in enumerate(a.tensors):
            tensor[4] = number
        await b.link.all(calls.Expect(transfer="rpc", handle="h", first=0, block_ids=(6,)))
        addresses = b.link.addresses["rpc"].split(",")
        await a.link.each([send(address, "h", (4,)) for address in addresses])
        await b.link.all(calls.Forget(transfer="rpc", handle="h", is_kept=True))
        assert [int(tensor[6, 0, 0]) for tensor in b.tensors] == list(range(2 * LAYERS))
        with pytest.raises(TransferFailed, match="1 ranks there, 2 here"):
            await a.link.each([send(addresses[0], "h", (4,))])


async def test_P13_a_worker_that_is_gone_fails_calls_at_once(tmp_path: Path) -> None:
    async with side(tmp_path / "a", 0) as a:
        waiting = asyncio.create_task(a.link.all(send("tcp://127.0.0.1:9", "h", (2,))))
        await a.link.stop()
        await asyncio.wait({waiting})
        assert isinstance(waiting.exception(), TransferFailed)
        with pytest.raises(TransferFailed):
            await a.link.all(calls.HangUp(channel="x"))


def test_only_a_copy_with_pauses_is_cut_into_parts() -> None:
    assert list(parts(5, PART_BYTES // 2, 0.25)) == [range(2), range(2, 4), range(4, 5)]
    assert list(parts(3, 2 * PART_BYTES, 0.25)) == [range(1), range(1, 2), range(2, 3)]
    assert list(parts(5, PART_BYTES // 2, 1.0)) == [range(5)]
    assert list(parts(0, 1, 1.0)) == list(parts(0, 1, 0.25)) == []


async def test_P05_a_copy_with_pauses_arrives_whole(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "PART_BYTES", 1)
    a, b = sides
    for number, tensor in enumerate(a.tensors):
        tensor[2], tensor[3], tensor[4] = 10 + number, 20 + number, 30 + number
    await b.link.all(calls.Expect(transfer="rpc", handle="h", first=0, block_ids=(7, 5, 1)))
    (done,) = await a.link.all(msgspec.structs.replace(send(b.link.addresses["rpc"], "h", (2, 3, 4)), share=0.25))
    assert done.copied_bytes == 3 * LAYERS * 4 * 8 * 2
    await b.link.all(calls.Forget(transfer="rpc", handle="h", is_kept=True))
    for number, tensor in enumerate(b.tensors):
        assert [int(tensor[place, 0, 0]) for place in (7, 5, 1)] == [10 + number, 20 + number, 30 + number]
