"""How much an engine's decoding slows while its KV streams out: two simulated engines, real bytes, two processes.

Steps are simulated, so a GPU is never in the way: what is seen is what copies take from the engine's process.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from midstream.instance.engines.base import Reserved, Route
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.engine import SimEngine
from midstream.migration.protocol.messages import RequestSpec, Sampling
from midstream.migration.transfers.base import Where
from midstream.migration.transfers.registry import make_transfers
from midstream.migration.transfers.shm_memory import Region

RUNS: Final = 4
MOVING: Final = 2
PROMPT_TOKENS: Final = 1_024
OUTPUT_TOKENS: Final = 4_096
BYTES_PER_TOKEN: Final = 32 * 1024
BLOCK_TOKENS: Final = 16
BLOCKS_EACH: Final = (PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_TOKENS
WINDOWS: Final = 8
"""Of either kind, in turn."""
WINDOW_S: Final = 1.0
START_S: Final = 60.0
PEER: Final = ("-m", "midstream.api.bench.transfer_decode")


class Slowdown(NamedTuple):
    """Steps while KV streams out over steps while none does."""

    median: float
    mean: float
    gib_s: float
    """How fast it streamed."""


class Source:
    """The engine that decodes; when each step's tokens came."""

    def __init__(self, engine: SimEngine) -> None:
        self.engine = engine
        self.times: list[float] = []
        self.copied_bytes = 0

    async def watch(self) -> None:
        """Take its outputs, for ever."""
        loop = asyncio.get_running_loop()
        while await self.engine.outputs():
            self.times.append(loop.time())

    async def stream(self, slot: str, route: Route) -> None:
        """Copy the full blocks of a run again and again, for ever."""
        while True:
            self.copied_bytes += (await self.engine.copy(slot, 0, route)).copied_bytes

    async def window(self, routes: Sequence[Route]) -> list[float]:
        """Seconds between steps while these runs stream out."""
        streams = [asyncio.create_task(self.stream(slot_of(number), route)) for number, route in enumerate(routes)]
        began = len(self.times)
        try:
            await asyncio.wait(streams, timeout=WINDOW_S) if streams else await asyncio.sleep(WINDOW_S)
            gaps = [later - earlier for earlier, later in pairwise(self.times[began:])]
        finally:
            for stream in streams:
                stream.cancel()
            ends = await asyncio.gather(*streams, return_exceptions=True)
        for ended in ends:
            if not isinstance(ended, asyncio.CancelledError):
                raise RuntimeError("a copy failed") from ended
        return gaps


async def decode_slowdown(backend: str, windows: int = WINDOWS) -> Slowdown:
    """Measure one backend, with and without copies in turn. Raises `RuntimeError` if a copy failed."""
    secret = secrets.token_bytes(16)
    engine = engine_of(backend, secret)
    await engine.start()
    source = Source(engine)
    watching = asyncio.create_task(source.watch())
    try:
        for number in range(RUNS):
            await engine.submit(slot_of(number), spec_of(number))
        async with target(backend, secret) as routes:
            while len(source.times) < RUNS:
                await asyncio.sleep(WINDOW_S / 10)
            await source.window(routes)
            await source.window(())
            source.copied_bytes, streaming, alone = 0, [], []
            for _ in range(windows):
                streaming.append(await source.window(routes))
                alone.append(await source.window(()))
    finally:
        watching.cancel()
        await engine.stop()
    return Slowdown(
        median=_ratio(statistics.median, streaming, alone),
        mean=_ratio(statistics.fmean, streaming, alone),
        gib_s=round(source.copied_bytes / (windows * WINDOW_S) / 2**30, 3),
    )


def _ratio(middle: Callable[[list[float]], float], streaming: list[list[float]], alone: list[list[float]]) -> float:
    with_copies, without = ([gap for window in windows for gap in window] for windows in (streaming, alone))
    return round(middle(with_copies) / middle(without), 3)


@asynccontextmanager
async def target(backend: str, secret: bytes) -> AsyncIterator[list[Route]]:
    """Another engine in another process that has reserved room for what moves."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *PEER, backend, secret.hex(),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us: it ends when its stdin does
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            routes = [msgspec.json.decode(await process.stdout.readline(), type=Route) for _ in range(MOVING)]
        yield routes
    finally:
        process.stdin.close()
        await process.wait()


def engine_of(backend: str, secret: bytes) -> SimEngine:
    """An engine of either process."""
    config = SimConfig(
        blocks_total=RUNS * BLOCKS_EACH,
        block_tokens=BLOCK_TOKENS,
        bytes_per_token=BYTES_PER_TOKEN,
        prefix_cache=False,
        secret=secret,
    )
    region = Region(config.kv_bytes)
    transfers = make_transfers([backend], Where(bind_host="127.0.0.1", secret=secret), [region])
    return SimEngine(config, transfers, memory=region.view)


def slot_of(number: int) -> str:
    """Name of a run."""
    return f"run {number}"


def spec_of(number: int) -> RequestSpec:
    """A request that does not end by itself."""
    prompt = tuple(1 + (number + 7 * place) % 1_000 for place in range(PROMPT_TOKENS))
    return RequestSpec(
        request=slot_of(number), prompt=prompt, sampling=Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    )


async def serve(backend: str, secret: bytes) -> None:
    """The target: say where to, then wait for the end of stdin."""
    engine = engine_of(backend, secret)
    await engine.start()
    for number in range(MOVING):
        slot = slot_of(number)
        room = await engine.reserve(slot, spec_of(number), (), BLOCKS_EACH, engine.transfers())
        sys.stdout.write(msgspec.json.encode(route_to(room)).decode() + "\n")
    sys.stdout.flush()
    ended = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ended), sys.stdin)
    await ended.read()
    await engine.stop()


def route_to(room: Reserved) -> Route:
    """What a source needs."""
    return Route(transfer=room.transfer, address=room.address, handle=room.handle)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], bytes.fromhex(sys.argv[2])))
