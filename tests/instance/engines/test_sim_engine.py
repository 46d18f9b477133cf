"""The simulated engine on its event loop: virtual time, death, back-pressure, and the load it reports."""

from __future__ import annotations

import asyncio
import random

import pytest

from midstream.control.errors import EngineFailed
from midstream.control.ids import Node
from midstream.control.simulate.loop import run_virtual
from midstream.instance.engines.base import Route
from midstream.instance.engines.sim import engine as engine_module
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.engine import SimEngine
from midstream.instance.engines.sim.reference import reference_output
from midstream.migration.protocol.messages import RequestSpec, Sampling
from midstream.migration.transfers.memory import MemoryTransfer
from midstream.migration.wires.memory import MemoryNetwork

CONFIG = SimConfig(blocks_total=48, block_tokens=4, slots_max=4, step_tokens_max=16)


def engine(name: str = "a", config: SimConfig = CONFIG, network: MemoryNetwork | None = None) -> SimEngine:
    network = network or MemoryNetwork(random.Random(1))
    return SimEngine(config, {"memory": MemoryTransfer(network, Node(f"llumlet/{name}", 1, name))})


def request(name: str, prompt: int = 10, **sampling: object) -> RequestSpec:
    settings = {"max_tokens": 20, "ignore_eos": True} | sampling
    return RequestSpec(request=name, prompt=tuple(range(3, 3 + prompt)), sampling=Sampling(**settings))


async def serve(e: SimEngine, specs: list[RequestSpec]) -> list[tuple[float, str, int]]:
    """(time, slot, token) of everything put out until all requests ended."""
    seen: list[tuple[float, str, int]] = []
    left = {spec.request for spec in specs}
    for spec in specs:
        await e.submit(spec.request, spec)
    while left:
        for output in await e.outputs():
            seen += [(asyncio.get_running_loop().time(), output.slot, token) for token in output.ids]
            left -= {output.slot} if output.finish else set()
    return seen


def test_P17_virtual_time_gives_the_same_run_whatever_the_order_of_callbacks() -> None:
    async def run() -> list[tuple[float, str, int]]:
        e = engine()
        await e.start()
        seen = await serve(e, [request(f"r{i}", 8 + i, max_tokens=60, seed=i) for i in range(6)])
        assert e.load().preemptions > 0
        await e.stop()
        return seen

    first = run_virtual(run, seed=1)
    assert run_virtual(run, seed=1) == run_virtual(run, seed=2) == first
    assert first[-1][0] > 60 * 0.029


def test_steps_take_their_modelled_time_and_the_load_says_so() -> None:
    async def run() -> tuple[float, float]:
        e = engine()
        await e.start()
        seen = await serve(e, [request("x", 10, max_tokens=30)])
        step_ms = e.load().step_ms
        await e.stop()
        return (seen[-1][0] - seen[0][0]) / 29 * 1000, step_ms

    gap_ms, step_ms = run_virtual(run, seed=1)
    assert 29 < gap_ms < 32
    assert step_ms == pytest.approx(gap_ms, rel=0.02)


def test_a_freeze_waits_for_the_step_boundary_and_no_longer() -> None:
    async def run() -> None:
        e = engine()
        await e.start()
        await e.submit("x", request("x", max_tokens=100))
        loop = asyncio.get_running_loop()
        while (await e.outputs())[-1].first < 3:
            pass
        boundary = loop.time()
        await asyncio.sleep(0.01)
        state = await e.freeze("x")
        assert 0.015 < loop.time() - boundary < 0.035
        assert len(state.outputs) == 5
        await asyncio.sleep(1)
        (output,) = await e.outputs()
        assert (output.first, output.ids) == (4, state.outputs[4:])
        await e.abort("x")
        await e.stop()

    run_virtual(run, seed=3)


def test_P09_no_output_of_an_aborted_run_is_delivered_late() -> None:
    async def run() -> None:
        e = engine()
        await e.start()
        for slot in ("x", "y"):
            await e.submit(slot, request(slot, max_tokens=100))
        await asyncio.sleep(1)
        await e.abort("x")
        assert {output.slot for output in await e.outputs()} == {"y"}
        await e.abort("y")
        await e.stop()

    run_virtual(run, seed=1)


@pytest.mark.parametrize("seed", range(8))
def test_P12_a_freeze_that_is_cancelled_as_it_happens_is_undone(seed: int) -> None:
    async def run() -> bool:
        e = engine()
        await e.start()
        await e.submit("x", request("x", max_tokens=100))
        await e.outputs()
        freezing = asyncio.create_task(e.freeze("x"))
        await asyncio.sleep(0.001)
        await e.outputs()  # the boundary: the freeze is answered, its caller may not have run yet
        was_cancelled = freezing.cancel()
        await asyncio.wait({freezing})
        assert ((await e.describe("x")).phase == "frozen") is not was_cancelled
        await e.abort("x")
        await e.stop()
        return was_cancelled

    run_virtual(run, seed=seed)


