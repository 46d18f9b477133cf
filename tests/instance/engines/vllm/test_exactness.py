"""P03 on real vLLM: moved once, moved three times, crashed and replayed: the tokens of the undisturbed run.

Each run is alone in its engine, so that every step computes one row: on a CPU, matrix products of one and of
several rows differ in their last bits, moved or not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
import pytest
import pytest_asyncio
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from midstream.control.errors import Refused
from midstream.instance.engines.vllm.seams import host
from midstream.migration.plan import LIVE, RECOMPUTE
from midstream.migration.protocol.messages import RequestSpec
from tests.contracts.engine_rigs import Bench, move
from tests.instance.engines.vllm.core_requests import RequestMaker
from tests.instance.engines.vllm.pair import SIZES, LinkedEngine, OverlappedEngine, config_of, running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

TOKENS = 60
ATTEMPTS = 3
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 9999}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seed": {"temperature": 0.9, "seed": 123},
    "seed with top_p, top_k and min_p": {"temperature": 1.1, "seed": 7, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "presence and frequency penalties": {"temperature": 0.0, "presence_penalty": 1.2, "frequency_penalty": 0.8},
    "repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.3},
    "seed and all penalties": {
        "temperature": 0.8,
        "seed": 5,
        "presence_penalty": 0.9,
        "frequency_penalty": 0.6,
        "repetition_penalty": 1.1,
    },
    "min_tokens and stop tokens": {
        "temperature": 0.9,
        "seed": 11,
        "min_tokens": 40,
        "stop_token_ids": list(range(100, 300)),
        "ignore_eos": False,
    },
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "seed and logprobs": {"temperature": 0.7, "seed": 3, "logprobs": 2},
    "logit bias, bad and allowed words": {
        "temperature": 0.6,
        "seed": 17,
        "logit_bias": {70: 4.0, 80: -20.0},
        "bad_words": ["et", "a"],
        "allowed_token_ids": list(range(40, 500)),
    },
    "JSON schema": {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    "JSON schema, seed": {"temperature": 1.0, "seed": 2, "structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    "regular expression": {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="[a-f]{30,50}x")},
}
HISTORIES = ("moved", "moved three times", "moved without its KV", "crashed and replayed")


class Engines(NamedTuple):
    a: Bench
    b: Bench
    maker: RequestMaker
    pair: Any
    undisturbed: dict[str, Any]
    """What has been found out already, by feature."""


ENGINES = {
    "one step at a time, prefix cache": (LinkedEngine, True),
    "one step at a time, no prefix cache": (LinkedEngine, False),
    "overlapping steps, prefix cache": (OverlappedEngine, True),
    "overlapping steps, no prefix cache": (OverlappedEngine, False),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    kind, has_prefix_cache = ENGINES[request.param]
    config = config_of(tmp_path_factory.mktemp("tiny"), pace_ms=10, enable_prefix_caching=has_prefix_cache)
    async with running(config, kind) as pair:
        assert {engine.has_overlapping_steps for engine in pair.engines.values()} == {kind is OverlappedEngine}
        maker = RequestMaker(host.engine_config(config.all_engine_args()))
        yield pair, maker, {}


@pytest_asyncio.fixture(loop_scope="module")
async def engines(pair: Any) -> AsyncIterator[Engines]:
    """Both engines with readers; afterwards every block is where it was before (P07)."""
    engines, maker, known = pair
    a, b = (Bench(engines.engines[name], engines.links[name]) for name in ("a", "b"))
    yield Engines(a, b, maker, engines, known)
    for bench in (a, b):
        await bench.close()
    await engines.settle()
    for bench in (a, b):
        account = bench.engine.account()
        assert (account.owned, account.reserved, account.free) == (0, 0, account.total)
        assert await bench.engine.faults() == ()


def result(bench: Bench, slot: str, before: tuple[int, ...] = (), logprobs: tuple[bytes, ...] = ()) -> Any:
    """What a client has seen: ids, logprobs, finish."""
    return before + bench.made(slot), [*logprobs, *bench.logprobs[slot]], bench.finishes[slot]


async def undisturbed(engines: Engines, feature: str, spec: RequestSpec) -> Any:
    if feature not in engines.undisturbed:
        engines.undisturbed[feature] = await run_undisturbed(engines, spec)
    return engines.undisturbed[feature]


async def run_undisturbed(engines: Engines, spec: RequestSpec) -> Any:
    await engines.a.engine.submit("undisturbed", spec)
    await engines.a.finish("undisturbed")
    expected = result(engines.a, "undisturbed")
    for engine in engines.pair.engines.values():
        await engine.reset_prefix_cache()
    return expected


async def moved(engines: Engines, spec: RequestSpec, stops: tuple[int, ...], mode: str = LIVE) -> Any:
    """What a client has seen of a run that was moved at each of these numbers of outputs.

    A run lasts half a second: where other work holds this process up for so long, it ends before it was moved.
    """
    for attempt in range(ATTEMPTS):
        got = await moved_in_time(engines, f"x{attempt}", spec, stops, mode)
        if got is not None:
            return got
    pytest.fail("it ended before it was moved, each time")


async def moved_in_time(engines: Engines, slot: str, spec: RequestSpec, stops: tuple[int, ...], mode: str) -> Any:
    """`None` if it ended too early."""
    here, there = engines.a, engines.b
    await here.engine.submit(slot, spec)
    outputs: tuple[int, ...] = ()
    for stop in stops:
        try:
            await here.until(slot, lambda p, stop=stop: p.outputs >= stop)
            state = await move(here, there, slot, spec, SIZES["block_size"], mode)
        except Refused as refusal:
            assert refusal.code in ("gone", "finished"), refusal
            await here.finish(slot)
            await there.engine.abort(f"{slot}'")
            return None
        there.outputs.setdefault(f"{slot}'", [])[: len(state.outputs)] = state.outputs
        outputs, logprobs = state.outputs, state.logprobs
        here, there, slot = there, here, f"{slot}'"
    await here.finish(slot)
    ids = here.made(slot)
    assert ids[: len(outputs)] == outputs
    return ids, [*logprobs, *here.logprobs[slot]], here.finishes[slot]


async def replayed(engines: Engines, spec: RequestSpec, expected: Any) -> Any:
    """The first part is all that the client got; another engine goes on from there."""
    ids, logprobs, _ = expected
    done = min(25, len(ids) - 1)
    await engines.b.engine.submit("replayed", spec, ids[:done])
    await engines.b.finish("replayed")
    return result(engines.b, "replayed", ids[:done], tuple(logprobs[:done]))


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("feature", FEATURES)
async def test_P03_the_tokens_are_those_of_the_undisturbed_run(engines: Engines, feature: str, history: str) -> None:
    params = SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, **FEATURES[feature]})
    spec = engines.maker.spec("undisturbed", params, prompt_tokens=45)
    expected = await undisturbed(engines, feature, spec)
    assert len(expected[0]) > 8, "too short to be moved three times"
    if history == "crashed and replayed":
        got = await replayed(engines, spec, expected)
        assert without_values(got) == without_values(expected)
    elif history == "moved without its KV":
        got = await moved(engines, spec, (min(25, len(expected[0]) - 5),), RECOMPUTE)
        assert without_values(got) == without_values(expected)
    else:
        stops = (3,) if history == "moved" else (2, 4, 6)
        assert await moved(engines, spec, stops) == expected


def without_values(seen: Any) -> Any:
    """A replay computes the KV of its outputs anew, by another kernel: the values differ in their last digits."""
    ids, logprobs, finish = seen
    return ids, [msgspec.msgpack.decode(entry)[0][0] for entry in logprobs], finish
