"""One contract for every engine: runs go on exactly wherever they are moved, and no block is lost or shared wrongly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
import pytest_asyncio

from midstream.control.errors import Refused, TransferFailed
from midstream.control.state import Load
from midstream.instance.engines.base import Engine, SlotProgress
from midstream.migration.plan import BLOCKING, RECOMPUTE, blocks_for
from midstream.migration.protocol.messages import RequestSpec, RunState
from midstream.migration.protocol.prefixes import KEY_BYTES, prefix_keys
from tests.contracts.engine_rigs import PATIENCE_S, RIGS, Bench, Rig, move, request, reserve, route

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

SAMPLINGS: dict[str, dict[str, object]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 42},
    "unseeded": {"temperature": 1.0},
    "nucleus": {"temperature": 1.1, "seed": 7, "top_k": 5, "top_p": 0.8},
    "penalties": {"temperature": 0.7, "seed": 3, "presence_penalty": 1.5, "frequency_penalty": 1.0},
    "limits": {"min_tokens": 30, "ignore_eos": False, "stop_token_ids": tuple(range(3, 40))},
    "logprobs": {"temperature": 0.5, "seed": 9, "logprobs": 3},
}
STEP_TOKENS = 8
"""Every rig's step computes as many."""
PHASES = ("waiting", "prefill", "decode", "preempted")


class Pair(NamedTuple):
    rig: Rig
    a: Bench
    b: Bench


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=sorted(RIGS))
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    rig = RIGS[request.param]()
    await rig.open()
    yield rig
    await rig.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine_pair(rig: Rig) -> AsyncIterator[Pair]:
    """Two engines with nothing in them; afterwards every block is where it was before (P07)."""
    engines = await rig.begin()
    before = {name: engine.account() for name, engine in engines.items()}
    benches = {name: Bench(engine, rig.links[name]) for name, engine in engines.items()}
    yield Pair(rig, benches["a"], benches["b"])
    for name, engine in engines.items():
        for run in engine.progress():
            await engine.abort(run.slot)
        await all_slots_are_free(rig, engine)
        await benches[name].close()
        assert await rig.faults(engine) == ()
        assert engine.account() == before[name]
    await rig.end()
    for bench in benches.values():
        assert bench.link.channels_open == 0


async def all_slots_are_free(rig: Rig, engine: Engine) -> None:
    """As many arrivals as there are slots find one each: no slot leaked."""
    spec = request("last")
    for i in range(rig.slots):
        await engine.reserve(f"last {i}", spec, (), 1, engine.transfers())
    for i in range(rig.slots):
        await engine.abort(f"last {i}")


async def assert_undisturbed(pair: Pair, spec: RequestSpec, ids: tuple[int, ...], finish: str) -> None:
    """A client has seen what it would have seen had nothing happened."""
    expected = await pair.rig.undisturbed(spec)
    if pair.rig.is_repeatable(spec):
        assert (ids, finish) == expected
    else:
        assert (len(ids), finish) == (len(expected[0]), expected[1])


def blockers(pair: Pair, max_tokens: int = 120) -> list[RequestSpec]:
    """Requests that take every slot for long and, growing, more blocks than there are."""
    return [request(f"blocker {i}", 45 + i, max_tokens=max_tokens) for i in range(pair.rig.slots - 1)]


async def bring(pair: Pair, phase: str, spec: RequestSpec) -> SlotProgress:
    """Submit a run to `a` and let it come to a phase."""
    a = pair.a
    if phase in ("waiting", "preempted"):
        for blocker in blockers(pair):
            await a.engine.submit(blocker.request, blocker)
    if phase == "waiting":
        extra = request("one more", 9, max_tokens=150)
        await a.engine.submit(extra.request, extra)
        await a.until(extra.request, lambda p: p.phase != "waiting")
    await a.engine.submit("x", spec)
    reached = {
        "waiting": lambda p: p.phase == "waiting",
        "prefill": lambda p: p.phase == "prefill" and p.computed > 0,
        "decode": lambda p: p.outputs >= 5,
        "preempted": lambda p: p.preemptions > 0 and p.phase == "waiting",
    }
    return await a.until("x", reached[phase])


