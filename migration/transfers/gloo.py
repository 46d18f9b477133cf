"""The `gloo` transfer: torch.distributed between two processes on CPUs, a process group of two for each channel."""

from __future__ import annotations

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

DIRECT_BYTES = 96 * 1024
"""Shorter pieces go through slots: a message costs both ends as much as copying some 64 KiB in and out of one."""
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
        return self.send_all(memory.tensor[start : start + length], tag)

    def receive(self, memory: HostMemory, start: int, length: int, tag: int) -> Work:
        """Raises `RuntimeError`."""
        return self.receive_all(memory.tensor[start : start + length], tag)

    def send_all(self, tensor: torch.Tensor, tag: int) -> Work:
        """Send a whole tensor; it must live until the answer was waited for. Raises `RuntimeError`."""
        work: Work = self._group.send([tensor], self._other, tag)
        return work

    def receive_all(self, tensor: torch.Tensor, tag: int) -> Work:
        """Fill a whole tensor. Raises `RuntimeError`."""
        work: Work = self._group.recv([tensor], self._other, tag)
        return work

    def close(self) -> None:
        """End its threads and connections."""
        self._group = self._store = None


class SlotWork:
    """A frame that arrives in a slot. It ends by itself when the other is gone, or after the deadline."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, _: Callable[[], bool]) -> None:
        """See `paired.Work`."""
        self._work.wait()


class DirectWork:
    """A frame whose pieces arrive where they belong. They are expected from `wait` on, in its thread."""

    def __init__(self, pair: GlooPair, views: Sequence[memoryview], tag: int) -> None:
        self._pair = pair
        self._views = views
        self._tag = tag

    def wait(self, may_go_on: Callable[[], bool]) -> None:
        """See `paired.Work`. The other has sent already, so this ends, also if nobody wants it any more."""
        if not may_go_on():
            raise RuntimeError("not wanted any more")
        works = [self._pair.receive_all(as_tensor(view), self._tag + n) for n, view in enumerate(self._views)]
        failed: RuntimeError | None = None
        while works:  # emptied, so that no traceback holds on to blocks
            try:
                works.pop().wait()
            except RuntimeError as error:
                failed = error
        if failed is not None:
            raise failed


class GlooGroup:
    """`paired.Group` over gloo: long pieces travel as they lie, a message each."""

    def __init__(self, pair: GlooPair, direct_bytes: int) -> None:
        self._pair = pair
        self._direct_bytes = direct_bytes
        self._tag = 0

    def _tags(self, count: int) -> int:
        self._tag += count
        return self._tag - count

    def is_direct(self, length: int) -> bool:
        """See `paired.Group`."""
        return length >= self._direct_bytes

    def send(self, slot: Slot[HostMemory] | None, views: Sequence[memoryview]) -> object:
        """See `paired.Group`."""
        if slot is None:
            first = self._tags(len(views))
            return [self._pair.send_all(as_tensor(view), first + n) for n, view in enumerate(views)]
        copy_pieces(_in_slot(slot, views), _addresses(views), len(views[0]), lambda: True)
        return self._pair.send(slot.memory, slot.start, len(views) * len(views[0]), self._tags(1))

    def receive(self, slot: Slot[HostMemory] | None, views: Sequence[memoryview]) -> SlotWork | DirectWork:
        """See `paired.Group`."""
        if slot is None:
            return DirectWork(self._pair, views, self._tags(len(views)))
        return SlotWork(self._pair.receive(slot.memory, slot.start, len(views) * len(views[0]), self._tags(1)))

    def store(self, slot: Slot[HostMemory] | None, views: Sequence[memoryview], may_go_on: Callable[[], bool]) -> bool:
        """See `paired.Group`."""
        return slot is None or copy_pieces(_addresses(views), _in_slot(slot, views), len(views[0]), may_go_on)

    def checksum(self, views: Sequence[memoryview], indexes: bytes) -> int:
        """See `paired.Group`."""
        return checksum(views, indexes)

    def close(self) -> None:
        """See `paired.Group`."""
        self._pair.close()


class GlooTransfer(PairedTransfer):
    """One process's gloo endpoint."""

    name = "gloo"

    def __init__(self, where: Where, regions: Sequence[Region] = (), direct_bytes: int = DIRECT_BYTES) -> None:
        """`direct_bytes`: pieces so long need no slot; the same at all peers."""
        super().__init__(where)
        self._direct_bytes = direct_bytes
        self._device = gloo_device(where.advertise_host or where.bind_host)

    def _memory(self, size: int) -> HostMemory:
        return HostMemory(size)

    def _group(self, store: PairStore, rank: int) -> GlooGroup:
        return GlooGroup(GlooPair(store, self._device, rank, self.where.stall_s), self._direct_bytes)


def as_tensor(view: memoryview) -> torch.Tensor:
    """The same bytes, which stay where they are while it lives; a copy if they cannot be written."""
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def gloo_device(host: str) -> Any:
    """The interface that gloo's connections use."""
    return ProcessGroupGloo.create_device(hostname=host)


def _addresses(views: Sequence[memoryview]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([address_of(view) for view in views], np.int64)


def _in_slot(slot: Slot[HostMemory], views: Sequence[memoryview]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(len(views), dtype=np.int64) * len(views[0]) + (slot.memory.address + slot.start)
