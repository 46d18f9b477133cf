"""Traces are read exactly or refused by line; playing one sends what it says, when it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from midstream.api.http_server import serve
from midstream.api.traces import TraceRow, load_trace, shipped_traces, window
from midstream.api.traces.load import parse_trace
from midstream.api.traces.send import SendPlan, Sent, prompt_of, send_trace
from midstream.control.errors import BadInput, MidstreamError, UnknownThing

HEADER = "arrival_s,prompt_tokens,output_tokens"


REQUESTS = {
    "azure_code_2023": 8_819,
    "azure_conv_2023": 19_366,
    "mooncake_conversation_2025": 12_031,
    "mooncake_synthetic_2025": 3_993,
    "servegen_language_mlarge_sampled": 16_279,
    "servegen_reason_r1_sampled": 14_535,
}


@pytest.mark.parametrize("name", REQUESTS)
def test_the_shipped_traces_are_whole_small_and_attributed(name: str) -> None:
    assert shipped_traces() == tuple(sorted(REQUESTS))
    assert len(load_trace(name)) == REQUESTS[name]
    folder = Path(__file__).parents[2] / "api" / "traces"
    assert (folder / f"{name}.csv").stat().st_size < 1_000_000
    assert f"`{name}.csv`" in (folder / "README.md").read_text()


def test_a_shipped_trace_is_read_exactly() -> None:
    rows = load_trace("azure_conv_2023")
    assert len(rows) == 19_366
    assert rows[0] == TraceRow(0.0, 374, 44)
    assert sum(row.prompt_tokens for row in rows) == 22_361_870
    assert [row.arrival_s for row in rows] == sorted(row.arrival_s for row in rows)


def test_the_shipped_trace_is_attributed() -> None:
    folder = Path(__file__).parents[2] / "api" / "traces"
    assert "Attribution 4.0 International" in (folder / "CC-BY-4.0.txt").read_text()
    for licence in ("Apache-2.0-Mooncake.txt", "Apache-2.0-ServeGen.txt"):
        assert "Apache License" in (folder / licence).read_text()


def test_a_file_with_more_columns_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"{HEADER},client,colour\n2.5,10,20,7,red\n1.5,1,2,8,blue\n")
    assert load_trace(str(path)) == (TraceRow(1.5, 1, 2, client="8"), TraceRow(2.5, 10, 20, client="7"))


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["arrival_s,prompt_tokens", "1,2"], "no column output_tokens"),
        ([HEADER], "no rows"),
        ([], "no column"),
        ([HEADER, "0,1,2", "x,1,2"], "line 3"),
        ([HEADER, "0,1"], "line 2"),
        ([HEADER, "-1,1,2"], "line 2"),
        ([HEADER, "nan,1,2"], "line 2"),
        ([HEADER, "0,0,2"], "line 2"),
        ([HEADER, "0,1,1.5"], "line 2"),
    ],
)
def test_a_bad_trace_is_refused_by_line(lines: list[str], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        parse_trace(lines, "t")


def test_an_unknown_trace_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownThing, match="azure_conv_2023"):
        load_trace("nothing")
    with pytest.raises(BadInput, match="cannot be read"):
        load_trace(str(tmp_path))


def test_a_window_counts_from_its_start() -> None:
    rows = (TraceRow(1.0, 1, 1), TraceRow(5.0, 2, 2), TraceRow(9.0, 3, 3))
    assert window(rows, start_s=4.0, seconds=5.0) == (TraceRow(1.0, 2, 2),)


def test_prompts_are_the_same_in_every_run_and_differ_between_rows() -> None:
    assert prompt_of(3, 50, seed=1) == prompt_of(3, 50, seed=1)
    assert prompt_of(3, 50, seed=1) != prompt_of(4, 50, seed=1)
    assert prompt_of(3, 50, seed=1) != prompt_of(3, 50, seed=2)


class Endpoint:
    """A small OpenAI endpoint that remembers what it was asked. `cut` ends streams without `[DONE]`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.sessions: list[str | None] = []
        self.cut = False
        self.app = Starlette(
            routes=[Route("/v1/models", self.models), Route("/v1/completions", self.complete, methods=["POST"])]
        )

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "toy"}]})

    async def complete(self, request: Request) -> StreamingResponse | JSONResponse:
        body = await request.json()
        self.bodies.append(body)
        self.sessions.append(request.headers.get("X-Session-ID"))
        if body["max_tokens"] == 13:
            return JSONResponse({"error": {"message": "unlucky"}}, status_code=400)
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, int]) -> AsyncIterator[str]:
        for index in range(body["max_tokens"]):
            await asyncio.sleep(0)
            yield f"data: {json.dumps({'choices': [{'token_ids': [index]}]})}\n\n"
        if not self.cut:
            yield "data: [DONE]\n\n"


