"""Memory that other processes of this host can map.

A region is an anonymous file that can neither shrink nor grow, so whoever maps it can rely on its size. Peers get a
descriptor that is good for reading only.
"""

from __future__ import annotations

import bisect
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from midstream.migration.transfers.pieces import address_of

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Region:
    """`size` bytes of zeros at `address`, writable here. Given back when neither it nor `view` is referred to."""

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("midstream-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, size)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, SEALS)
        memory = mmap.mmap(self._file, size)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.size = size
        self.view = memoryview(memory)
        self.address = address_of(self.view)

    def lend(self) -> int:
        """A fresh descriptor that cannot be written through, for the caller to close."""
        return os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def file(self) -> int:
        """The descriptor itself, good for writing: for processes of our own."""
        return self._file


class Regions:
    """This process's regions, by address. They must not overlap, and not change."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = sorted(regions, key=lambda region: region.address)
        self._starts = [region.address for region in self._regions]

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions)

    def find(self, address: int, length: int) -> tuple[Region, int] | None:
        """The region that holds these bytes, and where in it they start."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        offset = address - self._starts[at]
        region = self._regions[at]
        return (region, offset) if offset + length <= region.size else None


def place() -> str:
    """Names the kernel, network namespace and user that a process must share with us to use our memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespace = Path("/proc/self/ns/net").readlink()
    return f"{boot}/{namespace}/{os.getuid()}"
