"""The `gloo` transfer: torch.distributed between two processes on CPUs, a process group of two for each channel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed import ProcessGroupGloo

from midstream.migration.transfers.base import Where
from midstream.migration.transfers.pair_store import PairStore
from midstream.migration.transfers.paired import SOURCE, TARGET, PairedTransfer
from midstream.migration.transfers.pieces import address_of, checksum, copy_pieces
from midstream.migration.transfers.shm_memory import Region
from midstream.migration.transfers.slots import Slot

OTHER = {TARGET: SOURCE, SOURCE: TARGET}


class Work(Protocol):
    """What torch says of bytes on their way."""

    def wait(self) -> object:
        """Return when they have arrived, or were sent. Raises `RuntimeError`, also after the group's deadline."""
        ...


class HostMemory:
    """Memory of the host as torch and as bytes."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.zeros(size, dtype=torch.uint8)
        self.view = memoryview(self.tensor.numpy())
        self.address = int(self.tensor.data_ptr())


class GlooPair:
    """Two ranks of gloo."""

    def __init__(self, store: Any, device: Any, rank: int, stall_s: float) -> None:
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=stall_s)
        options._threads = 1
        options._devices = [device]
        self._store = store  # lives as long as the group
        self._group: Any = ProcessGroupGloo(store, rank, 2, options)
        self._other = OTHER[rank]

    def send(self, memory: HostMemory, start: int, length: int, tag: int) -> Work:
        """Raises `RuntimeError`."""
        work: Work = self._group.send([memory.tensor[start : start + length]], self._other, tag)
        return work

    def receive(self, memory: HostMemory, start: int, length: int, tag: int) -> Work:
        """Raises `RuntimeError`."""
        work: Work = self._group.recv([memory.tensor[start : start + length]], self._other, tag)
        return work

    def close(self) -> None:
        """End its threads and connections."""
        self._group = self._store = None


class GlooWork:
    """A receive of gloo's. It ends by itself when the other is gone, or after the deadline."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, _: Callable[[], bool]) -> None:
        """See `paired.Work`."""
        self._work.wait()


class GlooGroup:
    """`paired.Group` over gloo."""

    def __init__(self, pair: GlooPair) -> None:
        self._pair = pair
        self._tags = itertools.count()

    def send(self, slot: Slot[HostMemory], views: Sequence[memoryview]) -> object:
        """See `paired.Group`."""
        copy_pieces(_in_slot(slot, views), _addresses(views), len(views[0]), lambda: True)
        return self._pair.send(slot.memory, slot.start, len(views) * len(views[0]), next(self._tags))

    def receive(self, slot: Slot[HostMemory], size: int) -> GlooWork:
        """See `paired.Group`."""
        return GlooWork(self._pair.receive(slot.memory, slot.start, size, next(self._tags)))

    def store(self, slot: Slot[HostMemory], views: Sequence[memoryview], may_go_on: Callable[[], bool]) -> bool:
        """See `paired.Group`."""
        return copy_pieces(_addresses(views), _in_slot(slot, views), len(views[0]), may_go_on)

    def checksum(self, views: Sequence[memoryview], indexes: bytes) -> int:
        """See `paired.Group`."""
        return checksum(views, indexes)

    def close(self) -> None:
        """See `paired.Group`."""
        self._pair.close()


class GlooTransfer(PairedTransfer):
    """One process's gloo endpoint."""

    name = "gloo"

    def __init__(self, where: Where, regions: Sequence[Region] = ()) -> None:
        super().__init__(where)
        self._device = gloo_device(where.advertise_host or where.bind_host)

    def _memory(self, size: int) -> HostMemory:
        return HostMemory(size)

    def _group(self, store: PairStore, rank: int) -> GlooGroup:
        return GlooGroup(GlooPair(store, self._device, rank, self.where.stall_s))


def gloo_device(host: str) -> Any:
    """The interface that gloo's connections use."""
    return ProcessGroupGloo.create_device(hostname=host)


def _addresses(views: Sequence[memoryview]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([address_of(view) for view in views], np.int64)


def _in_slot(slot: Slot[HostMemory], views: Sequence[memoryview]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(len(views), dtype=np.int64) * len(views[0]) + (slot.memory.address + slot.start)