@pytest.fixture
async def endpoint() -> AsyncIterator[tuple[Endpoint, str]]:
    made = Endpoint()
    served = await serve(made.app, "127.0.0.1", 0)
    yield made, served.url
    await served.stop()


async def test_a_played_trace_sends_what_it_says(endpoint: tuple[Endpoint, str]) -> None:
    made, url = endpoint
    heard: list[Sent] = []
    rows = (TraceRow(0.0, 5, 3), TraceRow(0.2, 7, 2))
    sent = await send_trace(rows, SendPlan(url=url, speed=10), heard.append)
    assert [one.token_ids for one in sent] == [(0, 1, 2), (0, 1)]
    assert [one.error for one in sent] == [None, None]
    assert sorted(one.row for one in heard) == [0, 1]
    first = made.bodies[0]
    assert first["prompt"] == prompt_of(0, 5, 0)
    assert (first["model"], first["ignore_eos"], first["stream"]) == ("toy", True, True)


async def test_who_asks_how_urgently_and_what_is_shared_is_sent_too(endpoint: tuple[Endpoint, str]) -> None:
    made, url = endpoint
    rows = (
        TraceRow(0.0, 1_000, 1, client="ann", priority=-1, content=(7, 8)),
        TraceRow(0.1, 1_100, 1, client="böb", content=(7, 9, 10)),
        TraceRow(0.2, 5, 1),
    )
    await send_trace(rows, SendPlan(url=url), lambda _: None)
    first, second, third = (body["prompt"] for body in made.bodies)
    assert isinstance(first, list) and isinstance(second, list)
    assert (len(first), len(second)) == (1_000, 1_100)
    assert first[:512] == second[:512] and first[512:] != second[512:1_000]
    assert third == prompt_of(2, 5, 0)
    assert [body.get("priority") for body in made.bodies] == [-1, None, None]
    assert made.sessions == ["ann", "b%C3%B6b", None]


async def test_P04_a_failed_or_cut_stream_is_reported(endpoint: tuple[Endpoint, str]) -> None:
    made, url = endpoint
    [refused] = await send_trace((TraceRow(0.0, 5, 13),), SendPlan(url=url), lambda _: None)
    assert refused.error is not None and "unlucky" in refused.error
    made.cut = True
    [cut] = await send_trace((TraceRow(0.0, 5, 3),), SendPlan(url=url), lambda _: None)
    assert cut.error is not None and "[DONE]" in cut.error


async def test_no_endpoint_is_one_clear_line() -> None:
    with pytest.raises(MidstreamError, match="no OpenAI endpoint"):
        await send_trace((TraceRow(0.0, 1, 1),), SendPlan(url="http://127.0.0.1:9"), lambda _: None)


@pytest.mark.parametrize("bad", [{"speed": 0.0}, {"in_flight_max": 0}, {"in_flight_max": 10**6}])
def test_P28_a_bad_plan_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(BadInput):
        SendPlan(url="http://x", **bad)
