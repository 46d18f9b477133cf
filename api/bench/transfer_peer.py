"""The other process of `bench transfer`: the target's memory and endpoints, driven by lines of JSON on stdin."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from midstream.api.bench.lag import LagMeter
from midstream.api.bench.report import rank
from midstream.api.bench.transfer_memory import LAYOUTS, Paged
from midstream.api.bench.transfer_raw import TcpSink, copy_s
from midstream.migration.transfers.base import Transfer, Where
from midstream.migration.transfers.registry import make_transfers
from midstream.migration.transfers.shm import ShmTransfer

SEED = 2
START_S = 30.0


class Peer:
    """What it has; every method `do_…` is a command."""

    def __init__(self) -> None:
        self._transfers: Mapping[str, Transfer] = {}
        self._lag = LagMeter()

    async def do_begin(self, *, layout: str, size: int, secret: str, backends: list[str]) -> dict[str, str]:
        """Make memory and endpoints; say the addresses."""
        self._memory = Paged(LAYOUTS[layout], size, SEED)
        self._memory.fill(0)
        self._plain = np.full(size, 1, np.uint8)
        where = Where(bind_host="127.0.0.1", secret=bytes.fromhex(secret))
        self._transfers = make_transfers(backends, where, [self._memory.region])
        addresses = {name: await transfer.start() for name, transfer in self._transfers.items()}
        await self._copier_there()
        return addresses

    async def _copier_there(self) -> None:
        """It takes a while to start, in which copies are not what they will be."""
        shm = self._transfers.get("shm")
        async with asyncio.timeout(START_S):
            while isinstance(shm, ShmTransfer) and not shm.copier.is_ready:
                await asyncio.sleep(0.01)

    async def do_end(self) -> None:
        """Let go of endpoints and memory."""
        for transfer in self._transfers.values():
            await transfer.stop()
        self._transfers = {}

    async def do_expect(self, *, backend: str, handle: str) -> None:
        """Open the memory to a handle."""
        self._transfers[backend].expect(handle, self._memory.piece)

    async def do_forget(self, *, backend: str, handle: str) -> None:
        """Close it."""
        await self._transfers[backend].forget(handle)

    async def do_digest(self, *, blocks: int) -> int:
        """What has arrived."""
        return self._memory.digest(blocks)

    async def do_copy(self, *, size: int) -> float:
        """The raw medium of shm: seconds of a plain copy."""
        return copy_s(self._memory.array, self._plain, size)

    async def do_tcp(self) -> int:
        """The raw medium of rpc: a port whose bytes go to memory."""
        return TcpSink(self._memory.array).port

    async def do_gloo(self, *, port: int) -> None:
        """The raw medium of gloo: the second of two ranks, in a thread."""
        from midstream.api.bench.transfer_gloo import serve_raw

        serve_raw(port, self._memory.array)

    async def do_watch(self) -> None:
        """Begin to watch our event loop."""
        self._lag.start()

    async def do_lag(self) -> float | None:
        """The p99 of its lag since, milliseconds."""
        return rank(await self._lag.stop(), 0.99)


async def serve(peer: Peer) -> None:
    """Command by command, until stdin ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        order: dict[str, Any] = json.loads(line)
        command: Callable[..., Awaitable[Any]] = getattr(peer, f"do_{order.pop('do')}")
        sys.stdout.write(json.dumps(await command(**order)) + "\n")
        sys.stdout.flush()
    await peer.do_end()


if __name__ == "__main__":
    asyncio.run(serve(Peer()))
