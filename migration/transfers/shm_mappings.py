"""What peers of this host have lent us to read."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os

from midstream.migration.transfers.pieces import address_of
from midstream.migration.transfers.shm_copier import Copier

IDLE_S = 5.0
"""A peer's region stays mapped so long after its last connection: mapping it anew costs page faults."""
MAPPED_MAX = 4096
"""Regions of peers that are mapped at once."""


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
        self.number = -1
        """What the copier calls it."""
        self.expiry: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Unmap."""
        self._memory.close()


class Mappings:
    """Peers' regions, each mapped once, however many connections use it, here and in the copier."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
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
            mapping.number = self._copier.lend(number, is_writable=False)
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
        self._close(mapping)

    def clear(self) -> None:
        """Unmap everything; nobody may be using it."""
        for mapping in self._mapped.values():
            if mapping.expiry is not None:
                mapping.expiry.cancel()
            self._close(mapping)
        self._mapped.clear()

    def _close(self, mapping: Mapping) -> None:
        self._copier.take_back(mapping.number)
        mapping.close()
