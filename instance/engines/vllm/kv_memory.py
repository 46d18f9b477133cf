"""KV memory of one worker as ranges of bytes: one range per block and *plane*.

A plane is the part of a layer's KV that lies in one piece per block. Blocks and planes are numbered so
that range number `block * planes + plane` means the same bytes on any two workers of equal layout.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from midstream.control.errors import BadInput


class Plane(NamedTuple):
    """Block n lies at `start + n * stride`, `length` bytes long."""

    start: int
    stride: int
    length: int


class KvMemory:
    """Views of a worker's KV tensors. `tensors` must outlive it."""

    def __init__(self, tensors: list[Any], blocks: int) -> None:
        self._tensors = tensors
        self._blocks = blocks
        self.planes = [plane for tensor in tensors for plane in planes_of(tensor, blocks)]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes."""
        return sum(plane.length for plane in self.planes)

    def view(self, block_id: int, plane: int) -> memoryview:
        """The bytes themselves, writable. Raises `IndexError`."""
        if not 0 < block_id < self._blocks:
            raise IndexError(f"no block {block_id}")
        start, stride, length = self.planes[plane]
        raw = (ctypes.c_char * length).from_address(start + block_id * stride)
        return memoryview(raw).cast("B")


def planes_of(tensor: Any, blocks: int) -> list[Plane]:
    """The planes of one layer's tensor, whichever of its dimensions counts blocks.

    Raises `BadInput` for memory that is no CPU memory or that scatters a block's bytes.
    """
    if tensor.device.type != "cpu":
        raise BadInput(f"KV in {tensor.device.type} memory cannot be viewed from here")
    shape, item = list(tensor.shape), tensor.element_size()
    strides = [stride * item for stride in tensor.stride()]
    at = _block_dimension(shape, strides, blocks)
    outer = [(shape[i], strides[i]) for i in range(len(shape)) if i != at]
    outer.sort(key=lambda dimension: dimension[1])
    length = item
    while outer and outer[0][1] == length:
        length *= outer.pop(0)[0]
    starts = [int(tensor.data_ptr())]
    for count, stride in reversed(outer):
        starts = [start + i * stride for start in starts for i in range(count)]
    return [Plane(start, strides[at], length) for start in sorted(starts)]


def _block_dimension(shape: list[int], strides: list[int], blocks: int) -> int:
    found = [i for i, size in enumerate(shape) if size == blocks]
    if not found:
        raise BadInput(f"a KV tensor of shape {tuple(shape)} has no dimension of {blocks} blocks")
    return max(found, key=lambda i: strides[i])
