"""The transfer of simulated KV that is lengths alone: copies take their time on links that have a bandwidth, and no
byte is moved. So there is nothing that a checksum could find."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from midstream.control.errors import CannotConnect, TransferFailed
from midstream.control.ids import Node
from midstream.migration.transfers.base import CopyReport, Sink

PARTS = 8
"""Parts of one send that take turns on the links with other sends."""


class Links:
    """Every node's two directions: until when each is taken. Seconds of the event loop's time.

    `is_open` says whether both nodes live and bytes pass between them right now.
    """

    def __init__(
        self, bytes_per_s: float, latency_s: float, is_open: Callable[[Node, Node], bool] = lambda source, target: True
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.is_open = is_open
        self.endpoints: dict[str, PacedTransfer] = {}
        self._out: dict[str, float] = {}
        self._in: dict[str, float] = {}

    def take(self, source: str, target: str, copied_bytes: int, now: float) -> float:
        """Put bytes on their way behind those that are on either link already; when they have passed."""
        start = max(now, self._out.get(source, 0.0), self._in.get(target, 0.0))
        end = start + copied_bytes / self.bytes_per_s
        self._out[source] = self._in[target] = end
        return end


class PacedTransfer:
    """`Transfer` in virtual time. Its address is its node and incarnation, so a next life is another address."""

    name = "paced"

    def __init__(self, links: Links, node: Node) -> None:
        self.node = node
        self._links = links
        self._sinks: dict[str, Sink] = {}

    @property
    def offer(self) -> str:
        """See `Transfer.offer`."""
        return self.name

    async def start(self) -> str:
        """Be reachable."""
        self._links.endpoints[self._address] = self
        return self._address

    def expect(self, handle: str, sink: Sink) -> None:
        """See `Transfer.expect`."""
        self._sinks[handle] = sink

    async def forget(self, handle: str) -> None:
        """See `Transfer.forget`."""
        self._sinks.pop(handle, None)

    async def open(self, address: str, handle: str) -> PacedChannel:
        """See `Transfer.open`."""
        await asyncio.sleep(self._links.latency_s)
        target = self._links.endpoints.get(address)
        if target is None or not self._links.is_open(self.node, target.node):
            raise CannotConnect(f"no answer from {address}")
        return PacedChannel(self._links, self.node, target, handle)

    def sink(self, handle: str) -> Sink:
        """What a handle opens. Raises `TransferFailed`."""
        sink = self._sinks.get(handle)
        if sink is None:
            raise TransferFailed("refused: the target does not know this handle (any more)")
        return sink

    async def stop(self) -> None:
        """Be gone."""
        self._links.endpoints.pop(self._address, None)
        self._sinks.clear()

    @property
    def _address(self) -> str:
        return f"{self.node.name}#{self.node.incarnation}"


class PacedChannel:
    """An open way from one source to one reservation."""

    def __init__(self, links: Links, source: Node, target: PacedTransfer, handle: str) -> None:
        self._links = links
        self._source = source
        self._target = target
        self._handle = handle
        self._is_closed = False

    async def send(self, blocks: Sequence[tuple[int, memoryview]], *, checksum: bool = False) -> CopyReport:
        """See `Channel.send`. Every block must have its place at the target, from beginning to end."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        part = max(1, -(-len(blocks) // PARTS))
        for start in range(0, len(blocks), part):
            copied_bytes = sum(view.nbytes for _, view in blocks[start : start + part])
            until = self._links.take(self._source.name, self._target.node.name, copied_bytes, loop.time())
            await asyncio.sleep(until - loop.time())
            self._check(blocks[start : start + part])
        await asyncio.sleep(2 * self._links.latency_s)
        self._check(())
        return CopyReport(
            blocks=len(blocks),
            copied_bytes=sum(view.nbytes for _, view in blocks),
            duration_ms=(loop.time() - began) * 1000,
        )

    def _check(self, blocks: Sequence[tuple[int, memoryview]]) -> None:
        if self._is_closed:
            raise TransferFailed("the channel is closed")
        if not self._links.is_open(self._source, self._target.node):
            raise TransferFailed("the target died or is cut off")
        sink = self._target.sink(self._handle)
        try:
            for index, view in blocks:
                if sink(index).nbytes != view.nbytes:
                    raise TransferFailed("refused: blocks differ in length")
        except IndexError:
            raise TransferFailed("refused: no such block in the reservation") from None

    async def close(self) -> None:
        """Give up the way; idempotent."""
        self._is_closed = True
