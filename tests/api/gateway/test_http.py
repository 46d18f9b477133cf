"""The OpenAI face with the real SDK against a real server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import openai
import pytest

from midstream.api.gateway.port import Chunk
from midstream.api.gateway.text import encode_logprobs
from midstream.api.keys import Key, hash_key
from midstream.control.errors import Refused
from tests.api.gateway.scripted import TOKENIZER, ScriptedGateway, client_of, plays, says, serving, words

CHAT = [{"role": "user", "content": "Where is my tea?"}]


@contextlib.asynccontextmanager
async def sdk(gateway: ScriptedGateway, key: str = "none", **settings: object) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(gateway, **settings) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=20) as client,
    ):
        yield client


async def test_models_lists_what_the_gateway_serves() -> None:
    async with sdk(ScriptedGateway(models=("sim", "sim-large"))) as client:
        assert [model.id async for model in await client.models.list()] == ["sim", "sim-large"]


async def test_P06_chat_stream_has_role_usage_and_finish_once() -> None:
    gateway = ScriptedGateway()
    async with sdk(gateway) as client:
        stream = await client.chat.completions.create(
            model="sim", messages=CHAT, stream=True, stream_options={"include_usage": True}, max_tokens=20
        )
        chunks = [chunk async for chunk in stream]
    spec = gateway.streams[0].spec
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == TOKENIZER.decode(words(spec))
    assert [c.choices[0].delta.role for c in chunks if c.choices and c.choices[0].delta.role] == ["assistant"]
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    usage = [c.usage for c in chunks if c.usage]
    assert len(usage) == 1 and chunks[-1].usage and not chunks[-1].choices
    assert (usage[0].prompt_tokens, usage[0].completion_tokens) == (len(spec.prompt), 20)
    assert {c.id for c in chunks} == {f"chatcmpl-{spec.request}"}


async def test_chat_whole_answer_equals_the_streamed_one() -> None:
    async with sdk(ScriptedGateway()) as client:
        whole = await client.chat.completions.create(model="sim", messages=CHAT, max_tokens=9)
        stream = await client.chat.completions.create(model="sim", messages=CHAT, max_tokens=9, stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert whole.choices[0].message.content == text
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage and whole.usage.completion_tokens == 9


async def test_completions_take_text_or_token_ids() -> None:
    gateway = ScriptedGateway()
    async with sdk(gateway) as client:
        for prompt in ("tea", ["tea"], list(TOKENIZER.encode("tea")), [list(TOKENIZER.encode("tea"))]):
            await client.completions.create(model="sim", prompt=prompt)
    assert {stream.spec.prompt for stream in gateway.streams} == {TOKENIZER.encode("tea")}
    assert {stream.spec.sampling.max_tokens for stream in gateway.streams} == {16}


async def test_sampling_parameters_reach_the_gateway_exactly() -> None:
    gateway = ScriptedGateway()
    extra = {"top_k": 5, "stop_token_ids": [77, 88], "ignore_eos": True, "min_tokens": 2, "priority": -3}
    async with sdk(gateway) as client:
        await client.completions.create(
            model="sim", prompt="tea", max_tokens=3, temperature=0.7, top_p=0.9, seed=42, presence_penalty=0.5,
            frequency_penalty=-0.5, logprobs=2, user="somebody", extra_body=extra,
        )  # fmt: skip
    spec = gateway.streams[0].spec
    sampling = spec.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (3, 0.7, 0.9, 42)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.logprobs) == (0.5, -0.5, 2)
    assert (sampling.top_k, sampling.stop_token_ids, sampling.ignore_eos) == (5, (77, 88), True)
    assert (sampling.min_tokens, spec.priority) == (2, -3)


async def test_P03_n_choices_are_independent_requests_with_their_own_seeds() -> None:
    gateway = ScriptedGateway()
    async with sdk(gateway) as client:
        stream = await client.completions.create(
            model="sim", prompt="tea", n=3, seed=5, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
        texts = {0: "", 1: "", 2: ""}
        usage = []
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            usage += [chunk.usage] if chunk.usage else []
        whole = await client.completions.create(model="sim", prompt="tea", n=3, seed=5, max_tokens=6)
    assert [s.spec.sampling.seed for s in gateway.streams[:3]] == [5, 6, 7]
    assert len({s.request for s in gateway.streams}) == 6
    assert texts == {i: TOKENIZER.decode(words(s.spec)) for i, s in enumerate(gateway.streams[:3])}
    assert [choice.text for choice in whole.choices] == list(texts.values())
    assert [u.completion_tokens for u in usage] == [18]


async def test_return_token_ids_gives_each_chunk_its_ids() -> None:
    gateway = ScriptedGateway()
    async with sdk(gateway) as client:
        create = client.completions.create
        stream = await create(model="sim", prompt="x", max_tokens=8, stream=True, extra_body={"return_token_ids": True})
        ids = [token async for c in stream for token in c.choices[0].token_ids]  # type: ignore[attr-defined]
        whole = await create(model="sim", prompt="x", max_tokens=8, extra_body={"return_token_ids": True})
    assert tuple(ids) == words(gateway.streams[0].spec)
    assert whole.choices[0].token_ids == ids  # type: ignore[attr-defined]


async def test_the_request_id_header_names_the_request_to_move() -> None:
    gateway = ScriptedGateway()
    async with sdk(gateway) as client:
        raw = await client.completions.with_raw_response.create(model="sim", prompt="x")
        async with client.completions.with_streaming_response.create(model="sim", prompt="x", stream=True) as streamed:
            streamed_id = streamed.headers["x-request-id"]
    assert (
        [raw.headers["x-request-id"], streamed_id] == [s.request for s in gateway.streams] == ["r-g1-7-1", "r-g1-7-2"]
    )


async def test_P03_stop_string_across_chunks_ends_the_text_and_the_request() -> None:
    gateway = ScriptedGateway(says("tea, E", "N", "D", " and more", " tea"))
    async with sdk(gateway) as client:
        stream = await client.completions.create(model="sim", prompt="x", stream=True, stop=["END", "zzz"])
        chunks = [c async for c in stream]
        whole = await client.completions.create(model="sim", prompt="x", stop="END", max_tokens=99)
    assert "".join(c.choices[0].text for c in chunks) == "tea, " == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage and whole.usage.completion_tokens == len("tea, END")
    assert all(stream.causes[0] == "stop" for stream in gateway.streams)


async def test_P03_nothing_is_held_back_that_turned_out_no_stop() -> None:
    gateway = ScriptedGateway(says("the E", "N", "", " is near", finish="length"))
    async with sdk(gateway) as client:
        whole = await client.completions.create(model="sim", prompt="x", stop=["END"])
    assert whole.choices[0].text == "the EN is near"
    assert whole.choices[0].finish_reason == "length"


async def test_P03_min_tokens_shields_early_stop_strings() -> None:
    gateway = ScriptedGateway(says("END", "abEND", "x"))
    async with sdk(gateway) as client:
        whole = await client.completions.create(model="sim", prompt="x", stop=["END"], extra_body={"min_tokens": 3})
    assert whole.choices[0].text == "ENDab"


async def test_logprobs_of_both_endpoints() -> None:
    tokens = TOKENIZER.encode(" ba bo")
    entries = tuple(encode_logprobs([(t, -0.25), (t, -0.25), (300, float("-inf"))]) for t in tokens)
    gateway = ScriptedGateway(plays(Chunk(ids=tokens, logprobs=entries, finish="stop")))
    async with sdk(gateway) as client:
        completion = await client.completions.create(model="sim", prompt="x", logprobs=2)
        chat = await client.chat.completions.create(model="sim", messages=CHAT, logprobs=True, top_logprobs=2)
    logprobs = completion.choices[0].logprobs
    assert logprobs and logprobs.tokens == [" ba", " bo"] and logprobs.text_offset == [0, 3]
    assert logprobs.token_logprobs == [-0.25, -0.25]
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content and [c.token for c in content] == [" ba", " bo"] and bytes(content[0].bytes or []) == b" ba"
    assert content[0].top_logprobs[1].logprob == -9999.0


async def test_P04_error_after_the_200_is_an_error_event() -> None:
    gateway = ScriptedGateway(plays(Chunk(ids=(300,)), Chunk(error=("engine_failed", "the engine died"))))
    async with sdk(gateway) as client:
        stream = await client.completions.create(model="sim", prompt="x", stream=True)
        got = []
        with pytest.raises(openai.APIError, match="the engine died"):
            async for chunk in stream:
                got.append(chunk)
    assert len(got) == 1


async def test_refusals_have_their_status_and_code() -> None:
    refusals = [Refused("no_capacity", "full"), Refused("overloaded", "busy"), Refused("too_long", "too long")]
    async with sdk(ScriptedGateway(refusals=refusals)) as client:
        with pytest.raises(openai.InternalServerError) as full:
            await client.completions.create(model="sim", prompt="x", stream=True)
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="sim", prompt="x", stream=True)
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="sim", prompt="x")
    assert (full.value.status_code, full.value.code, full.value.response.headers["retry-after"]) == (
        503,
        "no_capacity",
        "1",
    )
    assert long.value.code == "too_long"


async def test_P09_a_refused_choice_ends_the_choices_admitted_before_it() -> None:
    gateway = ScriptedGateway(refusals=[None, None, Refused("no_capacity", "full")])
    async with sdk(gateway) as client:
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model="sim", prompt="x", n=3, stream=True)
    assert len(gateway.streams) == 2 and all(stream.causes for stream in gateway.streams)


async def test_keys_and_scopes() -> None:
    keys = tuple(Key(name=scope, sha256=hash_key(scope * 8), scopes=(scope,)) for scope in ("generate", "read"))
    async with sdk(ScriptedGateway(), key="generate" * 8, keys=keys) as client:
        assert (await client.completions.create(model="sim", prompt="x")).choices
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").completions.create(model="sim", prompt="x")
        with pytest.raises(openai.PermissionDeniedError):
            await client.with_options(api_key="read" * 8).models.list()


CLASSES = (
    ("plain", ()),
    ("usual", ("class-normal",)),
    ("batch", ("class-low",)),
    ("urgent", ("class-high",)),
    ("both", ("class-high", "class-low")),
    ("root", ("admin",)),
)


async def test_a_key_names_its_tenant_and_its_class() -> None:
    keys = tuple(Key(name=name, sha256=hash_key(name * 8), scopes=("generate", *limits)) for name, limits in CLASSES)
    gateway = ScriptedGateway()
    cases = [
        ("plain", None, 0),
        ("plain", 0, 0),
        ("urgent", None, 0),
        ("urgent", -5, -5),
        ("root", -5, -5),
        ("both", None, 1),
        ("usual", None, 0),
        ("usual", 3, 3),
        ("batch", None, 1),
        ("batch", 7, 7),
    ]
    async with sdk(gateway, key="plain" * 8, keys=keys) as client:
        for name, asked, given in cases:
            extra = {} if asked is None else {"priority": asked}
            own = client.with_options(api_key=name * 8)
            assert (await own.completions.create(model="sim", prompt="x", extra_body=extra)).choices
            seen = gateway.streams[-1].spec
            assert (seen.tenant, seen.priority) == (name, given)
        for name, asked in (("plain", -1), ("usual", -1), ("batch", 0), ("both", -1)):
            with pytest.raises(openai.PermissionDeniedError, match="may ask for priority"):
                await client.with_options(api_key=name * 8).completions.create(
                    model="sim", prompt="x", extra_body={"priority": asked}
                )


async def test_a_full_queue_of_a_tenant_is_a_429_that_says_when_to_come_back() -> None:
    gateway = ScriptedGateway(refusals=[Refused("tenant_queue_full", "5 requests of x are waiting")])
    async with client_of(gateway) as client:
        answer = await client.post("/v1/completions", json={"model": "sim", "prompt": "x"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["code"] == "tenant_queue_full"
