"""KV tensors of every layout vLLM has, as ranges of bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from midstream.control.errors import BadInput
from midstream.instance.engines.vllm.kv_memory import KvMemory, planes_of

BLOCKS, HEADS, TOKENS, WIDTH = 7, 3, 4, 8


def numbered(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.int32).reshape(shape)


LAYOUTS: dict[str, tuple[torch.Tensor, int, int]] = {
    "blocks first": (numbered(BLOCKS, HEADS, TOKENS, WIDTH), 0, 1),
    "keys and values apart": (numbered(2, BLOCKS, TOKENS, HEADS, WIDTH), 1, 2),
    "heads inside, stored outside": (numbered(BLOCKS, HEADS, TOKENS, WIDTH).transpose(1, 2), 0, 1),
    "layers of one block together": (numbered(BLOCKS, 5, HEADS, TOKENS, WIDTH)[:, 2], 0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_P05_a_range_holds_exactly_its_blocks_bytes(layout: str) -> None:
    tensor, dimension, planes = LAYOUTS[layout]
    memory = KvMemory([tensor, tensor.clone()], BLOCKS)
    assert len(memory.planes) == 2 * planes
    for block in range(1, BLOCKS):
        expected = sorted(tensor.select(dimension, block).flatten().tolist())
        seen = [number for plane in range(planes) for number in memory.view(block, plane).cast("i")]
        assert sorted(seen) == expected


def test_writing_a_view_writes_the_tensor() -> None:
    tensor = numbered(BLOCKS, 2, 2)
    view = KvMemory([tensor], BLOCKS).view(3, 0)
    view[:] = bytes(len(view))
    assert tensor[3].eq(0).all()
    assert tensor[2].ne(0).all()
    assert tensor[4].ne(0).all()


@pytest.mark.parametrize("block", [-1, 0, BLOCKS])
def test_P05_the_null_block_and_what_lies_outside_cannot_be_had(block: int) -> None:
    with pytest.raises(IndexError):
        KvMemory([numbered(BLOCKS, 2, 2)], BLOCKS).view(block, 0)


def test_a_tensor_without_blocks_is_refused() -> None:
    with pytest.raises(BadInput, match="no dimension of 7 blocks"):
        planes_of(numbered(3, 2), BLOCKS)


def test_memory_of_a_gpu_is_refused() -> None:
    class OnGpu:
        device: Any = type("Device", (), {"type": "cuda"})

    with pytest.raises(BadInput, match="cuda"):
        planes_of(OnGpu(), BLOCKS)
