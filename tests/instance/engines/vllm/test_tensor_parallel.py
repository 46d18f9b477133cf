"""Engines of two workers each: rank n sends to rank n, and the tokens stay the same."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from midstream.migration.protocol.messages import RequestSpec, Sampling
from tests.contracts.engine_rigs import Bench, move
from tests.instance.engines.vllm.pair import ENVIRONMENT, SIZES, config_of, running

OWN_WORKERS = {name: value for name, value in ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
SAMPLINGS = {
    "greedy": Sampling(max_tokens=80, temperature=0.0, ignore_eos=True),
    "seeded": Sampling(max_tokens=80, temperature=0.9, seed=4, ignore_eos=True),
}


@pytest.mark.timeout(600)
async def test_P03_equal_ranks_exchange_their_part_of_the_kv(tmp_path: Path) -> None:
    config = msgspec.structs.replace(
        config_of(tmp_path, pace_ms=10, tensor_parallel_size=2, enable_prefix_caching=False), environment=OWN_WORKERS
    )
    async with running(config) as pair:
        a, b = (Bench(pair.engines[name], pair.links[name]) for name in ("a", "b"))
        assert a.engine.fingerprint.tensor_parallel == 2
        for name, sampling in SAMPLINGS.items():
            spec = RequestSpec(request=name, prompt=tuple(range(5, 75)), sampling=sampling)
            await a.engine.submit(f"undisturbed {name}", spec)
            await a.finish(f"undisturbed {name}")
            await a.engine.submit(name, spec)
            await a.until(name, lambda p: p.outputs >= 10)
            state = await move(a, b, name, spec, SIZES["block_size"])
            await b.finish(f"{name}'")
            assert state.outputs + b.made(f"{name}'") == a.made(f"undisturbed {name}")
        for bench in (a, b):
            assert await bench.engine.faults() == ()
            await bench.close()
