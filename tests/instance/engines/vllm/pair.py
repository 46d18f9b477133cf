"""Two real engines of the tiny model, and readers of what they put out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from midstream.instance.engines.base import Reserved
from midstream.instance.engines.vllm.config import VllmConfig
from midstream.instance.engines.vllm.engine import VllmEngine
from midstream.migration.protocol.messages import RequestSpec
from tests.instance.engines.vllm.proxy import VllmLink
from tests.instance.engines.vllm.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[4]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
SIZES: dict[str, Any] = {
    "block_size": 32,
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 65,
}


def config_of(folder: Path, *, pace_ms: float = 0.0, **engine_args: Any) -> VllmConfig:
    """Small enough for two on one machine. With a pace, steps take at least so long."""
    paced: dict[str, Any] = {}
    if pace_ms:
        paced["worker_extension_cls"] = "tests.instance.engines.vllm.paced.PacedExtension"
        paced["additional_config"] = {"pace_ms": pace_ms}
    return VllmConfig(
        model=str(write_tiny_model(folder)),
        name="tiny",
        secret=b"a secret of the cluster",
        environment=ENVIRONMENT,
        engine_args=SIZES | paced | engine_args,
        stall_s=60.0,
        boot_s=400.0,
    )


class LinkedEngine(VllmEngine):
    """Tells peers an address that leads past a link."""

    def __init__(self, config: VllmConfig, link: VllmLink) -> None:
        super().__init__(config)
        self._link = link

    async def reserve(
        self, slot: str, spec: RequestSpec, outputs: tuple[int, ...], blocks: int, transfers: tuple[str, ...]
    ) -> Reserved:
        reserved = await super().reserve(slot, spec, outputs, blocks, transfers)
        return Reserved(
            blocks=reserved.blocks,
            cached=reserved.cached,
            transfer=reserved.transfer,
            why=reserved.why,
            address=",".join([await self._link.before(address) for address in reserved.address.split(",")]),
            handle=reserved.handle,
        )


class OverlappedEngine(LinkedEngine):
    """With async scheduling."""

    core_module = "tests.instance.engines.vllm.overlapped_core"


Kind = TypeVar("Kind", bound=LinkedEngine)


class VllmPair(Generic[Kind]):
    """Engines `a` and `b`; `links[x]` is on the way out of engine x."""

    def __init__(self, config: VllmConfig, kind: type[Kind]) -> None:
        self.links = {name: VllmLink() for name in ("a", "b")}
        self.engines = {"a": kind(config, self.links["b"]), "b": kind(config, self.links["a"])}

    async def settle(self) -> None:
        """End what a test has left, and let no prefix of it be found again."""
        for engine in self.engines.values():
            for run in engine.progress():
                await engine.abort(run.slot)
            await engine.reset_prefix_cache()
        for link in self.links.values():
            link.reset()


@contextlib.asynccontextmanager
async def running(config: VllmConfig, kind: type[Kind] = LinkedEngine) -> AsyncIterator[VllmPair[Kind]]:  # type: ignore[assignment]
    """Boot both at once; afterwards no process of theirs is left."""
    pair = VllmPair(config, kind)
    try:
        await asyncio.gather(*(engine.start() for engine in pair.engines.values()))
        yield pair
    finally:
        await asyncio.gather(*(engine.stop() for engine in pair.engines.values()))
        for link in pair.links.values():
            await link.stop()
