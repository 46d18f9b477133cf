"""A transfer for tests around a real one: it can be told to wait, to fail, or to send wrong bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from midstream.control.errors import TransferFailed
from midstream.migration.transfers.base import Channel, CopyReport, Sink, Transfer


class Link:
    """One engine's transfer, with a hand in it."""

    def __init__(self, inner: Transfer) -> None:
        self.inner = inner
        self.name = inner.name
        self.channels_open = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.sending = asyncio.Event()
        """Set when a send has come to the gate."""
        self.flip: tuple[int, int] | None = None
        """(block index, byte) to alter on the way."""
        self.swaps = False
        """Exchange the first two blocks of each send."""
        self.is_broken = False

    @property
    def offer(self) -> str:
        return self.inner.offer

    async def start(self) -> str:
        return await self.inner.start()

    def expect(self, handle: str, sink: Sink) -> None:
        self.inner.expect(handle, sink)

    async def forget(self, handle: str) -> None:
        await self.inner.forget(handle)

    async def open(self, address: str, handle: str) -> LinkChannel:
        channel = LinkChannel(self, await self.inner.open(address, handle))
        self.channels_open += 1
        return channel

    async def stop(self) -> None:
        await self.inner.stop()


class LinkChannel:
    def __init__(self, link: Link, inner: Channel) -> None:
        self.link, self.inner = link, inner
        self.is_open = True

    async def send(self, blocks: Sequence[tuple[int, memoryview]], *, checksum: bool = False) -> CopyReport:
        self.link.sending.set()
        await self.link.gate.wait()
        if self.link.is_broken:
            raise TransferFailed("broken for the test")
        return await self.inner.send(self.spoilt(list(blocks)), checksum=checksum)

    async def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.link.channels_open -= 1
        await self.inner.close()

    def spoilt(self, blocks: list[tuple[int, memoryview]]) -> list[tuple[int, memoryview]]:
        if self.link.swaps and len(blocks) > 1:
            (i, first), (j, second) = blocks[:2]
            blocks[:2] = [(i, second), (j, first)]
        if self.link.flip is not None:
            blocks = [(i, self.altered(i, block)) for i, block in blocks]
        return blocks

    def altered(self, index: int, block: memoryview) -> memoryview:
        assert self.link.flip is not None
        if index != self.link.flip[0]:
            return block
        changed = bytearray(block)
        changed[self.link.flip[1]] ^= 1
        return memoryview(changed)
