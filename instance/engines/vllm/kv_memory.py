"""KV memory of one worker as ranges of bytes: one range per block and *plane*.

A plane is the part of a layer's KV that lies in one piece per block. Blocks and planes are numbered so
that range number `block * planes + plane` means the same bytes on any two workers of equal layout.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from midstream.control.errors import BadInput
from midstream.migration.transfers.base import Bytes
from midstream.migration.transfers.device_range import DeviceRange


class Plane(NamedTuple):
    """Block n lies at `start + n * stride`, `length` bytes long. `start` is an address."""

    start: int
    stride: int
    length: int


class Window(Protocol):
    """Some blocks' bytes, by their place in the list they were asked for with."""

    def view(self, place: int, plane: int) -> Bytes:
        """The bytes, writable if the window is."""
        ...

    def land(self) -> None:
        """What was written is in KV memory when this returns."""
        ...


class KvMemory(Protocol):
    """KV memory that can be read and written block by block."""

    planes: list[Plane]
    is_staged: bool
    """Whether opening and landing take time: not for an event loop."""
    device: str | None
    """The device it lies in; None: the host's memory."""

    @property
    def block_bytes(self) -> int: ...

    def reading(self, block_ids: Sequence[int]) -> Window:
        """Blocks whose content is final. Raises `IndexError`."""
        ...

    def writing(self, block_ids: Sequence[int]) -> Window:
        """Blocks that nobody reads before the window has landed. Raises `IndexError`."""
        ...

    def in_place(self, block_ids: Sequence[int]) -> Window:
        """The blocks themselves as `DeviceRange`s, to read and to write. Raises `IndexError`."""
        ...


def kv_memory(tensors: list[Any], blocks: int) -> KvMemory:
    """The memory of a worker's layers. Raises `BadInput` for a layout without blocks."""
    return DirectMemory(tensors, blocks) if tensors[0].device.type == "cpu" else StagedMemory(tensors, blocks)


