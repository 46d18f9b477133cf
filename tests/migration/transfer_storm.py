"""Many moves between a few endpoints, of which some are cancelled, forgotten or lose their peer; then all is counted.

python -m tests.migration.transfer_storm --moves 1000 --backends shm,rpc,gloo      # or: make storm

A backend that is through is not run again when the command is given again after an interruption.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import signal
import sys
import textwrap
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import structlog

from midstream.control.errors import TransferFailed
from midstream.migration.transfers.base import Where
from midstream.migration.transfers.endpoint import Endpoint
from midstream.migration.transfers.registry import make_transfer
from midstream.migration.transfers.shm_memory import Region
from midstream.migration.transfers.slots import Slots

SECRET = b"a secret of the storm"
HERE = Where(bind_host="127.0.0.1", secret=SECRET)
PATIENT = Where(bind_host="127.0.0.1", secret=SECRET, stall_s=5.0)
"""A busy machine is no reason for a move to fail: what is left over is what counts."""
BACKENDS = ("shm", "rpc", "gloo", "gloo-direct", "nccl-on-cpu")
NEED_TORCH = ("gloo", "gloo-direct", "nccl-on-cpu")
BLOCK_BYTES = 65_536
BLOCKS = 64
ENDPOINTS = 4
AT_ONCE = 32
KILL_EVERY = 100
SETTLE_S = 15.0
LANDINGS = 4
"""Targets of an endpoint that lie in its region; others lie in memory of their own."""
STATE = Path(".midstream/transfer_storm.json")


class Left(NamedTuple):
    """What a process has open."""

    files: int
    segments: int
    processes: int


def left() -> Left:
    """Open files and sockets, mapped regions, and children, right now."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    children = sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))
    return Left(len(list(Path("/proc/self/fd").iterdir())), maps.count("memfd:midstream-kv"), children)


def is_equal(one: memoryview, other: memoryview) -> bool:
    """Without taking the event loop's time: comparing views byte by byte takes 40 ms."""
    return bool((np.frombuffer(one, np.uint64) == np.frombuffer(other, np.uint64)).all())


class Landing:
    """Where one move's blocks arrive."""

    def __init__(self, view: memoryview, own: bytearray | None) -> None:
        self.view = view
        self._own = own

    def block(self, index: int) -> memoryview:
        return self.view[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]

    def clear(self) -> None:
        """Raises `BufferError` while anybody still holds memory of its own."""
        np.frombuffer(self.view, np.uint64)[:] = 0
        if self._own is not None:
            self.view.release()
            self._own.append(0)


def make_kind(backend: str, where: Where = HERE, regions: Sequence[Region] = ()) -> Endpoint:
    """An endpoint of a backend, or of one that only tests make so."""
    if backend == "nccl-on-cpu":
        from tests.migration.nccl_on_cpu import OnCpu

        return OnCpu(where)
    if backend == "gloo-direct":
        return make_transfer("gloo", where, direct_bytes=1)
    return make_transfer(backend, where, regions)


class Node:
    """One endpoint and its memory."""

    def __init__(self, backend: str, seed: int) -> None:
        size = BLOCKS * BLOCK_BYTES
        self.region = Region((1 + LANDINGS) * size)
        self.content = self.region.view[:size]
        self.content[:] = random.Random(seed).randbytes(size)
        self.free = [self.region.view[(1 + number) * size : (2 + number) * size] for number in range(LANDINGS)]
        self.transfer = make_kind(backend, PATIENT, [self.region])
        self.transfer.connect_s = PATIENT.stall_s
        self.address = ""

    @contextlib.contextmanager
    def landing(self) -> Iterator[Landing]:
        own = None if self.free else bytearray(BLOCKS * BLOCK_BYTES)
        landing = Landing(self.free.pop() if own is None else memoryview(own), own)
        yield landing
        landing.clear()
        if own is None:
            self.free.append(landing.view)

    def block(self, index: int) -> memoryview:
        return self.content[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]


