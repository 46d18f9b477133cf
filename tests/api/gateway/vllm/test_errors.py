"""Refusals and failures: as an HTTP status while there is none yet, as an explicit error event after (P04)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from midstream.api.gateway.port import Chunk
from midstream.api.gateway.vllm.face import VllmFace
from midstream.control.errors import Refused
from tests.api.gateway.scripted import one_by_one, plays
from tests.api.gateway.vllm.rig import CHAT, NAME, CheckedScriptedGateway, serving, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),  # vLLM reads its own old field
]

LOST = plays(Chunk(ids=(500, 501)), Chunk(error=("no_capacity", "no instance could take the request on")))


async def events(face: VllmFace, path: str, **body: Any) -> tuple[int, list[Any]]:
    """Status and the decoded events of a stream."""
    async with httpx.AsyncClient(base_url=face.url, timeout=30) as http:
        response = await http.post(path, json={"model": NAME, "stream": True, **body})
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return response.status_code, [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"), [("no_capacity", 503), ("draining", 503), ("overloaded", 429), ("too_long", 400)]
)
async def test_P04_a_refusal_is_a_status_also_for_a_stream(
    face: VllmFace, gateway: CheckedScriptedGateway, code: str, status: int, is_stream: bool
) -> None:
    gateway.closed = Refused(code, "because")
    async with httpx.AsyncClient(base_url=face.url, timeout=30) as http:
        for path, body in (("chat/completions", {"messages": CHAT}), ("completions", {"prompt": "Tea"})):
            response = await http.post(f"/v1/{path}", json={"model": NAME, "stream": is_stream, **body})
            assert response.status_code == status, response.text
            assert response.json()["error"]["code"] == status
            assert response.json()["error"]["message"] == f"{code}: because"
            assert (response.headers.get("retry-after") == "1") == (status in {429, 503})
    assert gateway.streams == []


async def test_health_is_the_gateways(face: VllmFace, gateway: CheckedScriptedGateway) -> None:
    async with httpx.AsyncClient(base_url=face.url, timeout=30) as http:
        shown = []
        for closed in (None, Refused("no_capacity", ""), Refused("overloaded", ""), Refused("draining", "")):
            gateway.closed = closed
            shown.append((await http.get("/health")).status_code)
    assert shown == [200, 503, 200, 503]


async def test_P04_a_late_refusal_of_one_choice_ends_all_of_them(
    gateway: CheckedScriptedGateway, client: openai.AsyncOpenAI
) -> None:
    gateway.play(one_by_one, None, Refused("no_capacity", "full"))
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model=NAME, prompt="Tea", n=2, max_tokens=200)
    assert caught.value.status_code == 503
    await until(lambda: gateway.streams[0].causes)
    assert gateway.streams[0].causes == ["client"]


async def test_P04_a_late_refusal_of_a_stream_is_an_error_event(
    face: VllmFace, gateway: CheckedScriptedGateway
) -> None:
    gateway.play(one_by_one, Refused("no_capacity", "full"))
    status, said = await events(face, "/v1/chat/completions", messages=CHAT)
    assert status == 200
    assert said[0]["error"]["code"] == 503
    assert "full" in said[0]["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"), [("chat/completions", {"messages": CHAT}), ("completions", {"prompt": "Tea"})]
)
async def test_P04_a_stream_that_fails_says_so_and_never_ends_as_if_it_were_whole(
    face: VllmFace, gateway: CheckedScriptedGateway, path: str, body: dict[str, Any]
) -> None:
    gateway.play(LOST)
    status, said = await events(face, f"/v1/{path}", **body)
    assert status == 200
    errors = [event["error"] for event in said if event != "[DONE]" and "error" in event]
    assert [error["code"] for error in errors] == [503]
    assert "no_capacity: no instance could take the request on" in errors[0]["message"]
    finishes = [c["finish_reason"] for event in said if event != "[DONE]" for c in event.get("choices", ())]
    assert not any(finishes)


async def test_P04_a_response_stream_that_fails_says_so(face: VllmFace, gateway: CheckedScriptedGateway) -> None:
    gateway.play(LOST)
    status, said = await events(face, "/v1/responses", input="Where is my tea?")
    assert status == 200
    assert "error" in said[-1]
    assert not any(event.get("type") == "response.completed" for event in said)


async def test_P04_a_failed_choice_fails_the_request_and_cancels_the_others(
    gateway: CheckedScriptedGateway, client: openai.AsyncOpenAI
) -> None:
    async def script(spec: Any) -> Any:
        yield Chunk(ids=(500,))
        if spec.request.startswith("1_"):
            yield Chunk(error=("deadline", "not finished within 1 s"))
        await asyncio.Event().wait()

    gateway.play(script)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model=NAME, prompt="Tea", n=3, max_tokens=200)
    assert caught.value.status_code == 504
    assert [stream.causes for stream in gateway.streams] == [["client"], [], ["client"]]


async def test_P14_a_stream_that_cannot_be_read_fails_alone(
    gateway: CheckedScriptedGateway, client: openai.AsyncOpenAI
) -> None:
    gateway.play(plays(Chunk(ids=(500,), logprobs=(b"\xc1",))))
    with pytest.raises(openai.InternalServerError):
        await client.completions.create(model=NAME, prompt="Tea", logprobs=1)
    gateway.play(one_by_one)
    assert (await client.completions.create(model=NAME, prompt="Tea", max_tokens=3)).usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "kv_transfer_params"),
        ({"prompt_logprobs": 2}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"n": 17}, "n"),
    ],
)
async def test_what_is_not_for_clients_or_not_exact_is_refused_by_name(
    gateway: CheckedScriptedGateway, client: openai.AsyncOpenAI, extra: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=NAME, messages=CHAT, extra_body=extra)
    assert caught.value.param == param
    assert gateway.streams == []


async def test_an_unknown_model_and_a_bad_body_are_vllms_own_errors(
    face: VllmFace, gateway: CheckedScriptedGateway
) -> None:
    async with httpx.AsyncClient(base_url=face.url, timeout=30) as http:
        unknown = await http.post("/v1/completions", json={"model": "none", "prompt": "Tea"})
        too_long = await http.post("/v1/completions", json={"model": NAME, "prompt": [7] * 3000})
        bad = await http.post("/v1/completions", content=b'{"prompt": NaN}')
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFoundError")
    assert (too_long.status_code, too_long.json()["error"]["type"]) == (400, "BadRequestError")
    assert bad.status_code == 400
    assert gateway.streams == []


async def test_P16_a_closing_face_ends_open_streams_with_an_error() -> None:
    gateway = CheckedScriptedGateway(plays(Chunk(ids=(500,)), then_wait=True))
    async with serving(gateway) as face:
        asking = asyncio.create_task(events(face, "/v1/chat/completions", messages=CHAT, n=2))
        await until(lambda: len(gateway.streams) == 2)
        await asyncio.sleep(0.1)
        await face.stop()
        status, said = await asking
    assert status == 200
    errors = [event["error"]["message"] for event in said if event != "[DONE]" and "error" in event]
    assert errors == ["shutdown: the server is shutting down"]
    assert {cause for stream in gateway.streams for cause in stream.causes} <= {"shutdown", "client"}
    assert all(stream.causes for stream in gateway.streams)
