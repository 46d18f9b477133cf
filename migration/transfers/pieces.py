"""Copying many pieces of memory in few calls, so that the interpreter's lock is seldom needed in between."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

STEP_BYTES_MAX = 4 * 1024 * 1024
"""Copied without asking whether to go on: about half a millisecond."""

_Byte = ctypes.c_char
Addresses = npt.NDArray[np.int64]


class _At:
    """Memory at a bare address, for numpy."""

    def __init__(self, address: int, rows: int, stride: int, length: int) -> None:
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "data": (address, False), "shape": (rows, length), "strides": (stride, 1),
        }  # fmt: skip


def copy_pieces(targets: Addresses, sources: Addresses, length: int, may_go_on: Callable[[], bool]) -> bool:
    """Copy `length` bytes from each source to its target; False if `may_go_on` said no in between.

    Pieces that lie at even distances on both sides, as the layers of one block do, are copied by one call.
    """
    to, of = targets.tolist(), sources.tolist()
    for first, count in runs(targets, sources, max(1, STEP_BYTES_MAX // length)):
        if not may_go_on():
            return False
        target, source = to[first], of[first]
        if count == 1:
            if not _copy_one(target, source, length, may_go_on):
                return False
            continue
        strides = to[first + 1] - target, of[first + 1] - source
        np.copyto(
            np.asarray(_At(target, count, strides[0], length)), np.asarray(_At(source, count, strides[1], length))
        )
    return True


def _copy_one(target: int, source: int, length: int, may_go_on: Callable[[], bool]) -> bool:
    for start in range(0, length, STEP_BYTES_MAX):
        if start and not may_go_on():
            return False
        ctypes.memmove(target + start, source + start, min(STEP_BYTES_MAX, length - start))
    return True


def runs(targets: Addresses, sources: Addresses, count_max: int) -> Iterator[tuple[int, int]]:
    """(first, count) of pieces at even distances on both sides, none longer than `count_max`."""
    steps = np.stack((np.diff(targets), np.diff(sources)))
    is_even = (steps[:, 1:] == steps[:, :-1]).all(axis=0).tolist()
    first, total = 0, len(targets)
    while first < total:
        count = min(2, total - first, count_max)
        while first + count < total and count < count_max and count >= 2 and is_even[first + count - 2]:
            count += 1
        yield first, count
        first += count


def address_of(view: memoryview) -> int:
    """Where a contiguous view's bytes lie."""
    try:
        return ctypes.addressof(_Byte.from_buffer(view))
    except (TypeError, ValueError):  # read-only, or empty; this way takes ten times as long
        return int(np.frombuffer(view, np.uint8).ctypes.data)


def checksum(views: Sequence[memoryview], table: bytes) -> int:
    """CRC-32 of indexes and blocks: it guards against faults, not against forgers."""
    crc = zlib.crc32(table)
    for number in range(len(views)):  # by number: no local name may hold on to a view
        crc = zlib.crc32(views[number], crc)
    return crc
