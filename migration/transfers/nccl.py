"""The `nccl` transfer: from a device's memory into a device's memory, a communicator of two ranks for each channel.

A frame's blocks of all layers are gathered into one buffer and sent as one message; the target scatters it. What
touches CUDA and NCCL is in `nccl_cuda`; all else is here, and runs in tests with a device made of host memory.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from midstream.control.errors import BadInput, TransferFailed
from midstream.migration.transfers.base import Channel, Where
from midstream.migration.transfers.choice import unusable
from midstream.migration.transfers.device_range import DeviceRange
from midstream.migration.transfers.fused import gather, scatter
from midstream.migration.transfers.nccl_cuda import open_device
from midstream.migration.transfers.pair_store import PairStore
from midstream.migration.transfers.paired import TARGET, PairedTransfer
from midstream.migration.transfers.shm_memory import Region
from midstream.migration.transfers.slots import Slot

CONNECT_S = 10.0
"""A communicator takes parts of a second to make, on some machines seconds."""
POLL_S = 0.0001
ID_KEY = "nccl id"


class Mark(Protocol):
    """A place in a stream."""

    def is_reached(self) -> bool:
        """Whether everything before it was done. Raises `RuntimeError` if something failed."""
        ...


class DeviceStream(Protocol):
    """Work of a device, done one after the other."""

    def run(self, work: Callable[[], None]) -> None:
        """Have tensor operations done; may return before they are."""
        ...

    def mark(self) -> Mark: ...


class Communicator(Protocol):
    """Two ranks. Every call raises `RuntimeError` when it is broken."""

    def send(self, memory: Any, stream: Any) -> None:
        """Have a tensor sent on a stream of its device."""
        ...

    def receive(self, memory: Any, stream: Any) -> None:
        """Have a tensor filled, in the order of the other's sends."""
        ...

    def check(self) -> None:
        """Raise what went wrong since."""
        ...

    def abort(self) -> None:
        """End it, and what waits on it in any stream; called once."""
        ...


class Device(Protocol):
    """A device and its library of communication."""

    version: str
    """Ranks of different ones do not understand each other."""

    def memory(self, size: int) -> Any:
        """A flat tensor of bytes."""
        ...

    def stream(self) -> Any: ...

    def new_id(self) -> bytes:
        """What two ranks must know to meet; for one communicator."""
        ...

    def communicator(self, unique_id: bytes, rank: int, deadline_s: float) -> Communicator:
        """Meet the other. Raises `RuntimeError`, also after the deadline."""
        ...


class NcclTransfer(PairedTransfer):
    """One process's nccl endpoint. Where it cannot work it offers nothing but the reason."""

    name = "nccl"
    connect_s = CONNECT_S
    is_on_device = True

    def __init__(
        self,
        where: Where,
        regions: Sequence[Region] = (),
        opening: Callable[[str | None], Device] = open_device,
    ) -> None:
        """`opening`: opens `where.kv_device`, or raises `BadInput`."""
        super().__init__(where)
        self._device: Device | None = None
        try:
            self._device = opening(where.kv_device)
            self._offer = f"{self.name}@{self._device.version}"
        except BadInput as error:
            self._offer = unusable(self.name, str(error))

    @property
    def offer(self) -> str:
        """The name and the library's version, or why there is none."""
        return self._offer

    async def start(self) -> str:
        """Listen, if it can work here; the address is empty if it cannot."""
        return await super().start() if self._device is not None else ""

    async def open(self, address: str, handle: str) -> Channel:
        """See `Transfer.open`."""
        if self._device is None:
            raise TransferFailed(f"not usable here: {self._offer}")
        return await super().open(address, handle)

    def _memory(self, size: int) -> Any:
        assert self._device is not None
        return self._device.memory(size)

    def _group(self, store: PairStore, rank: int) -> NcclGroup:
        assert self._device is not None
        if rank == TARGET:
            store.set(ID_KEY, self._device.new_id())
        met = self._device.communicator(store.get(ID_KEY), rank, self.connect_s)
        group = NcclGroup(self._device, met, self.where.stall_s)
        try:
            group.connect(self._device.memory(1), rank)
        except RuntimeError:
            group.close()
            raise
        return group


