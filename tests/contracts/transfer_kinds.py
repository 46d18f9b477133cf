"""Transfers as the contract meets them, where a backend has more than one way."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.migration.transfers.base import Channel, CopyReport, Where
from midstream.migration.transfers.shm import ShmTransfer
from midstream.migration.transfers.shm_memory import Region

HERE = Where(bind_host="127.0.0.1", secret=b"a secret", stall_s=10.0)
"""Nobody hangs in the contract; a test machine that is busy may look as if."""
ARENA_BYTES = 1 << 28


class Mapped(ShmTransfer):
    """An shm endpoint whose blocks lie in memory that peers map, wherever the test has them."""

    def __init__(self) -> None:
        self._arena = Region(ARENA_BYTES)
        self._used = 0
        super().__init__(HERE, [self._arena])

    async def open(self, address: str, handle: str) -> Channel:
        return MappedChannel(self, await super().open(address, handle))

    def moved(self, view: memoryview) -> memoryview:
        start = self._used
        self._used += len(view)
        assert self._used <= ARENA_BYTES
        place = self._arena.view[start : self._used]
        place[:] = view
        return place


class MappedChannel:
    def __init__(self, transfer: Mapped, inner: Channel) -> None:
        self._transfer, self._inner = transfer, inner

    async def send(self, blocks: Sequence[tuple[int, memoryview]], *, checksum: bool = False) -> CopyReport:
        return await self._inner.send([(i, self._transfer.moved(view)) for i, view in blocks], checksum=checksum)

    async def close(self) -> None:
        await self._inner.close()
