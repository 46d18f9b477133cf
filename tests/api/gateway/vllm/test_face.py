"""vLLM's application over a scripted gateway, asked with the real SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from midstream.api.gateway.port import Chunk
from midstream.api.gateway.vllm.face import VllmFace
from midstream.api.keys import Key, hash_key
from midstream.control.errors import Refused
from midstream.migration.protocol.messages import RequestSpec
from tests.api.gateway.scripted import plays
from tests.api.gateway.vllm.rig import (
    CHAT,
    NAME,
    CheckedScriptedGateway,
    ids_of,
    payload,
    row,
    says,
    sdk,
    serving,
    until,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),  # vLLM reads its own old field
]

SAID = "The tea is on the table, beside the window."
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


async def test_P06_a_streamed_chat_has_one_role_all_its_text_one_finish_and_right_usage(
    face: VllmFace, gateway: CheckedScriptedGateway, client: openai.AsyncOpenAI
) -> None:
    gateway.play(says(face, SAID))
    stream = await client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=100, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == SAID
    assert sum(delta.role is not None for delta in deltas) == 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert [(u.prompt_tokens, u.completion_tokens) for u in usages] == [
        (len(gateway.streams[0].spec.prompt), len(ids_of(face, SAID)))
    ]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_midstream_request_is_the_one_that_vllm_named(
    gateway: CheckedScriptedGateway, client: openai.AsyncOpenAI
) -> None:
    answer = await client.completions.create(
        model=NAME, prompt="Tea", max_tokens=5, seed=3, temperature=0.5, extra_headers={"X-Request-Id": "my-own.1"}
    )
    spec = gateway.streams[0].spec
    assert answer.id == "cmpl-my-own.1"
    assert spec.request.startswith("cmpl-my-own.1-")
    assert (spec.sampling.max_tokens, spec.sampling.seed, spec.sampling.temperature) == (5, 3, 0.5)
    request = payload(spec)
    assert request.request_id == spec.request
    assert tuple(request.prompt_token_ids) == spec.prompt
    assert request.sampling_params.seed == 3


async def test_P03_choices_are_requests_of_their_own_with_seeds_of_their_own(
    gateway: CheckedScriptedGateway, client: openai.AsyncOpenAI
) -> None:
    answer = await client.completions.create(model=NAME, prompt="Tea", max_tokens=4, n=2, seed=11)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text != answer.choices[1].text
    assert answer.usage.completion_tokens == 8
    names = [stream.request for stream in gateway.streams]
    assert [name[:2] for name in names] == ["0_", "1_"]
    assert names[0][2:] == names[1][2:]
    assert [payload(stream.spec).sampling_params.seed for stream in gateway.streams] == [11, 12]


async def test_P03_logprobs_arrive_as_the_engine_made_them(
    face: VllmFace, gateway: CheckedScriptedGateway, client: openai.AsyncOpenAI
) -> None:
    first, second = ids_of(face, " tea table")
    rows = (row((first, -0.25), (second, -1.5), (first, -0.25)), row((second, -3.0), (first, -0.5), (44, -2.0), rank=3))
    gateway.play(plays(Chunk(ids=(first,), logprobs=rows[:1]), Chunk(ids=(second,), logprobs=rows[1:], finish="stop")))
    answer = await client.chat.completions.create(model=NAME, messages=CHAT, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [(entry.token, entry.logprob) for entry in content] == [(" tea", -0.25), (" table", -3.0)]
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [(" tea", -0.25), (" table", -1.5)]
    assert gateway.streams[0].spec.sampling.logprobs == 2


async def test_P03_a_stop_string_across_chunks_ends_the_request_well(
    face: VllmFace, gateway: CheckedScriptedGateway, client: openai.AsyncOpenAI
) -> None:
    gateway.play(says(face, SAID, per_chunk=3))
    stream = await client.chat.completions.create(model=NAME, messages=CHAT, stop=["table, beside"], stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The tea is on the "
    assert chunks[-1].choices[0].finish_reason == "stop"
    await until(lambda: gateway.streams[0].causes)
    assert gateway.streams[0].causes == ["stop"]


@pytest.mark.parametrize(
    ("finish", "shown"), [("stop:2", ("stop", 2)), ("length", ("length", None)), ("stop", ("stop", None))]
)
async def test_the_reason_of_the_end_is_the_engines(
    gateway: CheckedScriptedGateway, client: openai.AsyncOpenAI, finish: str, shown: tuple[str, int | None]
) -> None:
    gateway.play(plays(Chunk(ids=(500, 501)), Chunk(finish=finish)))
    choice = (await client.completions.create(model=NAME, prompt="Tea")).choices[0]
    assert (choice.finish_reason, choice.model_extra["stop_reason"]) == shown


async def test_a_json_schema_reaches_the_engine(gateway: CheckedScriptedGateway, client: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    await client.chat.completions.create(
        model=NAME,
        messages=CHAT,
        max_tokens=4,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
    )
    assert payload(gateway.streams[0].spec).sampling_params.structured_outputs.json == schema


@pytest.mark.parametrize("is_stream", [False, True])
async def test_tool_calls_are_parsed(
    face: VllmFace, gateway: CheckedScriptedGateway, client: openai.AsyncOpenAI, is_stream: bool
) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    gateway.play(says(face, call))
    asked = {"model": NAME, "messages": CHAT, "tools": [WEATHER]}
    if is_stream:
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
        parts = [call.function for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        name = "".join(part.name or "" for part in parts)
        arguments = "".join(part.arguments or "" for part in parts)
        finish = chunks[-1].choices[0].finish_reason
    else:
        choice = (await client.chat.completions.create(**asked)).choices[0]
        name, arguments = choice.message.tool_calls[0].function.name, choice.message.tool_calls[0].function.arguments
        finish = choice.finish_reason
    assert (name, arguments.replace(" ", ""), finish) == ("get_weather", '{"city":"Paris"}', "tool_calls")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_P09_a_client_that_leaves_cancels_every_choice(
    face: VllmFace, gateway: CheckedScriptedGateway, is_stream: bool
) -> None:
    gateway.play(plays(Chunk(ids=(500,)), then_wait=True))
    body = {"model": NAME, "messages": CHAT, "n": 2, "stream": is_stream}
    async with httpx.AsyncClient(base_url=face.url, timeout=30) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await until(lambda: len(gateway.streams) == 2)
        await asyncio.sleep(0.1)
        asking.cancel()
        await until(lambda: all(stream.causes for stream in gateway.streams))
    assert [stream.causes for stream in gateway.streams] == [["client"], ["client"]]


async def test_other_endpoints_of_vllm_are_there(
    face: VllmFace, gateway: CheckedScriptedGateway, client: openai.AsyncOpenAI
) -> None:
    assert [model.id async for model in client.models.list()] == [NAME]
    gateway.play(says(face, SAID))
    answer = await client.responses.create(model=NAME, input="Where is my tea?")
    assert answer.output_text == SAID
    async with httpx.AsyncClient(base_url=face.url, timeout=30) as http:
        message = await http.post("/v1/messages", json={"model": NAME, "max_tokens": 50, "messages": CHAT})
        assert message.json()["content"][0]["text"] == SAID
        tokens = (await http.post("/tokenize", json={"model": NAME, "prompt": SAID})).json()["tokens"]
        assert tuple(tokens) == ids_of(face, SAID)
        text = (await http.post("/detokenize", json={"model": NAME, "tokens": tokens})).json()["prompt"]
        assert text == SAID
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/version")).json()["version"].startswith("0.")


async def test_P21_the_numbers_of_running_requests_fall_to_zero(
    face: VllmFace, gateway: CheckedScriptedGateway, client: openai.AsyncOpenAI
) -> None:
    async def shown(http: httpx.AsyncClient) -> dict[str, float]:
        lines = (await http.get("/metrics")).text.splitlines()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting{", "vllm:generation_tokens_total")
        return {name: float(line.rsplit(" ", 1)[1]) for line in lines for name in names if line.startswith(name)}

    go = asyncio.Event()

    async def script(_: RequestSpec) -> AsyncIterator[Chunk]:
        yield Chunk(ids=(500,))
        await go.wait()
        yield Chunk(ids=(501,), finish="stop")

    gateway.play(script)
    async with httpx.AsyncClient(base_url=face.url, timeout=30) as http:
        before = await shown(http)
        asking = asyncio.create_task(client.completions.create(model=NAME, prompt="Tea"))
        await until(lambda: gateway.streams)
        await asyncio.sleep(0.1)
        during = await shown(http)
        go.set()
        await asking
        after = await shown(http)
    assert (before["vllm:num_requests_running"], during["vllm:num_requests_running"]) == (0, 1)
    assert (after["vllm:num_requests_running"], after["vllm:num_requests_waiting{"]) == (0, 0)
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 2


async def test_the_callers_key_is_its_tenant_and_bounds_its_class_through_vllms_application() -> None:
    gateway = CheckedScriptedGateway()
    keys = (Key(name="batch", sha256=hash_key("batch"), scopes=("generate", "class-low")),)
    async with serving(gateway, keys=keys) as face, sdk(face, "batch") as client:
        await client.completions.create(model=NAME, prompt="Tea", max_tokens=3)
        stream = await client.completions.create(
            model=NAME, prompt="Tea", max_tokens=3, stream=True, extra_body={"priority": 9}
        )
        assert [chunk async for chunk in stream]
        for better in (-1, "-1", -1.0):
            with pytest.raises(openai.PermissionDeniedError):
                await client.completions.create(model=NAME, prompt="Tea", max_tokens=3, extra_body={"priority": better})
        gateway.closed = Refused("tenant_queue_full", "5 requests of batch are waiting")
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model=NAME, prompt="Tea", max_tokens=3, stream=True)
    assert [(one.spec.tenant, one.spec.priority) for one in gateway.streams] == [("batch", 1), ("batch", 9)]
    assert refused.value.response.headers["retry-after"] == "1"