class NcclGroup:
    """`paired.Group` over a communicator.

    Copies have a stream of their own: behind a receive on the same stream they would wait for whatever comes next, and
    could write after they were told not to.
    """

    def __init__(self, device: Device, communicator: Communicator, stall_s: float) -> None:
        self._device = device
        self._communicator = communicator
        self._stall_s = stall_s
        self._passing, self._copying = device.stream(), device.stream()
        self._issuer = ThreadPoolExecutor(1, thread_name_prefix="midstream nccl")
        self._is_over = False
        self._ending = threading.Lock()

    def connect(self, byte: Any, rank: int) -> None:
        """Pass a byte. The first message connects the ranks, which takes both: later ones can be sent to one that does
        not expect them yet. Raises `RuntimeError`."""
        if rank == TARGET:
            self.settle(self._receive(byte), lambda: True)
        else:
            self._communicator.send(byte, self._passing)

    def is_direct(self, _: int) -> bool:
        """See `paired.Group`."""
        return False

    def send(self, slot: Slot[Any] | None, views: Sequence[DeviceRange]) -> object:
        """See `paired.Group`."""
        buffer = _in_slot(slot, views)
        self._copy(lambda: gather(buffer, views))
        self._communicator.send(buffer, self._passing)
        return buffer

    def receive(self, slot: Slot[Any] | None, views: Sequence[DeviceRange]) -> NcclWork:
        """See `paired.Group`."""
        return NcclWork(self, self._issuer.submit(self._receive, _in_slot(slot, views)))

    def _receive(self, buffer: Any) -> Mark:
        self._communicator.receive(buffer, self._passing)
        mark: Mark = self._passing.mark()
        return mark

    def store(self, slot: Slot[Any] | None, views: Sequence[DeviceRange], may_go_on: Callable[[], bool]) -> bool:
        """See `paired.Group`."""
        if not may_go_on():
            return False
        buffer = _in_slot(slot, views)
        self._copy(lambda: scatter(buffer, views))
        return True

    def checksum(self, views: Sequence[DeviceRange], indexes: bytes) -> int:
        """See `paired.Group`."""
        buffer = self._device.memory(len(views) * views[0].length)
        on_host: list[Any] = []

        def fetch() -> None:
            gather(buffer, views)
            on_host.append(buffer.cpu())

        self._copy(fetch)
        return zlib.crc32(on_host[0].numpy(), zlib.crc32(indexes))

    def _copy(self, work: Callable[[], None]) -> None:
        self._copying.run(work)
        self.settle(self._copying.mark(), lambda: True)

    def settle(self, mark: Mark, may_go_on: Callable[[], bool]) -> None:
        """Return when a mark is reached. Otherwise abort, so that nothing is written any more, and raise
        `RuntimeError`: the communicator broke, nobody wants it any more, or the deadline has passed."""
        until_s = time.monotonic() + self._stall_s
        try:
            while not mark.is_reached():
                self._check(may_go_on, until_s)
                time.sleep(POLL_S)
        except RuntimeError:
            self.abort()
            raise
        if self._is_over:
            raise RuntimeError("aborted")  # which lets marks be reached, too

    def _check(self, may_go_on: Callable[[], bool], until_s: float) -> None:
        if self._is_over or not may_go_on():
            raise RuntimeError("not wanted any more")
        if time.monotonic() > until_s:
            raise RuntimeError(f"no progress for {self._stall_s} s")
        self._communicator.check()

    def abort(self) -> None:
        """End the communicator; idempotent. Returns when it has ended."""
        with self._ending:
            if not self._is_over:
                self._is_over = True
                self._communicator.abort()

    def close(self) -> None:
        """See `paired.Group`."""
        self.abort()
        self._issuer.shutdown(wait=False)


class NcclWork:
    """`paired.Work` of a receive that is issued in its turn."""

    def __init__(self, group: NcclGroup, issued: Future[Mark]) -> None:
        self._group = group
        self._issued = issued

    def wait(self, may_go_on: Callable[[], bool]) -> None:
        """See `paired.Work`."""
        try:
            mark = self._issued.result()
        except RuntimeError:
            self._group.abort()
            raise
        self._group.settle(mark, may_go_on)


def _in_slot(slot: Slot[Any] | None, views: Sequence[DeviceRange]) -> Any:
    assert slot is not None
    return slot.memory[slot.start : slot.start + len(views) * views[0].length]