class _Memory:
    is_staged = False

    def __init__(self, tensors: list[Any], blocks: int) -> None:
        self._tensors = tensors  # kept: planes are bare addresses
        self.device = None if tensors[0].device.type == "cpu" else str(tensors[0].device)
        self._blocks = blocks
        self.planes: list[Plane] = []
        self._owners: list[Any] = []
        for tensor in tensors:
            planes = planes_of(tensor, blocks)
            self.planes += planes
            self._owners += [tensor] * len(planes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes."""
        return sum(plane.length for plane in self.planes)

    def _check(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if not 0 < block_id < self._blocks:
                raise IndexError(f"no block {block_id}")

    def in_place(self, block_ids: Sequence[int]) -> Window:
        """See `KvMemory`."""
        self._check(block_ids)
        return DeviceWindow(self.planes, self._allocations, block_ids)

    @cached_property
    def _allocations(self) -> list[torch.Tensor]:
        """The whole allocation that each plane lies in, as bytes; one object for each, as `DeviceRange` wants it."""
        flat: dict[int, torch.Tensor] = {}
        for tensor in self._owners:
            flat.setdefault(tensor.untyped_storage().data_ptr(), _bytes_of(tensor))
        return [flat[tensor.untyped_storage().data_ptr()] for tensor in self._owners]


class DirectMemory(_Memory):
    """CPU tensors: windows look straight into them."""

    def reading(self, block_ids: Sequence[int]) -> Window:
        """See `KvMemory`."""
        self._check(block_ids)
        return DirectWindow(self.planes, block_ids)

    writing = reading


class DirectWindow:
    """The blocks themselves."""

    def __init__(self, planes: list[Plane], block_ids: Sequence[int]) -> None:
        self._planes = planes
        self._block_ids = block_ids

    def view(self, place: int, plane: int) -> memoryview:
        """The bytes of one plane of a block, in place."""
        start, stride, length = self._planes[plane]
        raw = (ctypes.c_char * length).from_address(start + self._block_ids[place] * stride)
        return memoryview(raw).cast("B")

    def land(self) -> None:
        """They are there already."""


class DeviceWindow:
    """The blocks themselves, in a device's memory."""

    def __init__(self, planes: list[Plane], allocations: list[torch.Tensor], block_ids: Sequence[int]) -> None:
        self._planes = planes
        self._allocations = allocations
        self._block_ids = block_ids

    def view(self, place: int, plane: int) -> DeviceRange:
        """One plane of a block."""
        start, stride, length = self._planes[plane]
        flat = self._allocations[plane]
        return DeviceRange(flat, start + self._block_ids[place] * stride - flat.data_ptr(), length)

    def land(self) -> None:
        """They are there already."""


class StagedMemory(_Memory):
    """Memory of a device: gathered into host memory, scattered from it, on a stream of its own.

    Reading needs no wait for the model's stream: blocks are final when the host has seen the token after
    them. On a GPU this was not run; tests run it with CPU tensors.
    """

    is_staged = True

    def __init__(self, tensors: list[Any], blocks: int) -> None:
        super().__init__(tensors, blocks)
        self._device: torch.device = tensors[0].device
        self._stream: Any = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._bytes = [self._as_bytes(*of) for of in zip(self._owners, self.planes, strict=True)]

    def _as_bytes(self, tensor: Any, plane: Plane) -> torch.Tensor:
        """One plane of all blocks, as a matrix of bytes over the tensor's own storage."""
        whole = _bytes_of(tensor)
        return whole.as_strided((self._blocks, plane.length), (plane.stride, 1), plane.start - whole.data_ptr())

    def reading(self, block_ids: Sequence[int]) -> Window:
        """See `KvMemory`."""
        window = self._window(block_ids)
        with self._on_stream():
            for staged, plane in zip(window.staged, self._bytes, strict=True):
                staged.copy_(plane.index_select(0, window.index), non_blocking=True)
        self._settle()
        return window

    def writing(self, block_ids: Sequence[int]) -> Window:
        """See `KvMemory`."""
        return self._window(block_ids)

    def scatter(self, window: StagedWindow) -> None:
        """Write a window's bytes into the blocks."""
        with self._on_stream():
            for staged, plane in zip(window.staged, self._bytes, strict=True):
                plane.index_copy_(0, window.index, staged.to(self._device, non_blocking=True))
        self._settle()

    def _window(self, block_ids: Sequence[int]) -> StagedWindow:
        self._check(block_ids)
        is_pinned = self._stream is not None
        staged = [
            torch.zeros((len(block_ids), plane.length), dtype=torch.uint8, pin_memory=is_pinned)
            for plane in self.planes
        ]
        return StagedWindow(self, staged, torch.tensor(block_ids, device=self._device))

    def _on_stream(self) -> Any:
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def _settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class StagedWindow:
    """Host memory for some blocks of a device, plane by plane."""

    def __init__(self, memory: StagedMemory, staged: list[torch.Tensor], index: torch.Tensor) -> None:
        self._memory = memory
        self.staged = staged
        self.index = index

    def view(self, place: int, plane: int) -> memoryview:
        """The bytes of one plane of a block, in host memory."""
        return memoryview(self.staged[plane][place].numpy()).cast("B")

    def land(self) -> None:
        """Copy everything to the device and wait for it."""
        if len(self.index):
            self._memory.scatter(self)


def _bytes_of(tensor: Any) -> torch.Tensor:
    """A tensor's whole allocation."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def planes_of(tensor: Any, blocks: int) -> list[Plane]:
    """The planes of one layer's tensor, whichever of its dimensions counts blocks. Raises `BadInput` for none.

    An attention kernel may count smaller blocks: then several of its own are one of the cache manager's.
    """
    at = _block_dimension(tensor, blocks)
    tensor = tensor.unflatten(at, (blocks, tensor.shape[at] // blocks))
    item = tensor.element_size()
    strides = [stride * item for stride in tensor.stride()]
    outer = [(size, strides[i]) for i, size in enumerate(tensor.shape) if i != at and size > 1]
    outer.sort(key=lambda dimension: dimension[1])
    length = item
    while outer and outer[0][1] == length:
        length *= outer.pop(0)[0]
    starts = [int(tensor.data_ptr())]
    for count, stride in reversed(outer):
        starts = [start + i * stride for start in starts for i in range(count)]
    return [Plane(start, strides[at], length) for start in sorted(starts)]


def _block_dimension(tensor: Any, blocks: int) -> int:
    sizes = list(enumerate(tensor.shape))
    found = [i for i, size in sizes if size == blocks] or [i for i, size in sizes if size and size % blocks == 0]
    if not found:
        raise BadInput(f"a KV tensor of shape {tuple(tensor.shape)} has no dimension of {blocks} blocks")
    return max(found, key=lambda i: int(tensor.stride(i)))
