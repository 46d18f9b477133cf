"""Bad requests: OpenAI's error object, naming the parameter; nothing admitted, nothing ignored silently."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from midstream.api.gateway.http import FaceSettings, create_openai_app
from midstream.control.adapters.clock import SystemClock
from midstream.control.errors import BadInput
from tests.api.gateway.scripted import ScriptedGateway

JSON = {"content-type": "application/json"}


def client_of(gateway: ScriptedGateway, **settings: Any) -> httpx.AsyncClient:
    app = create_openai_app(gateway, FaceSettings(gateway="g1", incarnation=1, **settings), SystemClock())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and set(response.json()) == {"error"}
    return response.status_code, error["code"], error["param"]


CASES: list[tuple[dict[str, Any], tuple[int, str, str | None]]] = [
    ({"model": "gpt-9"}, (404, "model_not_found", "model")),
    ({"model": None}, (400, "missing_parameter", "model")),
    ({"prompt": None}, (400, "missing_parameter", "prompt")),
    ({"prompt": ""}, (400, "invalid_value", "prompt")),
    ({"prompt": []}, (400, "invalid_value", "prompt")),
    ({"prompt": [5, -1]}, (400, "invalid_value", "prompt")),
    ({"prompt": [5, 32_000]}, (400, "invalid_value", "prompt")),
    ({"prompt": [True]}, (400, "invalid_value", "prompt")),
    ({"prompt": ["a", "b"]}, (400, "unsupported_parameter", "prompt")),
    ({"max_tokens": 0}, (400, "invalid_value", "max_tokens")),
    ({"max_tokens": "5"}, (400, "invalid_value", "max_tokens")),
    ({"max_tokens": 40_000}, (400, "context_length_exceeded", "max_tokens")),
    ({"prompt": [5] * 32_768}, (400, "context_length_exceeded", "max_tokens")),
    ({"max_tokens": 5, "max_completion_tokens": 6}, (400, "invalid_value", "max_tokens")),
    ({"min_tokens": 17}, (400, "invalid_value", "min_tokens")),
    ({"temperature": 2.1}, (400, "invalid_value", "temperature")),
    ({"top_p": 0}, (400, "invalid_value", "top_p")),
    ({"n": 5}, (400, "invalid_value", "n")),
    ({"stop": ["a"] * 5}, (400, "invalid_value", "stop")),
    ({"stop": ""}, (400, "invalid_value", "stop")),
    ({"stop": ["a", ""]}, (400, "invalid_value", "stop")),
    ({"logprobs": 6}, (400, "invalid_value", "logprobs")),
    ({"seed": 2**64}, (400, "invalid_value", "seed")),
    ({"presence_penalty": -3}, (400, "invalid_value", "presence_penalty")),
    ({"stream_options": {"include_usage": True}}, (400, "invalid_value", "stream_options")),
    ({"stream": True, "stream_options": {"x": 1}}, (400, "invalid_value", "stream_options")),
    ({"frobnicate": 1}, (400, "unknown_parameter", "frobnicate")),
    ({"echo": True}, (400, "unsupported_parameter", "echo")),
    ({"logit_bias": {"5": 1}}, (400, "unsupported_parameter", "logit_bias")),
    ({"best_of": 3}, (400, "unsupported_parameter", "best_of")),
    ({"response_format": {"type": "json_object"}}, (400, "unsupported_parameter", "response_format")),
    ({"repetition_penalty": 1.1}, (400, "unsupported_parameter", "repetition_penalty")),
    ({"kv_transfer_params": {"do_remote_prefill": True}}, (400, "forbidden_parameter", "kv_transfer_params")),
    ({"kv_transfer_params": None}, (400, "forbidden_parameter", "kv_transfer_params")),
    ({"request_id": "r-mine"}, (400, "forbidden_parameter", "request_id")),
]


@pytest.mark.parametrize(("change", "expected"), CASES, ids=[str(change)[:40] for change, _ in CASES])
async def test_P03_a_bad_parameter_is_refused_by_name(
    change: dict[str, Any], expected: tuple[int, str, str | None]
) -> None:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", json={"model": "sim", "prompt": "x"} | change)
    assert error_of(response) == expected
    assert gateway.streams == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
async def test_P03_a_bad_chat_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    chat = {"model": "sim", "messages": [{"role": "user", "content": "x"}]}
    async with client_of(ScriptedGateway()) as client:
        response = await client.post("/v1/chat/completions", json=chat | change)
    assert error_of(response) == (400, "invalid_value", param)


async def test_options_that_ask_for_nothing_are_accepted() -> None:
    nothing = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "echo": False, "logit_bias": {}, "best_of": 1,
        "suffix": None, "logprobs": None, "stop": None, "seed": None, "tools": None, "n": 1, "stream": False,
        "response_format": {"type": "text"}, "repetition_penalty": 1.0, "top_k": -1,
    }  # fmt: skip
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        response = await client.post("/v1/completions", json={"model": "sim", "prompt": "x"} | nothing)
    assert response.status_code == 200
    assert gateway.streams[0].spec.sampling.top_k == 0


@pytest.mark.parametrize(
    ("content", "headers", "expected"),
    [
        (b"{", JSON, (400, "malformed_json", None)),
        (b"[1]", JSON, (400, "invalid_type", None)),
        (b"[" * 50_000, JSON, (400, "malformed_json", None)),
        (b'{"model": NaN}', JSON, (400, "malformed_json", None)),
        (b'{"model": "\xff"}', JSON, (400, "malformed_json", None)),
        (b"model=sim", {"content-type": "application/x-www-form-urlencoded"}, (415, "unsupported_media_type", None)),
        (b'"' + b"x" * 100_000 + b'"', JSON, (413, "body_too_large", None)),
        (b"{}", JSON | {"X-Midstream-Epoch": "5"}, (400, "forbidden_header", "x-midstream-epoch")),
        (b"{}", JSON | {"X-Data-Parallel-Rank": "0"}, (400, "forbidden_header", "x-data-parallel-rank")),
        (b"{}", JSON | {"Host": "a/docs?"}, (400, "bad_host", None)),
    ],
)
async def test_P28_a_bad_body_or_header_is_an_openai_error(
    content: bytes, headers: dict[str, str], expected: tuple[int, str, str | None]
) -> None:
    async with client_of(ScriptedGateway(), body_bytes_max=60_000) as client:
        response = await client.post("/v1/completions", content=content, headers=headers)
    assert error_of(response) == expected


async def test_P28_a_body_of_unannounced_length_is_bounded_too() -> None:
    async def pieces():  # type: ignore[no-untyped-def]
        for _ in range(100):
            yield b"x" * 1_000

    async with client_of(ScriptedGateway(), body_bytes_max=60_000) as client:
        response = await client.post("/v1/completions", content=pieces(), headers=JSON)
    assert error_of(response) == (413, "body_too_large", None)


async def test_unknown_routes_and_methods_are_openai_errors_too() -> None:
    async with client_of(ScriptedGateway()) as client:
        assert error_of(await client.get("/v1/embeddings")) == (404, "not_found", None)
        assert error_of(await client.get("/v1/completions")) == (405, "method_not_allowed", None)
        assert error_of(await client.get("/docs")) == (404, "not_found", None)


def test_anonymous_is_for_loopback_only() -> None:
    with pytest.raises(BadInput, match="loopback"):
        create_openai_app(ScriptedGateway(), FaceSettings(gateway="g", incarnation=1, host="0.0.0.0"), SystemClock())