def long_enough(rig: Rig, phase: str, sampling: dict[str, object]) -> RequestSpec:
    """A request that is still there when the phase comes."""
    prompt = {"prefill": 70}.get(phase, rig.prompt)
    if phase == "preempted" and "min_tokens" not in sampling:
        return request("x", prompt, **sampling, max_tokens=100)
    return request("x", prompt, **sampling)


# --- the prefix cache ----------------------------------------------------------------------------


async def known(engine: Engine, seen: int, keys: list[bytes]) -> bool:
    """Does the engine come to tell of all these blocks."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            change = engine.prefixes.since(seen)
            stored = b"" if change is None else change.stored
            told = {stored[at : at + KEY_BYTES] for at in range(0, len(stored), KEY_BYTES)}
            if told >= set(keys):
                return True
            await asyncio.sleep(0.01)


async def test_an_engine_tells_which_prefixes_it_holds_and_an_adopted_run_brings_its_own(engine_pair: Pair) -> None:
    a, b, rig = engine_pair.a, engine_pair.b, engine_pair.rig
    spec = request("prefixes are told", rig.prompt + 2 * rig.block_tokens)
    keys = prefix_keys(spec.prompt, rig.block_tokens, 100)
    assert keys
    at_a, at_b = a.engine.prefixes.number, b.engine.prefixes.number
    await a.engine.submit("x", spec)
    await a.until("x", lambda p: p.outputs >= 5)
    assert await known(a.engine, at_a, keys)
    await move(a, b, "x", spec, rig.block_tokens)
    await b.finish("x'")
    assert await known(b.engine, at_b, keys)


# --- serving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_P02_P03_outputs_come_in_order_and_are_those_of_the_undisturbed_run(
    engine_pair: Pair, sampling: str
) -> None:
    a = engine_pair.a
    spec = request("x", **SAMPLINGS[sampling])
    await a.engine.submit("x", spec)
    await assert_undisturbed(engine_pair, spec, *await made_in_all(a, "x"))


async def test_P03_no_run_depends_on_the_company_it_keeps(engine_pair: Pair) -> None:
    """Batch, preemption and prefix hits change nothing."""
    a = engine_pair.a
    specs = [request(f"r{i // 2}", 20 + i // 2, max_tokens=70, temperature=0.8, seed=i) for i in range(8)]
    for i, spec in enumerate(specs):
        await a.engine.submit(f"s{i}", spec)
    finishes = [await a.finish(f"s{i}") for i in range(len(specs))]
    assert a.engine.load().preemptions > 0
    assert a.engine.load() == Load(
        blocks_free=engine_pair.rig.blocks, preemptions=a.engine.load().preemptions, step_ms=a.engine.load().step_ms
    )
    for i, spec in enumerate(specs):
        await assert_undisturbed(engine_pair, spec, a.made(f"s{i}"), finishes[i])


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("done", [1, 17, 39])
async def test_P03_P06_replayed_outputs_count_as_generated(engine_pair: Pair, sampling: str, done: int) -> None:
    a, spec = engine_pair.a, request("x", **SAMPLINGS[sampling])
    ids, _ = await engine_pair.rig.undisturbed(spec)
    done = min(done, len(ids) - 1)
    await a.engine.submit("x", spec, ids[:done])
    finish = await a.finish("x")
    await assert_undisturbed(engine_pair, spec, ids[:done] + a.made("x"), finish)
    assert len(a.outputs["x"]) == len(ids)


async def test_P04_a_replay_of_all_outputs_ends_at_once(engine_pair: Pair) -> None:
    a = engine_pair.a
    for slot, sampling in (("length", {}), ("stop", {"stop_token_ids": tuple(range(3, 40))})):
        spec = request(slot, **sampling)
        ids, finish = await engine_pair.rig.undisturbed(spec)
        assert finish.partition(":")[0] == slot
        await a.engine.submit(slot, spec, ids)
        assert await a.finish(slot) == finish
        assert a.made(slot) == ()


async def test_a_slot_that_exists_is_left_as_it_is(engine_pair: Pair) -> None:
    a, spec = engine_pair.a, request("x")
    await a.engine.submit("x", spec)
    await a.until("x", lambda p: p.outputs > 2)
    await a.engine.submit("x", spec)
    await assert_undisturbed(engine_pair, spec, *await made_in_all(a, "x"))


@pytest.mark.parametrize(
    ("code", "spec"),
    [
        ("too_long", request("x", 100, max_tokens=200)),
        ("bad_request", request("x", 0)),
        ("bad_request", request("x", max_tokens=0)),
        ("bad_request", request("x", temperature=-1.0)),
    ],
)
async def test_what_cannot_be_run_is_refused(engine_pair: Pair, code: str, spec: RequestSpec) -> None:
    with pytest.raises(Refused) as refusal:
        await engine_pair.a.engine.submit("x", spec)
    assert refusal.value.code == code
    with pytest.raises(Refused) as refusal:
        await engine_pair.a.engine.reserve("y", spec, (), 4, engine_pair.b.engine.transfers())
    assert refusal.value.code == code


async def test_a_run_before_others_in_rank_goes_first(engine_pair: Pair) -> None:
    a, spec = engine_pair.a, request("late", max_tokens=3)
    for blocker in blockers(engine_pair, 20):
        await a.engine.submit(blocker.request, blocker)
    await a.engine.submit("fills", request("fills", max_tokens=20))
    await a.engine.submit("early", request("early", max_tokens=30))
    await a.engine.submit("late", RequestSpec(request="late", prompt=spec.prompt, sampling=spec.sampling, priority=-1))
    await a.finish("late")
    assert "early" not in a.finishes


async def made_in_all(bench: Bench, slot: str) -> tuple[tuple[int, ...], str]:
    """Wait for the end of a run; its ids and its finish."""
    finish = await bench.finish(slot)
    return bench.made(slot), finish


async def made_after(bench: Bench, slot: str, state: RunState) -> tuple[tuple[int, ...], str]:
    """Wait for the end of an adopted run; all its output ids, and its finish."""
    finish = await bench.finish(slot)
    return state.outputs + bench.made(slot), finish


async def emptied(bench: Bench) -> None:
    """End what else runs there: the undisturbed run will be alone."""
    for run in bench.engine.progress():
        await bench.engine.abort(run.slot)


# --- moving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("phase", PHASES)
async def test_P03_a_moved_run_goes_on_exactly(engine_pair: Pair, phase: str, sampling: str) -> None:
    rig, a, b = engine_pair
    spec = long_enough(engine_pair.rig, phase, SAMPLINGS[sampling])
    await bring(engine_pair, phase, spec)
    state = await move(a, b, "x", spec, rig.block_tokens)
    ids, finish = await made_after(b, "x'", state)
    assert await a.is_gone("x")
    logprobs = [*state.logprobs, *b.logprobs["x'"]]
    assert len(logprobs) == (len(ids) if spec.sampling.logprobs is not None else 0)
    await emptied(a)
    await assert_undisturbed(engine_pair, spec, ids, finish)


@pytest.mark.parametrize("mode", [BLOCKING, RECOMPUTE])
@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_P03_a_run_moved_stopped_or_without_its_kv_goes_on_exactly(
    engine_pair: Pair, sampling: str, mode: str
) -> None:
    rig, a, b = engine_pair
    spec = long_enough(rig, "decode", SAMPLINGS[sampling])
    await bring(engine_pair, "decode", spec)
    state = await move(a, b, "x", spec, rig.block_tokens, mode)
    assert bool(state.computed) == (mode == BLOCKING)
    ids, finish = await made_after(b, "x'", state)
    assert len([*state.logprobs, *b.logprobs["x'"]]) == (len(ids) if spec.sampling.logprobs is not None else 0)
    await assert_undisturbed(engine_pair, spec, ids, finish)


async def test_P03_there_and_back_and_there_again(engine_pair: Pair) -> None:
    rig, a, b = engine_pair
    spec = request("x", rig.prompt, max_tokens=100, temperature=0.8, seed=5, frequency_penalty=0.5)
    await a.engine.submit("x", spec)
    slot, here, there = "x", a, b
    for stop in (10, 30, 50):
        await here.until(slot, lambda p, stop=stop: p.outputs >= stop)
        state = await move(here, there, slot, spec, rig.block_tokens)
        there.outputs[f"{slot}'"] = list(state.outputs)
        slot, here, there = f"{slot}'", there, here
    finish = await here.finish(slot)
    await assert_undisturbed(engine_pair, spec, here.made(slot), finish)


async def test_two_moves_at_once_do_not_disturb_each_other(engine_pair: Pair) -> None:
    rig, a, b = engine_pair
    specs = [request("p", 30, max_tokens=60), request("q", 30, max_tokens=60, temperature=0.7, seed=8)]
    await asyncio.gather(
        a.engine.submit("p", specs[0]), b.engine.submit("q", specs[1]), a.engine.submit("r", request("r"))
    )
    await a.until("p", lambda p: p.outputs > 4)
    await b.until("q", lambda p: p.outputs > 4)
    states = await asyncio.gather(
        move(a, b, "p", specs[0], rig.block_tokens), move(b, a, "q", specs[1], rig.block_tokens)
    )
    seen = []
    for bench, slot, spec, state in ((b, "p'", specs[0], states[0]), (a, "q'", specs[1], states[1])):
        seen.append((spec, *await made_after(bench, slot, state)))
    await emptied(a)
    for spec, ids, finish in seen:
        await assert_undisturbed(engine_pair, spec, ids, finish)


async def test_blocks_in_the_targets_prefix_cache_are_not_sent(engine_pair: Pair) -> None:
    rig, a, b = engine_pair
    spec = request("x", rig.prompt)
    await b.engine.submit("before", spec)
    await b.finish("before")
    await a.engine.submit("x", spec)
    await a.until("x", lambda p: p.outputs > 5)
    reserved = await reserve(a, b, "x", spec, rig.block_tokens)
    assert reserved.cached >= rig.prompt // rig.block_tokens
    with pytest.raises(TransferFailed):
        await a.engine.copy("x", reserved.cached - 1, route(reserved))
    state = await a.engine.freeze("x")
    report = await a.engine.copy("x", reserved.cached, route(reserved))
    assert report.blocks == state.blocks - reserved.cached
    await b.engine.adopt("x'", state)
    await assert_undisturbed(engine_pair, spec, *await made_after(b, "x'", state))


async def test_P05_content_the_target_has_beyond_the_runs_progress_is_not_computed_over(engine_pair: Pair) -> None:
    """Blocks from the prefix cache may be others' too: a run that joins in mid-prefill goes on behind them."""
    rig, a, b = engine_pair
    spec = request("x", 70)
    await b.engine.submit("before", spec)
    await b.finish("before")
    await bring(engine_pair, "prefill", spec)
    reserved = await reserve(a, b, "x", spec, rig.block_tokens)
    state = await a.engine.freeze("x")
    assert state.computed < reserved.cached * rig.block_tokens
    await b.engine.adopt("x'", state)
    assert (await b.engine.describe("x'")).computed >= reserved.cached * rig.block_tokens
    await b.finish("x'")
    assert b.made("x'") == (await rig.undisturbed(spec))[0]


