"""Memory that other processes of this host can map: how it is made, and how a peer's is looked at.

A region is an anonymous file that can neither shrink nor grow, so whoever maps it can rely on its size. Peers get a
descriptor that is good for reading only.
"""

from __future__ import annotations

import asyncio
import bisect
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from midstream.migration.transfers.pieces import address_of

IDLE_S = 5.0
"""A peer's region stays mapped so long after its last connection: mapping it anew costs page faults."""
MAPPED_MAX = 4096
"""Regions of peers that are mapped at once."""
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


class Regions:
    """This process's regions, by address. They must not overlap, and not change."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = sorted(regions, key=lambda region: region.address)
        self._starts = [region.address for region in self._regions]

    def find(self, address: int, length: int) -> tuple[Region, int] | None:
        """The region that holds these bytes, and where in it they start."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        offset = address - self._starts[at]
        region = self._regions[at]
        return (region, offset) if offset + length <= region.size else None


class Mapping:
    """A peer's region, readable at `address`."""

    def __init__(self, number: int) -> None:
        """Raises `OSError` for a file whose size could change under us: reading it then would kill the process."""
        if fcntl.fcntl(number, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK == 0:
            raise OSError("the peer's memory is not sealed")
        self.size = os.fstat(number).st_size
        self._memory = mmap.mmap(number, self.size, prot=mmap.PROT_READ)
        self.address = address_of(memoryview(self._memory))
        self.users = 0
        self.expiry: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Unmap."""
        self._memory.close()


class Mappings:
    """Peers' regions, each mapped once, however many connections use it."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int], Mapping] = {}

    def __len__(self) -> int:
        return len(self._mapped)

    def take(self, number: int) -> Mapping:
        """Map the file behind a descriptor. `give_back` it. Raises `OSError`."""
        about = os.fstat(number)
        key = (about.st_dev, about.st_ino)
        mapping = self._mapped.get(key)
        if mapping is None:
            if len(self._mapped) >= MAPPED_MAX:
                raise OSError("too many regions are mapped")
            mapping = self._mapped[key] = Mapping(number)
        if mapping.expiry is not None:
            mapping.expiry.cancel()
            mapping.expiry = None
        mapping.users += 1
        return mapping

    def give_back(self, mapping: Mapping) -> None:
        """One user less; the last one's leaving lets it expire."""
        mapping.users -= 1
        if mapping.users == 0:
            mapping.expiry = asyncio.get_running_loop().call_later(IDLE_S, self._expire, mapping)

    def _expire(self, mapping: Mapping) -> None:
        self._mapped = {key: known for key, known in self._mapped.items() if known is not mapping}
        mapping.close()

    def clear(self) -> None:
        """Unmap everything; nobody may be using it."""
        for mapping in self._mapped.values():
            if mapping.expiry is not None:
                mapping.expiry.cancel()
            mapping.close()
        self._mapped.clear()


def place() -> str:
    """Names the kernel, network namespace and user that a process must share with us to use our memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespace = Path("/proc/self/ns/net").readlink()
    return f"{boot}/{namespace}/{os.getuid()}"
