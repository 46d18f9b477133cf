"""What stands before vLLM's application: keys, paths, bounds, ids, and which model answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from midstream.api.auth import Keyring
from midstream.api.closing import closing_of
from midstream.api.gateway.vllm.front import Front, Limits
from midstream.api.http_server import Served, serve
from midstream.api.keys import Key, hash_key

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


class Echo:
    """A model whose application says what it was asked."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.metrics = CollectorRegistry()

    async def cards(self) -> list[Any]:
        return [{"id": name} for name in self.names]

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        if scope["path"] == "/v1/early":
            raise RuntimeError("broken before a word")
        await send(START)
        said = {"by": self.names[0], "body": body.decode(), "id": dict(scope["headers"])[b"x-request-id"].decode()}
        await send({"type": "http.response.body", "body": json.dumps(said).encode(), "more_body": True})
        if scope["path"] == "/v1/late":
            raise RuntimeError("broken in the middle")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.asynccontextmanager
async def fronted(*models: Echo, keys: tuple[Key, ...] = (), **limits: int) -> AsyncIterator[tuple[Served, Front]]:
    app = Starlette()
    bounds = Limits(**{"body_bytes_max": 1000, "open_max": 10, **limits})
    front = Front(models or (Echo("a"),), Keyring(keys, host="127.0.0.1"), bounds, closing_of(app), "g1-7")
    app.router.routes.append(Mount("/", front))
    served = await serve(app, "127.0.0.1", 0)
    try:
        yield served, front
    finally:
        await served.stop()


@contextlib.asynccontextmanager
async def asking(*models: Echo, **more: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with fronted(*models, **more) as (served, _), httpx.AsyncClient(base_url=served.url, timeout=20) as http:
        yield http


async def test_the_model_named_answers_and_the_first_where_none_is_named() -> None:
    async with asking(Echo("a"), Echo("b", "b-alias")) as http:
        by = [
            (await http.post("/v1/x", json={"model": model} if model else {})).json()["by"]
            for model in ("b", "b-alias", "a", None, "unknown")
        ]
        listed = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
    assert by == ["b", "b", "a", "a", "a"]
    assert listed == ["a", "b", "b-alias"]


@pytest.mark.parametrize("sent", ["mine.1", None, "no spaces", "x" * 65, ""])
async def test_every_answer_carries_a_request_id(sent: str | None) -> None:
    async with asking() as http:
        answer = await http.post("/v1/x", json={}, headers={} if sent is None else {"X-Request-Id": sent})
    assert answer.headers["x-request-id"] == answer.json()["id"] == ("mine.1" if sent == "mine.1" else "r-g1-7-1")


async def test_unknown_paths_never_reach_vllm() -> None:
    async with asking() as http:
        for path in ("/scale_elastic_ep", "/inference/v1/generate", "/invocations", "/docs", "/openapi.json", "/"):
            assert (await http.post(path, json={})).status_code == 404, path


async def test_keys_and_their_scopes() -> None:
    keys = tuple(Key(name=scope, sha256=hash_key(scope), scopes=(scope,)) for scope in ("generate", "read"))
    shown = {}
    async with asking(keys=keys) as http:
        for key in (None, "wrong", "read", "generate"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            metrics = await http.get("/metrics", headers=headers)
            shown[key] = ((await http.post("/v1/x", json={}, headers=headers)).status_code, metrics.status_code)
    assert shown == {None: (401, 401), "wrong": (401, 401), "read": (403, 200), "generate": (200, 403)}


async def test_a_key_that_is_limited_to_a_class_may_not_ask_for_a_better_one() -> None:
    keys = (Key(name="batch", sha256=hash_key("batch"), scopes=("generate", "class-low")),)
    headers = {"Authorization": "Bearer batch"}
    async with asking(keys=keys) as http:
        answers = [
            await http.post("/v1/x", json=body, headers=headers) for body in ({}, {"priority": 2}, {"priority": 0})
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 403]
    assert answers[2].json()["error"]["type"]


async def test_the_high_class_is_for_keys_that_were_given_it_and_for_all_where_there_are_no_keys() -> None:
    scopes = {"plain": (), "urgent": ("class-high",)}
    keys = tuple(Key(name=name, sha256=hash_key(name), scopes=("generate", *more)) for name, more in scopes.items())
    shown = {}
    async with asking(keys=keys) as http:
        for name in scopes:
            headers = {"Authorization": f"Bearer {name}"}
            shown[name] = (await http.post("/v1/x", json={"priority": -1}, headers=headers)).status_code
    async with asking() as http:
        shown["nobody"] = (await http.post("/v1/x", json={"priority": -1})).status_code
    assert shown == {"plain": 403, "urgent": 200, "nobody": 200}


async def test_P28_bodies_and_open_requests_are_bounded() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(2):
            yield b"x" * 600

    async with asking() as http:
        announced = await http.post("/v1/x", content=b"x" * 1001)
        piecewise = await http.post("/v1/x", content=pieces())
    assert (announced.status_code, piecewise.status_code) == (413, 413)
    async with asking(open_max=0) as http:
        busy = await http.post("/v1/x", json={})
    assert (busy.status_code, busy.headers["retry-after"], busy.json()["error"]["code"]) == (429, "1", 429)


@pytest.mark.parametrize(
    "body",
    [
        '{"kv_transfer_params": {}}',
        '{"\\u006bv_transfer_params": {}}',
        '{"kv_transfer_params": null, "kv_transfer_params": {"do_remote_decode": true}}',
        '{"vllm_xargs": {"ec_transfer_params": 1}}',
        '{"x": NaN, "kv_transfer_params": {}}',
        "[1]",
        "[" * 900,
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    ],
)
async def test_no_spelling_of_internal_parameters_gets_through(body: str) -> None:
    async with asking() as http:
        answer = await http.post("/v1/x", content=body.encode("latin-1"))
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "Bad Request"


@pytest.mark.parametrize("header", ["X-Data-Parallel-Rank", "X-Midstream-Owner", "x-kv-blocks"])
async def test_internal_headers_are_refused(header: str) -> None:
    async with asking() as http:
        assert (await http.post("/v1/x", json={}, headers={header: "1"})).status_code == 400


async def test_P04_an_application_that_breaks_is_an_error_for_the_client_at_any_point() -> None:
    async with asking() as http:
        early, late = await http.post("/v1/early", json={}), await http.post("/v1/late", json={})
        metrics = (await http.get("/metrics")).text
    assert (early.status_code, early.json()["error"]["code"]) == (500, 500)
    assert late.text.endswith('"param": null, "code": 500}}\n\n')
    assert 'midstream_http_answers_total{status="5xx"} 1.0' in metrics
    assert 'midstream_http_answers_total{status="broken"} 1.0' in metrics


async def test_P16_a_closing_face_takes_nothing_new() -> None:
    async with fronted() as (served, _), httpx.AsyncClient(base_url=served.url, timeout=20) as http:
        closing_of(served._app).begin()
        assert (await http.post("/v1/x", json={})).status_code == 503