async def test_an_adopted_run_does_not_wait_behind_the_queue(engine_pair: Pair) -> None:
    rig, a, b = engine_pair
    spec = request("x", rig.prompt)
    await bring(engine_pair, "decode", spec)
    reserved = await reserve(a, b, "x", spec, rig.block_tokens)
    for blocker in blockers(engine_pair):
        await b.engine.submit(blocker.request, blocker)
    await b.engine.submit("queued", request("queued"))
    state = await a.engine.freeze("x")
    await a.engine.copy("x", reserved.cached, route(reserved))
    await b.engine.adopt("x'", state)
    assert (await b.engine.describe("x'")).phase == "decode"
    assert (await b.engine.describe("queued")).phase == "waiting"
    await b.until("x'", lambda p: p.outputs > len(state.outputs))


@pytest.mark.parametrize("damage", ["byte", "swap"])
async def test_P03_wrong_bytes_at_the_target_change_the_output(engine_pair: Pair, damage: str) -> None:
    """The instrument itself: without it no other test here means anything."""
    rig, a, b = engine_pair
    spec = request("x", rig.prompt)
    await bring(engine_pair, "decode", spec)
    if damage == "byte":
        a.link.flip = (2, 5)
    else:
        a.link.swaps = True
    state = await move(a, b, "x", spec, rig.block_tokens)
    ids, _ = await made_after(b, "x'", state)
    assert ids != (await rig.undisturbed(spec))[0]


