"""Two real engines that share a host: runs move through memory that both have mapped, token for token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from midstream.instance.engines.vllm.engine import VllmEngine
from tests.contracts.engine_links import Link
from tests.contracts.engine_rigs import Bench, move, request, reserve
from tests.instance.engines.vllm.pair import config_of

PACE_MS = 8.0


async def test_P03_P26_a_run_moved_through_shared_memory_goes_on_exactly(tmp_path: Path) -> None:
    config = msgspec.structs.replace(config_of(tmp_path, pace_ms=PACE_MS), transfers=("shm", "rpc"))
    engines = [VllmEngine(config), VllmEngine(config)]
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        link: Link = None  # type: ignore[assignment]  # nothing is in the way
        a, b = (Bench(engine, link) for engine in engines)
        spec = request("moved", 60, max_tokens=80)
        await a.engine.submit("alone", spec)
        await a.finish("alone")
        await a.engine.submit("moved", spec)
        await a.until("moved", lambda progress: progress.outputs >= 10)
        reserved = await reserve(a, b, "moved", spec, 32)
        assert (reserved.transfer, reserved.why) == ("shm", "the source's first")
        await move(a, b, "moved", spec, 32)
        await b.finish("moved'")
        ids = list(a.made("moved"))
        ids += [token for token in b.outputs["moved'"] if token >= 0][: 80 - len(ids)]
        assert tuple(ids) == a.made("alone")
        await a.close()
        await b.close()
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))
