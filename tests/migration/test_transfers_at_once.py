"""Many moves at once between a few instances, in pairs, chains and circles: all end, and none starves."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import statistics
from concurrent.futures import ThreadPoolExecutor

import pytest

from midstream.migration.transfers import rpc_socket
from midstream.migration.transfers.base import Channel, Where
from midstream.migration.transfers.endpoint import Endpoint
from midstream.migration.transfers.registry import make_transfers
from midstream.migration.transfers.shm_memory import Region
from midstream.migration.transfers.slots import SLOTS

INSTANCES = 4
MOVES = 32
BLOCK_BYTES = 65_536
BLOCKS = 160
SIZE = BLOCKS * BLOCK_BYTES
"""Three frames: eight moves out of each instance want three times the slots that there are."""
PATIENCE_S = 60.0
SLOWEST_TO_MEDIAN = 4.0
KINDS = ["shm", "shm-staged", "rpc", *(["gloo"] if importlib.util.find_spec("torch") is not None else [])]


class Instance:
    """An endpoint, what it sends, and where what it gets arrives."""

    def __init__(self, backend: str, seed: int, *, is_lent: bool) -> None:
        arriving = MOVES // INSTANCES
        if is_lent:
            self.region = Region((1 + arriving) * SIZE)
            memory = self.region.view
        else:
            memory = memoryview(bytearray((1 + arriving) * SIZE))
        self.content, *self.landings = (memory[start : start + SIZE] for start in range(0, len(memory), SIZE))
        self.content[:] = random.Random(seed).randbytes(SIZE)
        where = Where(bind_host="127.0.0.1", secret=b"a secret", stall_s=20.0)
        self.transfer: Endpoint = make_transfers([backend], where, [self.region] if is_lent else [])[backend]


class Move:
    """One of them."""

    def __init__(self, source: Instance, target: Instance, landing: memoryview, channel: Channel) -> None:
        self.source, self.target, self.landing, self.channel = source, target, landing, channel

    async def run(self) -> float:
        """Seconds from now until all has arrived."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self.channel.send([(i, _block(self.source.content, i)) for i in range(BLOCKS)])
        return loop.time() - began


def _block(memory: memoryview, index: int) -> memoryview:
    return memory[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]


async def _moves(instances: list[Instance]) -> list[Move]:
    """Both ways between neighbours, circles in both directions, and across."""
    addresses = [await instance.transfer.start() for instance in instances]
    moves = []
    for number in range(MOVES):
        of, step = number % INSTANCES, (1, 3, 2)[number // INSTANCES % 3]
        to = (of + step) % INSTANCES
        landing, handle = instances[to].landings.pop(), f"move {number}"
        instances[to].transfer.expect(handle, lambda i, landing=landing: _block(landing, i))
        channel = await instances[of].transfer.open(addresses[to], handle)
        moves.append(Move(instances[of], instances[to], landing, channel))
    return moves


async def _all_end(kind: str) -> list[float]:
    backend, is_lent = kind.partition("-")[0], kind == "shm"
    instances = [Instance(backend, seed, is_lent=is_lent) for seed in range(INSTANCES)]
    moves = await _moves(instances)
    async with asyncio.timeout(PATIENCE_S):
        took_s = await asyncio.gather(*(move.run() for move in moves))
    assert all(bytes(move.landing) == bytes(move.source.content) for move in moves)
    for instance in instances:
        for pool in (getattr(instance.transfer, name, None) for name in ("staging", "outgoing", "incoming")):
            assert pool is None or pool.taken == 0
        await instance.transfer.stop()
    return took_s


@pytest.mark.parametrize("kind", KINDS)
async def test_P15_moves_in_circles_all_end_and_none_starves(kind: str) -> None:
    assert 3 * MOVES // INSTANCES > SLOTS, "the pool would be large enough for all"
    took_s = await _all_end(kind)
    assert max(took_s) < SLOWEST_TO_MEDIAN * statistics.median(took_s)


async def test_P15_threads_that_send_never_keep_others_from_receiving(monkeypatch: pytest.MonkeyPatch) -> None:
    for pool in ("_senders", "_receivers"):
        monkeypatch.setattr(rpc_socket, pool, ThreadPoolExecutor(2))
    await _all_end("rpc")