# --- freezing and thawing ------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
async def test_P10_thaw_leaves_a_run_exactly_as_it_was(engine_pair: Pair, phase: str) -> None:
    a = engine_pair.a
    spec = long_enough(engine_pair.rig, phase, SAMPLINGS["penalties"])
    await bring(engine_pair, phase, spec)
    state = await a.engine.freeze("x")
    frozen = await a.engine.describe("x")
    assert frozen.phase == "frozen"
    await asyncio.sleep(0.02)
    assert await a.engine.freeze("x") == state
    assert await a.engine.describe("x") == frozen
    await a.engine.thaw("x")
    thawed = await a.engine.describe("x")
    assert 0 <= thawed.computed - frozen.computed <= engine_pair.rig.steps_meanwhile * STEP_TOKENS
    assert 0 <= thawed.tokens - frozen.tokens <= engine_pair.rig.steps_meanwhile
    assert thawed.preemptions == frozen.preemptions
    await a.engine.thaw("x")
    await assert_undisturbed(engine_pair, spec, *await made_in_all(a, "x"))


async def test_P12_every_output_was_put_out_before_freeze_returns(engine_pair: Pair) -> None:
    a, spec = engine_pair.a, request("x", max_tokens=100)
    await bring(engine_pair, "decode", spec)
    state = await a.engine.freeze("x")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert a.made("x") == state.outputs
    assert state.computed == len(spec.prompt) + len(state.outputs) - 1
    await asyncio.sleep(0.02)
    assert a.made("x") == state.outputs


