"""KV tensors move into memory that peers map, in place, and are read there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from midstream.instance.engines.vllm import calls
from midstream.instance.engines.vllm.copier import start_copier
from midstream.instance.engines.vllm.copier_link import CopierLink
from midstream.instance.engines.vllm.kv_memory import kv_memory
from midstream.instance.engines.vllm.shared_kv import share

BLOCKS, LAYERS = 9, 3


def layers() -> list[torch.Tensor]:
    """Tensors of one storage, as vLLM allocates them."""
    whole = torch.zeros(LAYERS, BLOCKS, 4, 8, dtype=torch.int16)
    return list(whole.unbind(0))


def test_tensors_of_one_storage_still_share_one():
    tensors = layers()
    other = tensors[1].view(BLOCKS, 32)
    held = [tensors[0], tensors[0]]
    before = [(tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in tensors]
    (region,) = share([*tensors, other, *held])
    assert before == [(tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in tensors]
    tensors[1][3] = 7
    assert other[3].eq(7).all()
    assert held[0] is tensors[0]
    at = tensors[1].data_ptr() - region.address + 3 * 64
    assert bytes(region.view[at : at + 2]) == b"\x07\x00"
    assert share(tensors) != []


@pytest.mark.parametrize("transfer", ["shm", "gloo"])
async def test_copiers_exchange_over_every_transfer(tmp_path: Path, transfer: str) -> None:
    open_both = calls.Open(
        transfers=(transfer, "rpc"), host="127.0.0.1", port=0, advertise_host="", secret=b"a secret", stall_s=20.0
    )
    sides = {}
    for name in ("a", "b"):
        tensors, link = layers(), CopierLink()
        await link.listen(str(tmp_path / name))
        regions = share(tensors)
        thread = start_copier(str(tmp_path / name), 0, kv_memory(tensors, BLOCKS), regions)
        await link.open(1, open_both)
        sides[name] = (tensors, link, thread)
    (source, out, _), (target, into, _) = sides["a"], sides["b"]
    assert out.offers == into.offers
    for number, tensor in enumerate(source):
        tensor[2], tensor[3] = 10 + number, 20 + number
    await into.all(calls.Expect(transfer=transfer, handle="h", first=0, block_ids=(7, 5)))
    order = calls.SendBlocks(
        channel="run", transfer=transfer, address=into.addresses[transfer], handle="h", first=0, block_ids=(2, 3),
        checksum=True,
    )  # fmt: skip
    await out.all(order)
    await into.all(calls.Forget(transfer=transfer, handle="h", is_kept=True))
    for number, tensor in enumerate(target):
        assert tensor[7].eq(10 + number).all()
        assert tensor[5].eq(20 + number).all()
        assert tensor[[0, 1, 2, 3, 4, 6, 8]].eq(0).all()
    for _, link, thread in sides.values():
        await link.stop()
        thread.join(20.0)
        assert not thread.is_alive()
