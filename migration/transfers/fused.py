"""Many ranges of a device's memory into one contiguous buffer and back, in one kernel for each allocation they lie in.

An allocation is seen as a matrix whose rows are as long as starts and lengths of the ranges allow: then a range is some
of its rows. vLLM keeps all layers in one allocation, so a frame of blocks of all layers is one kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from midstream.migration.transfers.device_range import DeviceRange

WORD_BYTES = 8


def gather(buffer: torch.Tensor, ranges: Sequence[DeviceRange]) -> None:
    """Copy ranges of equal length into `buffer`, a flat tensor of bytes, one behind the other."""
    for matrix, rows, part in _selections(buffer, ranges):
        torch.index_select(matrix, 0, rows, out=part)


def scatter(buffer: torch.Tensor, ranges: Sequence[DeviceRange]) -> None:
    """Copy `buffer`'s bytes into ranges of equal length."""
    for matrix, rows, part in _selections(buffer, ranges):
        matrix.index_copy_(0, rows, part)


def _selections(
    buffer: torch.Tensor, ranges: Sequence[DeviceRange]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(allocation as a matrix, which rows of it, their part of the buffer) for ranges that follow in one allocation."""
    done = 0
    for _, alike in itertools.groupby(ranges, key=lambda piece: id(piece.flat)):
        group = list(alike)
        length, flat = group[0].length, group[0].flat
        row_bytes = math.gcd(length, *(piece.start for piece in group))
        part = buffer[done : done + length * len(group)]
        rows = _numbers([piece.start // row_bytes for piece in group], flat.device)
        within = torch.arange(length // row_bytes, device=flat.device)
        yield _matrix(flat, row_bytes), (rows[:, None] + within).flatten(), _matrix(part, row_bytes)
        done += length * len(group)


def _numbers(numbers: list[int], device: torch.device) -> torch.Tensor:
    """Without a wait for the device, which a copy out of pageable memory would be."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _matrix(flat: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """All whole rows; of words where that is possible, because a kernel copies element by element."""
    whole = flat[: len(flat) // row_bytes * row_bytes]
    is_even = row_bytes % WORD_BYTES == 0 and whole.data_ptr() % WORD_BYTES == 0
    words = whole.view(torch.int64) if is_even else whole
    return words.view(-1, row_bytes // words.element_size())