async def test_freeze_of_what_is_gone_or_just_ended_is_refused(engine_pair: Pair) -> None:
    a = engine_pair.a
    with pytest.raises(Refused) as refusal:
        await a.engine.freeze("nobody")
    assert refusal.value.code == "gone"
    await a.engine.submit("x", request("x", 5, max_tokens=1))
    with pytest.raises(Refused) as refusal:
        while (await a.engine.describe("x")).phase == "waiting":
            await asyncio.sleep(0)
        await a.engine.freeze("x")
    assert refusal.value.code in engine_pair.rig.ended_codes


async def test_a_freeze_nobody_waits_for_freezes_nothing(engine_pair: Pair) -> None:
    a, spec = engine_pair.a, request("x", max_tokens=60)
    await bring(engine_pair, "decode", spec)
    for wait_s in (0.0, 0.001, 0.003):
        freezing = asyncio.create_task(a.engine.freeze("x"))
        await asyncio.sleep(wait_s)
        if freezing.cancel():
            await asyncio.wait({freezing})
        else:
            await a.engine.thaw("x")
    await assert_undisturbed(engine_pair, spec, *await made_in_all(a, "x"))


async def test_a_frozen_run_gives_way_to_nobody_and_others_go_on(engine_pair: Pair) -> None:
    a = engine_pair.a
    spec = request("x", max_tokens=60)
    await bring(engine_pair, "decode", spec)
    state = await a.engine.freeze("x")
    for blocker in blockers(engine_pair):
        await a.engine.submit(blocker.request, blocker)
    for blocker in blockers(engine_pair):
        await a.finish(blocker.request)
    assert (await a.engine.describe("x")).blocks >= state.blocks
    await a.engine.thaw("x")
    await assert_undisturbed(engine_pair, spec, *await made_in_all(a, "x"))


