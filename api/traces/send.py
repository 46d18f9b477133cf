"""Plays a trace against an OpenAI endpoint: each request at its time, streamed, measured as its client saw it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from statistics import median
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from midstream.api.traces.load import CONTENT_TOKENS, TraceRow
from midstream.control.errors import BadInput, MidstreamError

IN_FLIGHT_MAX = 1_024
CONNECT_S = 10.0
REQUEST_S = 3_600.0
FIRST_ID = 259
"""Ids below are special tokens and single bytes of the toy tokenizer."""
IDS = 30_000
SESSION = "X-Session-ID"
_MULTIPLIER, _OFFSET = 1_103_515_245, 12_345


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it. Times in milliseconds; `error` is None if it ended well."""

    row: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None
    gap_ms_max: float | None
    duration_ms: float
    gap_ms_p50: float | None = None
    token_ids: tuple[int, ...] = ()
    error: str | None = None


class SendPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How to play. `speed` 10 plays ten times faster than recorded."""

    url: str
    """Base URL of the endpoint, without `/v1`."""
    model: str | None = None
    """Asked of the endpoint when not given."""
    key: str | None = None
    speed: float = 1.0
    in_flight_max: int = IN_FLIGHT_MAX
    seed: int = 0

    def __post_init__(self) -> None:
        if self.speed <= 0:
            raise BadInput("speed must be above 0")
        if not 1 <= self.in_flight_max <= IN_FLIGHT_MAX:
            raise BadInput(f"requests in flight must be 1 to {IN_FLIGHT_MAX}")


async def send_trace(rows: Sequence[TraceRow], plan: SendPlan, on_sent: Callable[[Sent], None]) -> list[Sent]:
    """Play all rows and return what came of each, in row order; `on_sent` hears of each as it ends.

    Raises `MidstreamError` when the endpoint does not answer at all.
    """
    headers = {"Authorization": f"Bearer {plan.key}"} if plan.key else {}
    limits = httpx.Limits(max_connections=plan.in_flight_max, max_keepalive_connections=plan.in_flight_max)
    timeout = httpx.Timeout(REQUEST_S, connect=CONNECT_S)
    async with httpx.AsyncClient(
        base_url=plan.url, headers=headers, limits=limits, timeout=timeout, trust_env=False
    ) as http:
        model = plan.model or await first_model(http)
        slots = asyncio.Semaphore(plan.in_flight_max)
        started = asyncio.get_running_loop().time()

        async def play(index: int, row: TraceRow) -> Sent:
            await asyncio.sleep(started + row.arrival_s / plan.speed - asyncio.get_running_loop().time())
            async with slots:
                sent = await send_one(http, model, index, row, plan.seed)
            on_sent(sent)
            return sent

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play(index, row)) for index, row in enumerate(rows)]
        return [task.result() for task in tasks]


async def send_one(http: httpx.AsyncClient, model: str, index: int, row: TraceRow, seed: int) -> Sent:
    """Send one request and read its stream to the end. A failure is in the result."""
    clock = asyncio.get_running_loop().time
    begun = clock()
    times: list[float] = []
    ids: list[int] = []
    error: str | None = None
    try:
        session = {SESSION: quote(row.client)} if row.client else {}
        async for chunk in chunks(http, request_body(model, index, row, seed), session):
            fresh = ids_of(chunk)
            if fresh:
                times.append(clock())
                ids += fresh
    except (httpx.HTTPError, MidstreamError) as failure:
        error = f"{type(failure).__name__}: {failure}"[:300]
    if error is None and len(ids) != row.output_tokens:
        error = f"{len(ids)} of {row.output_tokens} tokens"
    gaps = [1e3 * (later - earlier) for earlier, later in itertools.pairwise(times)]
    return Sent(
        row=index,
        prompt_tokens=row.prompt_tokens,
        output_tokens=len(ids),
        ttft_ms=1e3 * (times[0] - begun) if times else None,
        gap_ms_max=max(gaps, default=None),
        gap_ms_p50=median(gaps) if gaps else None,
        duration_ms=1e3 * (clock() - begun),
        token_ids=tuple(ids),
        error=error,
    )


def request_body(model: str, index: int, row: TraceRow, seed: int) -> dict[str, Any]:
    """The body of one row's request: a made-up prompt of the right length, exactly as much output."""
    priority = {"priority": row.priority} if row.priority else {}
    return priority | {
        "model": model,
        "prompt": row_prompt(index, row, seed),
        "max_tokens": row.output_tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": seed + index,
        "stream": True,
        "return_token_ids": True,
    }


def row_prompt(index: int, row: TraceRow, seed: int) -> list[int]:
    """The prompt of a row: equal to others' as far as the trace says that it is shared."""
    if not row.content:
        return prompt_of(index, row.prompt_tokens, seed)
    blocks = (prompt_of(block, CONTENT_TOKENS, seed) for block in row.content)
    return list(itertools.chain.from_iterable(blocks))[: row.prompt_tokens]


def prompt_of(index: int, tokens: int, seed: int) -> list[int]:
    """Token ids that differ from row to row and are the same in every run with the same seed."""
    value = (seed * 1_000_003 + index * 7_919 + 1) & 0x7FFFFFFF
    ids = []
    for _ in range(tokens):
        value = (value * _MULTIPLIER + _OFFSET) & 0x7FFFFFFF
        ids.append(FIRST_ID + (value >> 8) % IDS)
    return ids


async def first_model(http: httpx.AsyncClient) -> str:
    """What the endpoint serves. Raises `MidstreamError` when it does not answer."""
    try:
        response = await http.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise MidstreamError(f"no OpenAI endpoint at {http.base_url}: {error}") from None


async def chunks(
    http: httpx.AsyncClient, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of one stream. Raises `MidstreamError` for an error or an end without `[DONE]`."""
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        if response.status_code != 200:
            raise MidstreamError(_error_of(await response.aread(), response.status_code))
        async for text in response.aiter_lines():
            if not text.startswith("data: "):
                continue
            if text == "data: [DONE]":
                return
            chunk = json.loads(text.removeprefix("data: "))
            if "error" in chunk:
                raise MidstreamError(str(chunk["error"].get("message", chunk["error"])))
            yield chunk
    raise MidstreamError("the stream ended without [DONE]")


def ids_of(chunk: dict[str, Any]) -> list[int]:
    return [token for choice in chunk.get("choices", ()) for token in choice.get("token_ids") or ()]


def _error_of(body: bytes, status: int) -> str:
    try:
        return f"HTTP {status}: {json.loads(body)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"HTTP {status}"
