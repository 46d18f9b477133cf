"""The live stream of facts: everything once, resumable exactly, bounded, and ended honestly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx

from midstream.control.events import DrainRequested
from tests.api.admin.cluster import Log, code_of, live_client_of, serving, small_cluster


def drain(log: Log, count: int = 1) -> None:
    for _ in range(count):
        log.say("somebody", DrainRequested(operation=f"o{len(log.entries)}", instance="i1", actor="a"))


async def events(response: httpx.Response) -> AsyncIterator[dict[str, str]]:
    """Server-sent events; comments come as {"": text}."""
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if line:
            fields[name] = value
        elif fields:
            yield fields
            fields = {}


async def take(stream: AsyncIterator[dict[str, str]], count: int) -> list[str]:
    """Ids of the next facts."""
    ids: list[str] = []
    async with asyncio.timeout(15):
        while len(ids) < count:
            event = await anext(stream)
            if "id" in event:
                assert json.loads(event["data"])["position"] == event["id"]
                assert json.loads(event["data"])["kind"] == event["event"]
                ids.append(event["id"])
    return ids


async def test_P02_a_resumed_stream_has_every_fact_exactly_once() -> None:
    log = small_cluster()
    everything: list[str] = []
    last = "0-0"
    async with live_client_of(log) as client:
        for count in (3, 30, 500):
            drain(log, count)
            async with client.stream("GET", "/events/stream", headers={"Last-Event-ID": last}) as response:
                stream = events(response)
                drain(log, 5)
                everything += await take(stream, 3)
                drain(log, 5)
                everything += await take(stream, len(log.entries) - len(everything))
                last = everything[-1]
    assert everything == [str(entry.position) for entry in log.entries]


async def test_a_stream_without_a_beginning_has_only_what_is_new() -> None:
    log = small_cluster()
    async with live_client_of(log) as client, client.stream("GET", "/events/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = events(response)
        assert await anext(stream) == {"": "facts"}
        drain(log, 2)
        assert await take(stream, 2) == ["1-5", "1-6"]


async def test_a_filtered_stream_skips_the_rest() -> None:
    log = small_cluster()
    params = {"kind": "DrainRequested", "after": "0-0"}
    async with live_client_of(log) as client, client.stream("GET", "/events/stream", params=params) as response:
        stream = events(response)
        drain(log)
        assert await take(stream, 1) == ["1-5"]
        log.instance("i7")
        drain(log)
        assert await take(stream, 1) == ["1-7"]


async def test_a_silent_stream_sends_comments() -> None:
    log = small_cluster()
    async with live_client_of(log, heartbeat_s=0.05) as client, client.stream("GET", "/events/stream") as response:
        stream = events(response)
        assert await anext(stream) == {"": "facts"}
        async with asyncio.timeout(10):
            assert [await anext(stream) for _ in range(3)] == [{"": "alive"}] * 3
        drain(log)
        assert await take(stream, 1) == ["1-5"]


async def test_P28_streams_are_counted_and_given_back_when_clients_leave() -> None:
    log = small_cluster()
    async with live_client_of(log, streams_max=2) as client:
        for _ in range(3):
            async with client.stream("GET", "/events/stream"), client.stream("GET", "/events/stream"):
                assert code_of(await client.get("/events/stream")) == (503, "too_many_streams")
            async with asyncio.timeout(10):
                while (await _status(client)) == 503:
                    await asyncio.sleep(0.02)


async def _status(client: httpx.AsyncClient) -> int:
    async with client.stream("GET", "/events/stream") as response:
        return response.status_code


async def test_P04_a_closing_server_ends_streams_with_an_error_event() -> None:
    log = small_cluster()
    async with serving(log) as served, httpx.AsyncClient(base_url=f"{served.url}/api/v1", timeout=20) as client:
        async with client.stream("GET", "/events/stream") as response:
            stream = events(response)
            assert await anext(stream) == {"": "facts"}
            stopping = asyncio.create_task(served.stop())
            last = [event async for event in stream][-1]
        await stopping
    assert last["event"] == "error" and json.loads(last["data"])["code"] == "server_closing"