# --- copies --------------------------------------------------------------------------------------


async def copy_in_progress(pair: Pair, spec: RequestSpec) -> asyncio.Task[object]:
    """A copy of slot x that has begun and waits at the gate."""
    rig, a, b = pair
    reserved = await reserve(a, b, "x", spec, rig.block_tokens)
    a.link.gate.clear()
    a.link.sending.clear()
    copy = asyncio.create_task(a.engine.copy("x", reserved.cached, route(reserved)))
    async with asyncio.timeout(PATIENCE_S):
        await a.link.sending.wait()
    return copy


async def refusal_of(copy: asyncio.Task[object]) -> str:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Refused) as refusal:
            await copy
    return refusal.value.code


async def test_P05_blocks_preempted_under_a_copy_are_refused_not_served(engine_pair: Pair) -> None:
    rig, a, b = engine_pair
    spec = request("x", rig.prompt, max_tokens=100)
    for blocker in blockers(engine_pair):
        await a.engine.submit(blocker.request, blocker)
    await a.engine.submit("x", spec)
    await a.until("x", lambda p: p.outputs > 3)
    copy = await copy_in_progress(engine_pair, spec)
    assert await refusal_of(copy) == "preempted"
    assert (await a.engine.describe("x")).preemptions > 0
    await b.engine.abort("x'")
    await assert_undisturbed(engine_pair, spec, *await made_in_all(a, "x"))


async def test_L3_a_run_that_ends_under_a_copy_is_gone(engine_pair: Pair) -> None:
    rig, a, b = engine_pair
    spec = request("x", rig.prompt)
    await bring(engine_pair, "decode", spec)
    copy = await copy_in_progress(engine_pair, spec)
    assert await a.finish("x") == "length"
    assert await refusal_of(copy) == "gone"
    assert a.engine.account().owned == 0
    await b.engine.abort("x'")


async def test_the_run_decodes_on_under_a_copy_and_copied_blocks_are_pinned(engine_pair: Pair) -> None:
    rig, a, b = engine_pair
    spec = request("x", rig.prompt)
    await bring(engine_pair, "decode", spec)
    copy = await copy_in_progress(engine_pair, spec)
    made = len(a.made("x"))
    await a.until("x", lambda p: p.outputs > made + 3)
    a.link.gate.set()
    report = await copy
    assert report.blocks_left > 0
    await b.engine.abort("x'")


async def test_P10_a_cancelled_or_broken_copy_leaves_the_run_as_it_was(engine_pair: Pair) -> None:
    rig, a, b = engine_pair
    spec = request("x", rig.prompt)
    await bring(engine_pair, "decode", spec)
    copy = await copy_in_progress(engine_pair, spec)
    copy.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copy
    a.link.gate.set()
    a.link.is_broken = True
    again = await b.engine.reserve("x''", spec, (), blocks_for(61, rig.block_tokens), a.engine.transfers())
    with pytest.raises(TransferFailed):
        await a.engine.copy("x", again.cached, route(again))
    a.link.is_broken = False
    for slot in ("x'", "x''"):
        await b.engine.abort(slot)
    state = await move(a, b, "x", spec, rig.block_tokens)
    await assert_undisturbed(engine_pair, spec, *await made_after(b, "x'", state))


