"""What an engine cannot carry on exactly it refuses, with a code, before a byte moves; and it lives on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from midstream.control.errors import BadInput, Refused
from midstream.instance.engines.vllm.engine import VllmEngine
from midstream.instance.engines.vllm.seams import host
from midstream.migration.protocol.messages import RequestSpec
from tests.instance.engines.vllm.core_requests import RequestMaker
from tests.instance.engines.vllm.pair import config_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

OFFERED = ("rpc",)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[VllmEngine, RequestMaker]]:
    config = config_of(tmp_path_factory.mktemp("tiny"), pace_ms=5)
    engine = VllmEngine(config)
    await engine.start()
    yield engine, RequestMaker(host.engine_config(config.all_engine_args()))
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(made: tuple[VllmEngine, RequestMaker]) -> AsyncIterator[VllmEngine]:
    engine, _ = made
    before = engine.account()
    yield engine
    for run in engine.progress():
        await engine.abort(run.slot)
    assert await engine.faults() == ()
    assert engine.account() == before


def altered(maker: RequestMaker, params: SamplingParams | None = None, **changes: Any) -> RequestSpec:
    """A plain request with some fields of vLLM's own form changed."""
    spec = maker.spec("x", params or SamplingParams(max_tokens=20, temperature=0.0), prompt_tokens=40)
    request = host.decode_request(spec.payload)
    for name, value in changes.items():
        setattr(request, name, value)
    return msgspec.structs.replace(spec, payload=host.encode_request(request))


KINDS: dict[str, dict[str, Any]] = {
    "lora": {"lora_request": LoRARequest("adapter", 1, "/nowhere")},
    "pooling": {"sampling_params": None, "pooling_params": PoolingParams(task="embed")},
    "prompt_embeds": {"prompt_embeds": torch.zeros(40, 8)},
    "streaming_input": {"resumable": True},
}


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # vLLM decoding a tensor
@pytest.mark.parametrize("code", KINDS)
async def test_P03_a_kind_of_request_that_cannot_be_carried_on_is_refused(
    made: tuple[VllmEngine, RequestMaker], engine: VllmEngine, code: str
) -> None:
    spec = altered(made[1], **KINDS[code])
    with pytest.raises(Refused) as refusal:
        await engine.submit("x", spec)
    assert refusal.value.code == code
    with pytest.raises(Refused) as refusal:
        await engine.reserve("y", spec, (), 2, OFFERED)
    assert refusal.value.code == code


async def test_what_belongs_to_the_engines_is_not_taken_from_clients(
    made: tuple[VllmEngine, RequestMaker], engine: VllmEngine
) -> None:
    params = SamplingParams(max_tokens=5, extra_args={"kv_transfer_params": {"do_remote_prefill": True}})
    with pytest.raises(Refused, match="bad_request"):
        await engine.submit("x", altered(made[1], params))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01\x02\x03", msgspec.msgpack.encode({"a": 1})])
async def test_P28_bytes_that_are_no_request_are_refused(
    made: tuple[VllmEngine, RequestMaker], engine: VllmEngine, payload: bytes
) -> None:
    spec = msgspec.structs.replace(altered(made[1]), payload=payload or b"\x90")
    with pytest.raises(Refused, match="bad_request"):
        await engine.submit("x", spec)


async def test_token_ids_outside_the_vocabulary_are_refused(
    made: tuple[VllmEngine, RequestMaker], engine: VllmEngine
) -> None:
    spec = msgspec.structs.replace(altered(made[1]), prompt=(5, 100_000), payload=b"")
    with pytest.raises(Refused, match="bad_request"):
        await engine.submit("x", spec)


async def test_prompt_logprobs_hold_a_run_until_its_first_token(
    made: tuple[VllmEngine, RequestMaker], engine: VllmEngine
) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, prompt_logprobs=1)
    spec = altered(made[1], params)
    with pytest.raises(Refused) as refusal:
        await engine.reserve("y", spec, (), 2, OFFERED)
    assert refusal.value.code == "prompt_logprobs"


async def test_a_paused_engine_takes_no_reservation(made: tuple[VllmEngine, RequestMaker], engine: VllmEngine) -> None:
    spec = altered(made[1])
    await engine.pause()
    with pytest.raises(Refused) as refusal:
        await engine.reserve("y", spec, (), 2, OFFERED)
    assert refusal.value.code == "paused"
    await engine.resume()
    await engine.reserve("y", spec, (), 2, OFFERED)
    await engine.abort("y")


async def test_outputs_that_break_their_grammar_end_the_replay_alone(
    made: tuple[VllmEngine, RequestMaker], engine: VllmEngine
) -> None:
    params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-f]{30}"))
    other = altered(made[1], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    await engine.submit("other", other)
    await engine.submit("broken", altered(made[1], params), (500, 501))
    finishes: dict[str, str] = {}
    async with asyncio.timeout(60):
        while len(finishes) < 2:
            finishes |= {output.slot: output.finish for output in await engine.outputs() if output.finish is not None}
    assert finishes == {"other": "length", "broken": "error:engine_failed"}


async def test_an_engine_without_the_clusters_secret_does_not_start(made: tuple[VllmEngine, RequestMaker]) -> None:
    with pytest.raises(BadInput, match="secret"):
        VllmEngine(msgspec.structs.replace(made[0].config, secret=b""))
