"""The transfer of the simulation: copies inside one process, in virtual time, over a `MemoryNetwork` and its faults."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from midstream.control.errors import CannotConnect, TransferFailed
from midstream.control.ids import Node
from midstream.migration.transfers.base import CopyReport, Sink
from midstream.migration.wires.memory import MemoryNetwork

CONNECT_S = 1.0
DETECT_S = 1.0
"""How long it takes to notice that a peer is cut off; a dead one is told of at once."""
STEPS_MAX = 8
"""Points in time at which one send can be torn."""


class MemoryTransfer:
    """One node's endpoint. Its address is its node and incarnation, so a next life is another address.

    A copy takes `latency_ms` + bytes / `bytes_per_ms`, longer on slow nodes. It really writes as it goes: a cut,
    a crash or a forgotten handle leaves blocks half written behind, as a real one would.
    """

    name = offer = "memory"

    def __init__(
        self, network: MemoryNetwork, node: Node, *, latency_ms: float = 0.2, bytes_per_ms: float = 1_000_000.0
    ) -> None:
        self.network = network
        self.node = node
        self._latency_s = latency_ms / 1000
        self._bytes_per_s = bytes_per_ms * 1000
        self._sinks: dict[str, Sink] = {}
        self._channels: set[MemoryChannel] = set()

    async def start(self) -> str:
        """Be reachable; return our address."""
        address = f"{self.node.name}#{self.node.incarnation}"
        self.network.transfers[address] = self
        return address

    def expect(self, handle: str, sink: Sink) -> None:
        """Let the holder of `handle` write through `sink` from now on."""
        self._sinks[handle] = sink

    async def forget(self, handle: str) -> None:
        """Refuse the handle from now on. Writes happen between awaits only, so none is in progress."""
        self._sinks.pop(handle, None)

    async def open(self, address: str, handle: str) -> MemoryChannel:
        """Connect to a reservation. Raises `TransferFailed`, `CannotConnect`."""
        await asyncio.sleep(self._latency_s)
        target = self.network.transfers.get(address)
        if target is None or not self.reaches(target):
            await asyncio.sleep(CONNECT_S)
            raise CannotConnect(f"no answer from {address}")
        channel = MemoryChannel(self, target, handle, target.sink(handle))
        self._channels.add(channel)
        return channel

    async def stop(self) -> None:
        """Close all channels and forget all handles."""
        for channel in self._channels:
            channel.is_closed = True
        self._channels.clear()
        self._sinks.clear()
        self.network.transfers = {a: t for a, t in self.network.transfers.items() if t is not self}

    def discard(self, channel: MemoryChannel) -> None:
        """A channel was closed."""
        self._channels.discard(channel)

    def reaches(self, target: MemoryTransfer) -> bool:
        """Whether both ends are alive and bytes pass between them right now."""
        is_there = target in self.network.transfers.values()
        return (
            is_there
            and not self.network.is_crashed(self.node)
            and not self.network.is_crashed(target.node)
            and not self.is_cut_from(target)
        )

    def is_cut_from(self, target: MemoryTransfer) -> bool:
        """Whether nothing passes between the two, which only silence tells."""
        return self.network.link(self.node.name, target.node.name).is_cut

    def sink(self, handle: str) -> Sink:
        """What a handle opens. Raises `TransferFailed` for one that is not known (any more)."""
        sink = self._sinks.get(handle)
        if sink is None:
            raise TransferFailed("refused: the target does not know this handle (any more)")
        return sink

    def duration_s(self, copied_bytes: int, target: MemoryTransfer) -> float:
        """How long so many bytes take right now."""
        slow = self.network.link(self.node.name, target.node.name).slow
        return slow * copied_bytes / self._bytes_per_s

    @property
    def latency_s(self) -> float:
        """One way between two nodes."""
        return self._latency_s


class MemoryChannel:
    """An open way from one source to one reservation."""

    def __init__(self, source: MemoryTransfer, target: MemoryTransfer, handle: str, sink: Sink) -> None:
        self._source = source
        self._target = target
        self._handle = handle
        self._sink = sink
        self._lock = asyncio.Lock()
        self.is_closed = False

    async def send(self, blocks: Sequence[tuple[int, memoryview]], *, checksum: bool = False) -> CopyReport:
        """Copy blocks and return when all are stored. See `Channel.send`."""
        async with self._lock:
            loop = asyncio.get_running_loop()
            started_s = loop.time()
            try:
                is_clean = await self._copy(blocks)
                if checksum and not is_clean:
                    raise TransferFailed("refused: a checksum did not match")
            except BaseException:
                await self.close()
                raise
            copied_bytes = sum(view.nbytes for _, view in blocks)
            return CopyReport(
                blocks=len(blocks), copied_bytes=copied_bytes, duration_ms=(loop.time() - started_s) * 1000
            )

    async def _copy(self, blocks: Sequence[tuple[int, memoryview]]) -> bool:
        await self._check()
        is_clean = True
        step = max(1, -(-len(blocks) // STEPS_MAX))
        for start in range(0, len(blocks), step):
            part = blocks[start : start + step]
            self._write(*part[0], share=0.5)
            await asyncio.sleep(self._source.duration_s(sum(view.nbytes for _, view in part), self._target))
            await self._check()
            for index, view in part:
                self._write(index, view)
                is_clean &= not self._spoil(index)
        if blocks:
            await asyncio.sleep(2 * self._source.latency_s)
            await self._check()
        return is_clean

    async def _check(self) -> None:
        """Whether the copy may go on."""
        if self.is_closed:
            raise TransferFailed("the channel is closed")
        if not self._source.reaches(self._target):
            await asyncio.sleep(DETECT_S if self._source.is_cut_from(self._target) else self._source.latency_s)
            raise TransferFailed("the target died or is cut off")
        self._writable()

    def _writable(self) -> Sink:
        """The memory that our handle opened, as long as it does."""
        if self._target.sink(self._handle) is not self._sink:
            raise TransferFailed("refused: the handle now stands for another reservation")
        return self._sink

    def _write(self, index: int, view: memoryview, *, share: float = 1.0) -> None:
        """Write the first `share` of a block."""
        source = view.cast("B")
        place = self._place(index)
        if len(place) != len(source):
            raise TransferFailed("refused: blocks differ in length")
        count = int(len(source) * share)
        place[:count] = source[:count]

    def _place(self, index: int) -> memoryview:
        try:
            place: memoryview = self._writable()(index).cast("B")
            return place
        except IndexError:
            raise TransferFailed("refused: no such block in the reservation") from None

    def _spoil(self, index: int) -> bool:
        """Flip one bit of a stored block if the fault plan says so."""
        network = self._source.network
        probability = network.faults.corruption(self._source.node.name, network.now_ms())
        if not probability or network.rng.random() >= probability:
            return False
        place = self._place(index)
        place[network.rng.randrange(len(place))] ^= 1 << network.rng.randrange(8)
        network.counters["corrupted"] += 1
        return True

    async def close(self) -> None:
        """Give up the way; idempotent."""
        self.is_closed = True
        self._source.discard(self)