async def test_A13_a_stale_route_is_refused(engine_pair: Pair) -> None:
    """The reservation ended, its blocks went to others: no late byte may reach them."""
    rig, a, b = engine_pair
    spec, other = request("x", rig.prompt, max_tokens=60), request("other", 40)
    await bring(engine_pair, "decode", spec)
    reserved = await reserve(a, b, "x", spec, rig.block_tokens)
    await b.engine.abort("x'")
    await b.engine.submit("other", other)
    with pytest.raises(TransferFailed):
        await a.engine.copy("x", 0, route(reserved))
    finish = await b.finish("other")
    await emptied(a)
    await assert_undisturbed(engine_pair, other, b.made("other"), finish)


async def test_writes_after_the_adoption_are_refused(engine_pair: Pair) -> None:
    rig, a, b = engine_pair
    spec = request("x", rig.prompt)
    await bring(engine_pair, "decode", spec)
    reserved = await reserve(a, b, "x", spec, rig.block_tokens)
    state = await a.engine.freeze("x")
    await a.engine.copy("x", 0, route(reserved))
    await b.engine.adopt("x'", state)
    with pytest.raises(TransferFailed):
        await a.engine.copy("x", 0, route(reserved))
    await b.engine.adopt("x'", state)
    await assert_undisturbed(engine_pair, spec, *await made_after(b, "x'", state))


# --- reservations --------------------------------------------------------------------------------


