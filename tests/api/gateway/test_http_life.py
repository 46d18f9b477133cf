"""What happens when clients leave, streams break, or the server stops: raw HTTP against a real server."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import pytest
from starlette.applications import Starlette

from midstream.api.gateway.port import Chunk
from midstream.api.http_server import bind, serve
from midstream.control.errors import BadInput
from tests.api.gateway.scripted import ScriptedGateway, client_of, plays, serving, within

ASK = {"model": "sim", "prompt": "x", "stream": True}
WAITING = plays(Chunk(ids=(300,)), then_wait=True)
HALF = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
)
QUEUED = plays(then_wait=True)


async def events(response: httpx.Response) -> list[str]:
    """The data of every event until the end."""
    return [line.removeprefix("data: ") async for line in response.aiter_lines() if line]


@pytest.mark.parametrize("script", [WAITING, QUEUED], ids=["streaming", "queued"])
@pytest.mark.parametrize("n", [1, 3])
async def test_P09_a_client_that_leaves_a_stream_cancels_at_once(script, n: int) -> None:  # type: ignore[no-untyped-def]
    gateway = ScriptedGateway(script)
    async with client_of(gateway) as client:
        async with client.stream("POST", "/v1/completions", json=ASK | {"n": n}) as response:
            assert response.status_code == 200
            await within(gateway.admitted.wait())
        await within(asyncio.gather(*(stream.cancelled.wait() for stream in gateway.streams)))
    assert [stream.causes[0] for stream in gateway.streams] == ["client"] * n


async def test_P09_a_client_that_leaves_while_waiting_for_a_whole_answer_cancels_at_once() -> None:
    gateway = ScriptedGateway(QUEUED)
    async with client_of(gateway) as client:
        waiting = asyncio.create_task(client.post("/v1/completions", json=ASK | {"stream": False}))
        await within(gateway.admitted.wait())
        waiting.cancel()
        await within(gateway.streams[0].cancelled.wait())
    assert gateway.streams[0].causes[0] == "client"


async def test_P09_a_client_that_does_not_read_and_then_leaves_cancels() -> None:
    filler = Chunk(ids=tuple(range(300, 2_300)))

    async def endless(_):  # type: ignore[no-untyped-def]
        while True:
            yield filler
            await asyncio.sleep(0)

    gateway = ScriptedGateway(endless)
    async with serving(gateway) as served:
        reader, writer = await asyncio.open_connection(served.host, served.port, limit=1024)
        body = json.dumps(ASK).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {served.host}\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await within(gateway.admitted.wait())
        await asyncio.sleep(0.3)
        writer.transport.abort()
        await within(gateway.streams[0].cancelled.wait())
        del reader


async def test_P04_a_stream_that_breaks_off_is_an_error_event_and_no_done() -> None:
    async with client_of(ScriptedGateway(plays(Chunk(ids=(300,))))) as client:
        async with client.stream("POST", "/v1/completions", json=ASK) as response:
            got = await events(response)
        whole = await client.post("/v1/completions", json=ASK | {"stream": False})
    assert "[DONE]" not in got
    assert json.loads(got[-1])["error"]["code"] == whole.json()["error"]["code"] == "stream_broken"
    assert whole.status_code == 500


async def test_P04_a_bug_in_the_core_is_an_error_event_and_no_done() -> None:
    async def buggy(_):  # type: ignore[no-untyped-def]
        yield Chunk(ids=(300,))
        raise RuntimeError("secret detail")

    for n in (1, 2):
        gateway = ScriptedGateway(buggy)
        async with client_of(gateway) as client:
            async with client.stream("POST", "/v1/completions", json=ASK | {"n": n}) as response:
                got = await events(response)
            whole = await client.post("/v1/completions", json=ASK | {"stream": False, "n": n})
        assert "[DONE]" not in got and "secret" not in "".join(got)
        assert json.loads(got[-1])["error"]["code"] == "internal_error"
        assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")
        assert all(stream.causes for stream in gateway.streams)


async def test_P04_error_of_one_choice_ends_all_with_one_event() -> None:
    def by_index(spec):  # type: ignore[no-untyped-def]
        failing = spec.request.endswith(".1")
        return plays(Chunk(error=("engine_failed", "gone")) if failing else Chunk(ids=(300,)), then_wait=not failing)(
            spec
        )

    gateway = ScriptedGateway(by_index)
    ask = ASK | {"n": 2}
    async with client_of(gateway) as client, client.stream("POST", "/v1/completions", json=ask) as response:
        got = await within(events(response))
    assert [json.loads(data)["error"]["code"] for data in got if "error" in json.loads(data)] == ["engine_failed"]
    assert all(stream.causes for stream in gateway.streams)


async def test_P06_done_and_usage_come_once_and_last() -> None:
    async with client_of(ScriptedGateway()) as client:
        ask = ASK | {"n": 2, "max_tokens": 3, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=ask) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            got = await events(response)
    assert got[-1] == "[DONE]" and got.count("[DONE]") == 1
    usages = [json.loads(data)["usage"] for data in got[:-1]]
    assert usages[-1]["completion_tokens"] == 6 and set(map(str, usages[:-1])) == {"None"}


async def test_P04_a_closing_server_tells_its_streams() -> None:
    gateway = ScriptedGateway(WAITING)
    async with serving(gateway) as served, httpx.AsyncClient(base_url=served.url, timeout=20) as client:
        async with client.stream("POST", "/v1/completions", json=ASK) as response:
            whole = asyncio.create_task(client.post("/v1/completions", json=ASK | {"stream": False}))
            while len(gateway.streams) < 2:
                await asyncio.sleep(0.01)
            stopping = asyncio.create_task(served.stop())
            got = await within(events(response))
            refused = await whole
        await stopping
    assert json.loads(got[-1])["error"]["code"] == refused.json()["error"]["code"] == "server_closing"
    assert refused.status_code == 503 and "[DONE]" not in got
    assert {stream.causes[0] for stream in gateway.streams} == {"shutdown"}


async def test_an_open_connection_does_not_hold_up_the_stop_and_stop_may_be_called_twice() -> None:
    async with serving(ScriptedGateway()) as served:
        async with httpx.AsyncClient(base_url=served.url) as client:
            assert (await client.get("/health")).json() == {"status": "ok"}
            await within(served.stop())
        await within(served.stop())
        with pytest.raises(OSError, match="111"):
            await asyncio.open_connection(served.host, served.port)


async def test_P30_a_free_port_is_taken_and_told_and_a_taken_one_is_one_clear_line() -> None:
    first = await serve(Starlette(), "127.0.0.1", 0)
    assert first.port > 0 and first.url == f"http://127.0.0.1:{first.port}"
    for host, port in (("127.0.0.1", first.port), ("127.0.0.1", 70_000), ("203.0.113.1", 0), ("no such host", 0)):
        with pytest.raises(BadInput, match=f"cannot listen on {host}:{port}: ") as refused:
            bind(host, port)
        assert "\n" not in str(refused.value)
    await first.stop()
    second = await serve(Starlette(), "127.0.0.1", first.port)
    await second.stop()


async def test_P28_half_a_request_does_not_hold_a_connection_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.api.http_server.READ_S", 0.2)
    async with serving(ScriptedGateway()) as served:
        loop = asyncio.get_running_loop()
        for start in (
            b"",
            b"GET /health HTT",
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{",
        ):
            with socket.socket() as silent:
                silent.setblocking(False)
                await loop.sock_connect(silent, (served.host, served.port))
                await loop.sock_sendall(silent, start)
                while await within(loop.sock_recv(silent, 1000)):
                    pass


async def test_P28_open_requests_are_bounded_and_counted() -> None:
    gateway = ScriptedGateway(WAITING)
    async with client_of(gateway, open_max=1) as client:
        async with client.stream("POST", "/v1/completions", json=ASK):
            await within(gateway.admitted.wait())
            refused = await client.post("/v1/completions", json=ASK)
            during = (await client.get("/metrics")).text
        await within(gateway.streams[0].cancelled.wait())
        await asyncio.sleep(0.05)
        after = (await client.get("/metrics")).text
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    assert "midstream_http_open_requests 1.0" in during and "midstream_http_open_requests 0.0" in after
    assert 'midstream_http_requests_total{outcome="cancelled"} 1.0' in after
