"""Many steps at once in the simulated engine: cut where something comes from outside, told when it is time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from midstream.control.errors import BadInput, Refused
from midstream.control.simulate.loop import run_virtual
from midstream.instance.engines.base import Output
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.engine import SimEngine
from midstream.instance.engines.sim.scheduler import Plan
from midstream.instance.engines.sim.steps import coarse
from midstream.instance.engines.sim.stride import Stride
from midstream.migration.protocol.messages import RequestSpec, Sampling

AT_ONCE = SimConfig(kv="lengths", steps_at_once_max=64, blocks_total=64, block_tokens=4, slots_max=8)
SINGLE = msgspec.structs.replace(AT_ONCE, steps_at_once_max=1)

Seen = list[tuple[float, Output]]


def request(name: str, prompt: int = 10, tokens: int = 40, **sampling: Any) -> RequestSpec:
    return RequestSpec(
        request=name,
        prompt=tuple(range(3, 3 + prompt)),
        sampling=Sampling(max_tokens=tokens, **({"ignore_eos": True} | sampling)),
    )


def both(play: Callable[[SimEngine], Coroutine[Any, Any, Any]], **changes: Any) -> list[Any]:
    """What a play returns with many steps at once, and with single steps; then everything must be free."""

    async def run(config: SimConfig) -> Any:
        engine = SimEngine(config, {})
        await engine.start()
        found = await play(engine)
        await asyncio.sleep(60)
        assert engine.account().free == config.blocks_total
        assert engine.faults() == ()
        await engine.stop()
        return found

    configs = (msgspec.structs.replace(config, **changes) for config in (AT_ONCE, SINGLE))
    return [run_virtual(lambda config=config: run(config), seed=1) for config in configs]


async def read(engine: SimEngine, seen: Seen) -> None:
    while True:
        for output in await engine.outputs():
            seen.append((asyncio.get_running_loop().time(), output))


def test_a_stride_knows_what_is_over_and_ends_early_when_cut() -> None:
    stride = Stride(Plan((), ()), 0.0, [1.0, 2.0, 3.0, 4.0])
    assert (stride.over(0.5), stride.over(1.0), stride.over(2.5), stride.over(9.0)) == (0, 1, 2, 3)
    assert stride.take(2) == [1.0, 2.0]
    assert (stride.step_began(), stride.over(3.5)) == (2.0, 1)
    assert stride.cut()
    assert (stride.ends_at, stride.over(9.0), stride.cut()) == (3.0, 0, False)


def test_loads_and_progress_at_any_time_are_those_of_single_steps() -> None:
    async def play(engine: SimEngine) -> list[Any]:
        looks: list[Any] = []
        for index in range(4):
            await engine.submit(f"r{index}", request(f"r{index}", 9 + index, 60))
        for _ in range(60):
            await asyncio.sleep(0.037)
            looks.append((engine.load(), engine.account(), engine.progress()))
        return looks

    at_once, single = both(play, blocks_total=128)
    assert at_once == single
    assert {load.running for load, _, _ in single} >= {0, 4}


def test_blocks_run_out_at_the_same_step() -> None:
    async def play(engine: SimEngine) -> Seen:
        seen: Seen = []
        reading = asyncio.create_task(read(engine, seen))
        for index in range(4):
            await engine.submit(f"r{index}", request(f"r{index}", 30 + index, 60))
        await asyncio.sleep(30)
        assert engine.load().preemptions > 0
        reading.cancel()
        return seen

    at_once, single = both(play, blocks_total=40, stream_interval_ms=1_000.0)
    assert at_once == single


@pytest.mark.parametrize("at_s", [0.3, 0.5123, 0.77])
def test_what_comes_from_outside_comes_at_the_same_step(at_s: float) -> None:
    async def play(engine: SimEngine) -> Any:
        seen: Seen = []
        reading = asyncio.create_task(read(engine, seen))
        for index in range(3):
            await engine.submit(f"r{index}", request(f"r{index}", 10, 50))
        await asyncio.sleep(at_s)
        state = await engine.freeze("r1")
        frozen_at = asyncio.get_running_loop().time()
        freed = await engine.abort("r2")
        await engine.submit("r3", request("r3", 10, 20))
        await asyncio.sleep(0.4)
        await engine.thaw("r1")
        await asyncio.sleep(30)
        reading.cancel()
        return state, frozen_at, freed, seen

    at_once, single = both(play, stream_interval_ms=10_000.0)
    assert at_once == single
    state, frozen_at, _, seen = single
    told = [output for at, output in seen if output.slot == "r1" and at <= frozen_at]
    assert sum(len(output.ids) for output in told) == len(state.outputs), "frozen with tokens that nobody was told"


def test_first_and_last_tokens_are_told_at_once_and_others_in_between() -> None:
    async def play(engine: SimEngine) -> Seen:
        seen: Seen = []
        reading = asyncio.create_task(read(engine, seen))
        await engine.submit("r", request("r", 10, 60))
        await asyncio.sleep(30)
        reading.cancel()
        return seen

    at_once, single = both(play, stream_interval_ms=600.0)
    assert at_once == single
    assert len(single[0][1].ids) == 1
    assert single[-1][1].finish == "length"
    assert 3 <= len(single) <= 6
    assert [output.first for _, output in single] == [
        sum(len(o.ids) for _, o in single[:i]) for i in range(len(single))
    ]


def test_without_bytes_only_lengths_may_end_a_request() -> None:
    async def run(**sampling: Any) -> None:
        engine = SimEngine(AT_ONCE, {})
        await engine.submit("r", request("r", **sampling))

    for sampling in ({"ignore_eos": False}, {"stop_token_ids": (5,)}, {"logprobs": 1}):
        with pytest.raises(Refused, match="without KV bytes"):
            run_virtual(lambda sampling=sampling: run(**sampling), seed=1)


def test_bytes_are_computed_step_by_step() -> None:
    with pytest.raises(BadInput, match="steps_at_once_max"):
        SimConfig(steps_at_once_max=2)
    assert SimEngine(AT_ONCE, {}).fingerprint.differences(SimEngine(SimConfig(block_tokens=4), {}).fingerprint) == (
        "layout",
    )


def test_a_reported_step_time_is_coarse() -> None:
    assert coarse(0.0) == 0.0
    assert all(abs(coarse(ms) / ms - 1) <= 1 / 64 for ms in (0.013, 1.0, 36.9, 51.3, 4_000.0))
    assert coarse(40.01) == coarse(40.02)