class Storm:
    """All of it, on one backend."""

    def __init__(self, backend: str, seed: int, kill_every: int, progress: Callable[[int], None]) -> None:
        self.backend = backend
        self.progress = progress
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
                group.create_task(self._one(number)).add_done_callback(lambda _: self._ended())
        for node in self.nodes:
            assert len(node.free) == LANDINGS
            assert not getattr(node.transfer, "_reservations", None), "a reservation was not given back"
            for pool in (getattr(node.transfer, name, None) for name in ("staging", "outgoing", "incoming")):
                assert pool is None or await given_back(pool), "a slot was not given back"
            await node.transfer.stop()
        return self.ends

    def _ended(self) -> None:
        self._turns.release()
        self.progress(self.ends.total())

    async def _one(self, number: int) -> None:
        source, target = self.rng.sample(self.nodes, 2)
        if number % self.kill_every == self.kill_every - 1:
            await self._to_one_that_dies(source)
            return
        with target.landing() as landing:
            await self._fated(source, target, landing, f"move {number}")

    async def _fated(self, source: Node, target: Node, landing: Landing, handle: str) -> None:
        target.transfer.expect(handle, landing.block)
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
        ended = "cancelled" if move.cancelled() else "moved" if move.exception() is None else "failed"
        assert fate != "left alone" or ended == "moved", move.exception()
        assert ended != "moved" or is_equal(landing.view, source.content), "other bytes arrived"
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
    from midstream.migration.transfers.shm_memory import Region
    from tests.migration.transfer_storm import HERE, make_kind

    async def main(backend, blocks, block_bytes):
        region = Region(blocks * block_bytes)
        memory = region.view
        transfer = make_kind(backend, HERE, [region])
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


async def storm(
    backend: str,
    moves: int,
    *,
    kill_every: int = KILL_EVERY,
    seed: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[Counter[str], Left]:
    """A storm after a small one, which fills what is kept on purpose: how moves ended, and what is left over."""
    await Storm(backend, seed, kill_every, lambda _: None).run(8)
    before = await settled_left(None)
    ends = await Storm(backend, seed + 1, kill_every, progress).run(moves)
    after = await settled_left(before)
    return ends, Left(*(now - then for now, then in zip(after, before, strict=True)))


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
        if seen == last if goal is None else all(now <= then for now, then in zip(seen, goal, strict=True)):
            break
    return seen


def main() -> int:
    """Print a line per backend; 1 if anything was left over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=1_000)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    done: dict[str, str] = {}
    order = {"moves": options.moves, "seed": options.seed}
    if STATE.exists() and (was := json.loads(STATE.read_text(encoding="utf-8")))["order"] == order:
        done = was["done"]
    is_clean = True
    for backend in options.backends.split(","):
        if backend in done:
            say(f"{done[backend]} (before the interruption)")
            continue
        ends, more = asyncio.run(
            storm(backend, options.moves, seed=options.seed, progress=lambda count, of=backend: show(of, count))
        )
        is_clean = is_clean and not any(more)
        done[backend] = f"{backend}: {summary(ends, more)}"
        say(done[backend])
        if not any(more):
            STATE.parent.mkdir(exist_ok=True)
            STATE.write_text(json.dumps({"order": order, "done": done}), encoding="utf-8")
    STATE.unlink(missing_ok=True)
    say("nothing was left over" if is_clean else "LEFT OVER: see above")
    return int(not is_clean)


def summary(ends: Counter[str], more: Left) -> str:
    """How the moves ended, and what is left of them."""
    how = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    over = f"{more.files} files and sockets, {more.segments} segments, {more.processes} processes"
    return f"{ends.total()} moves ({how}); left over: {over}"


def show(backend: str, count: int) -> None:
    """Progress, now and then."""
    if count % 100 == 0:
        print(f"{backend}: {count} moves ...", file=sys.stderr, flush=True)  # noqa: T201


def say(line: str) -> None:
    """A line of the result."""
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