class SlowToForget(MemoryTransfer):
    """A write is still in progress when it is told to forget."""

    is_writing = True

    async def forget(self, handle: str) -> None:
        await asyncio.sleep(1)
        self.is_writing = False
        await super().forget(handle)


@pytest.mark.parametrize("ending", ["adopt", "abort"])
def test_P05_blocks_change_hands_only_when_no_write_is_in_progress(ending: str) -> None:
    async def run() -> None:
        network = MemoryNetwork(random.Random(1))
        slow = SlowToForget(network, Node("llumlet/b", 1, "b"))
        a, b = engine("a", network=network), SimEngine(CONFIG, {"memory": slow})
        await a.start()
        await b.start()
        spec = request("x", 10, max_tokens=30)
        await a.submit("x", spec)
        await a.outputs()
        state = await a.freeze("x")
        reserved = await b.reserve("x'", spec, (), 6, a.transfers())
        await a.copy("x", 0, Route(transfer=reserved.transfer, address=reserved.address, handle=reserved.handle))
        ending_task = asyncio.create_task(b.adopt("x'", state) if ending == "adopt" else b.abort("x'"))
        await asyncio.sleep(0.5)
        assert slow.is_writing
        assert b.account().reserved == 6
        await ending_task
        assert not slow.is_writing
        assert b.account().reserved == 0
        for e, slot in ((a, "x"), (b, "x'")):
            await e.abort(slot)
            await e.stop()

    run_virtual(run, seed=2)


def test_P07_a_crash_loses_everything_and_is_told() -> None:
    async def run() -> None:
        network = MemoryNetwork(random.Random(1))
        a, b = engine("a", network=network), engine("b", network=network)
        await a.start()
        await b.start()
        spec = request("x", 40, max_tokens=100)
        await a.submit("x", spec)
        while (await a.describe("x")).outputs < 3:
            await a.outputs()
        reserved = await b.reserve("x'", spec, (), 20, a.transfers())
        route = Route(transfer=reserved.transfer, address=reserved.address, handle=reserved.handle)
        failed = asyncio.create_task(a.failed())
        copy, freeze = asyncio.create_task(a.copy("x", 0, route)), asyncio.create_task(a.freeze("x"))
        await asyncio.sleep(0.0003)
        assert not (failed.done() or copy.done() or freeze.done())
        a.crash("pulled the plug")
        a.crash("again")
        assert a.account().free == a.account().total == 48
        assert a.progress() == ()
        assert await failed == "pulled the plug"
        await asyncio.wait({copy, freeze})
        assert copy.exception() is not None
        assert isinstance(freeze.exception(), EngineFailed)
        with pytest.raises(EngineFailed):
            await a.submit("y", spec)
        with pytest.raises(EngineFailed):
            await a.reserve("y", spec, (), 2, a.transfers())
        assert await a.abort("x") == 0
        await b.abort("x'")
        assert b.account().free == 48
        await a.stop()
        await b.stop()

    run_virtual(run, seed=4)


def test_P14_a_step_loop_that_ends_unexpectedly_is_a_failed_engine() -> None:
    async def run() -> None:
        e = engine()
        await e.start()
        await e.submit("x", request("x", max_tokens=100))
        await e.outputs()
        e._core.runs["x"].table.clear()  # what no call can bring about
        assert "IndexError" in await e.failed()
        await e.stop()

    run_virtual(run, seed=5)


def test_P28_the_engine_pauses_when_nobody_takes_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "OUTPUTS_MAX", 10)

    async def run() -> None:
        e, spec = engine(), request("x", max_tokens=60)
        await e.start()
        await e.submit("x", spec)
        await asyncio.sleep(100)
        assert (await e.describe("x")).outputs == 10
        state = await e.freeze("x")
        await e.thaw("x")
        assert len(state.outputs) == 10
        ids: list[int] = []
        while len(ids) < 60:
            for output in await e.outputs():
                ids += output.ids
        assert tuple(ids) == reference_output(spec, CONFIG)[0]
        await e.stop()

    run_virtual(run, seed=6)


def test_an_idle_engine_does_nothing() -> None:
    """With no work there is no timer: virtual time would show it."""

    async def run() -> float:
        e = engine(config=SimConfig(blocks_total=8, time_scale=0))
        await e.start()
        await asyncio.sleep(3600)
        await serve(e, [request("x")])
        await e.stop()
        return asyncio.get_running_loop().time()

    assert run_virtual(run, seed=7) == pytest.approx(3600, abs=0.1)


def test_P26_the_fingerprint_tells_models_and_layouts_apart() -> None:
    async def run() -> None:
        mine = engine().fingerprint
        assert mine.differences(engine(config=SimConfig(block_tokens=4, blocks_total=500)).fingerprint) == ()
        other = SimConfig(block_tokens=8, weights_revision="2", bytes_per_token=16)
        assert mine.differences(engine(config=other).fingerprint) == (
            "weights_revision",
            "block_tokens",
            "block_bytes",
            "layout",
        )

    run_virtual(run, seed=8)
