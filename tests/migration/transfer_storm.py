"""Many moves between a few endpoints, of which some are cancelled, forgotten or lose their peer; then all is counted.

python -m tests.migration.transfer_storm --moves 1000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import random
import signal
import sys
import textwrap
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from midstream.control.errors import TransferFailed
from midstream.migration.transfers.base import Transfer, Where
from midstream.migration.transfers.registry import make_transfer
from midstream.migration.transfers.shm_memory import Region
from midstream.migration.transfers.slots import Slots

SECRET = b"a secret of the storm"
HERE = Where(bind_host="127.0.0.1", secret=SECRET)
BACKENDS = ("shm", "rpc", "gloo", "gloo-direct", "nccl-on-cpu")
NEED_TORCH = ("gloo", "gloo-direct", "nccl-on-cpu")
BLOCK_BYTES = 65_536
BLOCKS = 64
ENDPOINTS = 4
AT_ONCE = 32
KILL_EVERY = 100
SETTLE_S = 15.0


class Left(NamedTuple):
    """What a process has open."""

    files: int
    segments: int


def left() -> Left:
    """Open files and sockets, and mapped regions, right now."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return Left(len(list(Path("/proc/self/fd").iterdir())), maps.count("memfd:midstream-kv"))


def make_kind(backend: str, regions: Sequence[Region] = ()) -> Transfer:
    """An endpoint of a backend, or of one that only tests make so."""
    if backend == "nccl-on-cpu":
        from tests.migration.nccl_on_cpu import OnCpu

        return OnCpu(HERE)
    if backend == "gloo-direct":
        return make_transfer("gloo", HERE, direct_bytes=1)
    return make_transfer(backend, HERE, regions)


class Node:
    """One endpoint and its memory."""

    def __init__(self, backend: str, seed: int) -> None:
        self.region = Region(BLOCKS * BLOCK_BYTES)
        self.region.view[:] = random.Random(seed).randbytes(len(self.region.view))
        self.transfer = make_kind(backend, [self.region])
        self.address = ""

    def block(self, index: int) -> memoryview:
        return self.region.view[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]


class Storm:
    """All of it, on one backend."""

    def __init__(self, backend: str, seed: int, kill_every: int) -> None:
        self.backend = backend
        self.kill_every = kill_every
        self.rng = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.nodes: list[Node] = []
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def run(self, moves: int) -> Counter[str]:
        """The moves, up to `AT_ONCE` at a time; how they ended."""
        self.nodes = [Node(self.backend, number) for number in range(ENDPOINTS)]
        for node in self.nodes:
            node.address = await node.transfer.start()
        async with asyncio.TaskGroup() as group:
            for number in range(moves):
                await self._turns.acquire()
                group.create_task(self._one(number)).add_done_callback(lambda _: self._turns.release())
        for node in self.nodes:
            for pool in (getattr(node.transfer, name, None) for name in ("staging", "outgoing", "incoming")):
                assert pool is None or await given_back(pool), "a slot was not given back"
            await node.transfer.stop()
        return self.ends

    async def _one(self, number: int) -> None:
        source, target = self.rng.sample(self.nodes, 2)
        if number % self.kill_every == self.kill_every - 1:
            await self._to_one_that_dies(source)
            return
        arrived = bytearray(BLOCKS * BLOCK_BYTES)
        handle = f"move {number}"
        target.transfer.expect(handle, lambda i: memoryview(arrived)[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])
        move = asyncio.create_task(self._move(source, target.address, handle))
        fate = self.rng.choice(("left alone", "left alone", "cancelled", "forgotten"))
        if fate != "left alone":
            await asyncio.sleep(self.rng.random() * 0.02)
        if fate == "cancelled":
            move.cancel()
        if fate == "forgotten":
            await target.transfer.forget(handle)
        await asyncio.wait({move})
        await target.transfer.forget(handle)
        arrived.append(0)  # raises BufferError while anybody still holds the memory
        ended = "cancelled" if move.cancelled() else "moved" if move.exception() is None else "failed"
        assert fate != "left alone" or ended == "moved", move.exception()
        assert ended != "moved" or arrived[:-1] == source.region.view, "other bytes arrived"
        self.ends[ended] += 1

    async def _move(self, source: Node, address: str, handle: str) -> None:
        channel = await source.transfer.open(address, handle)
        try:
            order = self.rng.sample(range(BLOCKS), BLOCKS)
            await channel.send([(index, source.block(index)) for index in order[:20]])
            await channel.send([(index, source.block(index)) for index in order[20:]], checksum=True)
        finally:
            await channel.close()

    async def _to_one_that_dies(self, source: Node) -> None:
        async with peer(self.backend) as (process, address):
            channel = await source.transfer.open(address, "h")
            endless = [(index % BLOCKS, source.block(index % BLOCKS)) for index in range(20_000)]
            send = asyncio.create_task(channel.send(endless))
            await asyncio.sleep(self.rng.random() * 0.05)
            os.kill(process.pid, self.rng.choice((signal.SIGKILL, signal.SIGSTOP)))
            await asyncio.wait({send})
            assert isinstance(send.exception(), TransferFailed)
            await channel.close()
        self.ends["killed"] += 1


PEER = textwrap.dedent(
    """
    import asyncio, sys
    from tests.migration.transfer_storm import make_kind

    async def main(backend, blocks, block_bytes):
        memory = memoryview(bytearray(blocks * block_bytes))
        transfer = make_kind(backend)
        transfer.expect("h", lambda i: memory[i * block_bytes:(i + 1) * block_bytes])
        print(await transfer.start(), flush=True)
        await asyncio.Event().wait()

    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    """
)


@contextlib.asynccontextmanager
async def peer(backend: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Another process that waits to be written to."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PEER, backend, str(BLOCKS), str(BLOCK_BYTES), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):  # it is dead and has not been waited for
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()


async def storm(backend: str, moves: int, *, kill_every: int = KILL_EVERY, seed: int = 1) -> tuple[Counter[str], Left]:
    """A storm after a small one, which fills what is kept on purpose: how moves ended, and what is left over."""
    await Storm(backend, seed, kill_every).run(8)
    before = await settled_left(None)
    ends = await Storm(backend, seed + 1, kill_every).run(moves)
    after = await settled_left(before)
    return ends, Left(after.files - before.files, after.segments - before.segments)


async def given_back(pool: Slots[Any]) -> bool:
    """Whether all slots are there again, once communicators that broke had time to end."""
    for _ in range(int(SETTLE_S / 0.2)):
        if pool.taken == 0:
            return True
        await asyncio.sleep(0.2)
    return False


async def settled_left(goal: Left | None) -> Left:
    """What is left, once threads that hold something until their deadline had time to let go."""
    seen = left()
    for _ in range(int(SETTLE_S / 0.2)):
        await asyncio.sleep(0.2)
        last, seen = seen, left()
        if seen == last if goal is None else seen <= goal:
            break
    return seen


def main() -> int:
    """Print a line per backend; 0 if nothing was left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=1_000)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    options = parser.parse_args()
    worst = Left(0, 0)
    for backend in options.backends.split(","):
        ends, more = asyncio.run(storm(backend, options.moves))
        worst = max(worst, more)
        print(f"{backend}: {dict(ends)}; left over: {more.files} files and sockets, {more.segments} segments")  # noqa: T201
    return int(worst > Left(0, 0))


if __name__ == "__main__":
    sys.exit(main())