async def test_P07_P08_a_reservation_is_all_or_nothing(engine_pair: Pair) -> None:
    rig, _, b = engine_pair
    spec, offered = request("x", rig.prompt), b.engine.transfers()
    first = await b.engine.reserve("one", spec, (), rig.blocks // 2, offered)
    assert (first.blocks, b.engine.account().reserved) == (rig.blocks // 2, rig.blocks // 2)
    assert await b.engine.reserve("one", spec, (), rig.blocks // 2, offered) == first
    with pytest.raises(Refused) as refusal:
        await b.engine.reserve("two", spec, (), rig.blocks // 2 + 1, offered)
    assert refusal.value.code == "no_blocks"
    assert b.engine.account().reserved == rig.blocks // 2
    assert b.engine.load().blocks_reserved == rig.blocks // 2
    assert await b.engine.abort("one") == rig.blocks // 2
    assert await b.engine.abort("one") == 0


async def test_a_reservation_holds_a_slot(engine_pair: Pair) -> None:
    rig, _, b = engine_pair
    offered = b.engine.transfers()
    for i in range(rig.slots):
        await b.engine.reserve(f"r{i}", request("x", rig.prompt), (), 2, offered)
    with pytest.raises(Refused) as refusal:
        await b.engine.reserve("more", request("x", rig.prompt), (), 2, offered)
    assert refusal.value.code == "no_slots"
    await b.engine.submit("x", request("x", 5, max_tokens=2))
    await asyncio.sleep(0.02)
    assert (await b.engine.describe("x")).phase == "waiting"
    for i in range(rig.slots):
        await b.engine.abort(f"r{i}")
    assert await b.finish("x") == "length"


async def test_a_reservation_needs_a_common_transfer(engine_pair: Pair) -> None:
    with pytest.raises(Refused) as refusal:
        await engine_pair.b.engine.reserve("x", request("x"), (), 2, ("carrier pigeon",))
    assert refusal.value.code == "no_transfer"


async def test_a_reservation_is_no_run(engine_pair: Pair) -> None:
    b = engine_pair.b
    await b.engine.reserve("x", request("x"), (), 2, b.engine.transfers())
    assert b.engine.progress() == ()
    assert await b.is_gone("x")
    with pytest.raises(Refused):
        await b.engine.freeze("x")
    await b.engine.thaw("x")
    await b.engine.abort("x")


async def test_adopt_without_a_reservation_is_refused(engine_pair: Pair) -> None:
    rig, a, b = engine_pair
    spec = request("x", rig.prompt)
    await bring(engine_pair, "decode", spec)
    state = await a.engine.freeze("x")
    with pytest.raises(Refused) as refusal:
        await b.engine.adopt("x'", state)
    assert refusal.value.code == "gone"
    await reserve(a, b, "x", spec, rig.block_tokens)
    aborting = asyncio.create_task(b.engine.abort("x'"))
    adopting = asyncio.create_task(b.engine.adopt("x'", state))
    await asyncio.wait({aborting, adopting})
    assert aborting.result() > 0
    assert await b.is_gone("x'")
    assert isinstance(adopting.exception(), Refused)


async def test_B7_no_livelock_between_a_reservation_and_a_preempted_run(engine_pair: Pair) -> None:
    """A holds blocks and waits for KV, B needs them: B waits in peace and goes on when A's lease ends."""
    rig, a, _ = engine_pair
    spec = request("x", rig.prompt, max_tokens=150)
    await a.engine.submit("x", spec)
    await a.until("x", lambda p: p.outputs > 2)
    await a.engine.reserve("arriving", request("y", 21), (), a.engine.account().free, a.engine.transfers())
    stuck, before = await a.engine.describe("x"), None
    while stuck != before:
        await asyncio.sleep(0.1)
        before, stuck = stuck, await a.engine.describe("x")
    assert stuck.outputs < 150
    await a.engine.abort("arriving")
    await assert_undisturbed(engine_pair, spec, *await made_in_all(a, "x"))


# --- aborts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [*PHASES, "frozen"])
async def test_P09_an_abort_works_in_every_phase_and_twice(engine_pair: Pair, phase: str) -> None:
    a = engine_pair.a
    spec = long_enough(engine_pair.rig, phase, {})
    await bring(engine_pair, "decode" if phase == "frozen" else phase, spec)
    if phase == "frozen":
        await a.engine.freeze("x")
    blocks = (await a.engine.describe("x")).blocks
    freed = await a.engine.abort("x")
    assert freed >= blocks
    assert (freed == 0) == (phase in ("waiting", "preempted"))
    assert await a.engine.abort("x") == 0
    assert await a.is_gone("x")
    made = a.made("x")
    await asyncio.sleep(0.02)
    assert a.made("x") == made


async def test_P09_B3_an_abort_on_both_sides_of_a_copy_frees_everything(engine_pair: Pair) -> None:
    rig, a, b = engine_pair
    spec = request("x", rig.prompt, max_tokens=100)
    await bring(engine_pair, "decode", spec)
    copy = await copy_in_progress(engine_pair, spec)
    await asyncio.gather(b.engine.abort("x'"), a.engine.abort("x"), b.engine.abort("x'"), a.engine.abort("x"))
    assert a.engine.account().free == b.engine.account().free == rig.blocks
    assert await refusal_of(copy) == "gone"


async def test_P09_an_abort_under_a_freeze_answers_it(engine_pair: Pair) -> None:
    a = engine_pair.a
    await bring(engine_pair, "decode", request("x", max_tokens=100))
    freezing = asyncio.create_task(a.engine.freeze("x"))
    await asyncio.sleep(0)
    await a.engine.abort("x")
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait({freezing})
    assert freezing.exception() is None or isinstance(freezing.exception(), Refused)


async def test_E5_load_returns_to_nothing_without_new_traffic(engine_pair: Pair) -> None:
    a = engine_pair.a
    for blocker in blockers(engine_pair):
        await a.engine.submit(blocker.request, blocker)
    await a.engine.submit("waits", request("waits"))
    await a.engine.submit("waits too", request("waits too"))
    await a.until("blocker 0", lambda p: p.outputs > 2)
    busy = a.engine.load()
    assert busy.running + busy.waiting == len(blockers(engine_pair)) + 2
    for run in a.engine.progress():
        await a.engine.abort(run.slot)
    idle = a.engine.load()
    assert (idle.running, idle.waiting, idle.blocks_waiting, idle.blocks_head) == (0, 0, 0, 0)
    assert idle.blocks_free == engine_pair.rig.blocks
