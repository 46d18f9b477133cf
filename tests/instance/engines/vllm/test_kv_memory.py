"""KV tensors of every layout vLLM has, as ranges of bytes."""

from __future__ import annotations

import pytest
import torch

from midstream.control.errors import BadInput
from midstream.instance.engines.vllm.kv_memory import DirectMemory, StagedMemory, kv_memory, planes_of

BLOCKS, HEADS, TOKENS, WIDTH = 7, 3, 4, 8


def numbered(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.int32).reshape(shape)


LAYOUTS: dict[str, tuple[torch.Tensor, int, int]] = {
    "blocks first": (numbered(BLOCKS, HEADS, TOKENS, WIDTH), 0, 1),
    "keys and values apart": (numbered(2, BLOCKS, TOKENS, HEADS, WIDTH), 1, 2),
    "heads inside, stored outside": (numbered(BLOCKS, HEADS, TOKENS, WIDTH).transpose(1, 2), 0, 1),
    "two blocks of the kernel are one": (numbered(2 * BLOCKS, TOKENS, WIDTH), 0, 1),
    "layers of one block together": (numbered(BLOCKS, 5, HEADS, TOKENS, WIDTH)[:, 2], 0, 1),
}


KINDS = {"in place": DirectMemory, "staged": StagedMemory}
"""Staged memory is for devices; here its device is the CPU."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_P05_a_range_holds_exactly_its_blocks_bytes(layout: str, kind: str) -> None:
    tensor, dimension, planes = LAYOUTS[layout]
    memory = KINDS[kind]([tensor, tensor.clone()], BLOCKS)
    assert len(memory.planes) == 2 * planes
    order = (4, 1, 6)
    window = memory.reading(order)
    tensor = tensor.unflatten(dimension, (BLOCKS, -1))
    for place, block in enumerate(order):
        expected = sorted(tensor.select(dimension, block).flatten().tolist())
        seen = [number for plane in range(planes) for number in window.view(place, plane).cast("i")]
        assert sorted(seen) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_P05_what_landed_is_where_it_was_read_from_and_nowhere_else(layout: str, kind: str) -> None:
    source, dimension, _ = LAYOUTS[layout]
    target = torch.zeros_like(source)
    reading = KINDS[kind]([source], BLOCKS).reading((2, 5))
    memory = KINDS[kind]([target], BLOCKS)
    writing = memory.writing((6, 3))
    for place in range(2):
        for plane in range(len(memory.planes)):
            writing.view(place, plane)[:] = reading.view(place, plane)
    writing.land()
    source, target = (tensor.unflatten(dimension, (BLOCKS, -1)) for tensor in (source, target))
    for block, origin in ((6, 2), (3, 5)):
        assert target.select(dimension, block).equal(source.select(dimension, origin))
    assert all(target.select(dimension, block).eq(0).all() for block in (0, 1, 2, 4, 5))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_P05_ranges_of_a_device_are_the_bytes_that_windows_show(layout: str) -> None:
    tensor = LAYOUTS[layout][0]
    memory = DirectMemory([tensor, tensor.clone()], BLOCKS)
    ranges, window = memory.in_place((4, 1)), memory.reading((4, 1))
    places = [(place, plane) for place in range(2) for plane in range(len(memory.planes))]
    pieces = [ranges.view(*where) for where in places]
    assert [bytes(p.flat[p.start : p.start + len(p)].numpy()) for p in pieces] == [
        bytes(window.view(*where)) for where in places
    ]
    assert len({id(piece.flat) for piece in pieces}) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [-1, 0, BLOCKS])
def test_P05_the_null_block_and_what_lies_outside_cannot_be_had(block: int, kind: str) -> None:
    memory = KINDS[kind]([numbered(BLOCKS, 2, 2)], BLOCKS)
    for how in (memory.reading, memory.writing, memory.in_place):
        with pytest.raises(IndexError):
            how((1, block))


def test_memory_of_a_cpu_is_used_in_place() -> None:
    assert isinstance(kv_memory([numbered(BLOCKS, 2, 2)], BLOCKS), DirectMemory)


def test_a_tensor_without_blocks_is_refused() -> None:
    with pytest.raises(BadInput, match="no dimension of 7 blocks"):
        planes_of(numbered(3, 2), BLOCKS)
