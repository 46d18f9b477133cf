"""An open-loop client: every request leaves at its time, whether or not those before it came back.

What a request waits counts from its planned arrival, not from when the client got round to sending it, so a server
(or a client) that stalls cannot hide the waits of those that would have come meanwhile (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec

from midstream.api.bench.sse import Chats, Timed, request_of
from midstream.api.traces.load import TraceRow
from midstream.api.traces.send import request_body
from midstream.api.traces.workload import workload
from midstream.control.errors import MidstreamError

PATH: Final = "/v1/completions"
TOKENS: Final = b'"token_ids":['
"""Starts the part of an event that brings tokens; some bring no text, so text would miss them."""
ANSWER_S: Final = 300.0
LEAD_S: Final = 0.2
"""From making the tasks to the first planned arrival."""
ERROR_CHARS: Final = 300
OUTPUT_MIN: Final = 2
"""Shorter answers have no time between tokens."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request, ready to be written. `at_s` counts from the start of the load."""

    at_s: float
    tokens: int
    """Output tokens that must come."""
    request: bytes


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one request; times of one clock, seconds. `timed` is None for a failed one."""

    planned_at: float
    ended_at: float
    timed: Timed | None = None
    error: str | None = None


def draw(
    trace: str, seed: int, requests: int, *, rate_per_s: float, scale: float, longest: int
) -> tuple[TraceRow, ...]:  # fmt: skip
    """Poisson arrivals (exponential times between them) with the scaled lengths of a trace, all by the seed.

    Longer ones than `longest` tokens, prompt and output, are shrunk to it. Raises `UnknownThing`, `BadInput`.
    """
    rng, at_s, rows = random.Random(f"serve {seed}"), 0.0, []
    for row in workload(trace, seed=seed, requests=requests)[:requests]:
        at_s += rng.expovariate(rate_per_s)
        rows.append(_fitted(row, at_s, scale, longest))
    return tuple(rows)


def _fitted(row: TraceRow, at_s: float, scale: float, longest: int) -> TraceRow:
    share = min(scale, (longest - OUTPUT_MIN - 1) / (row.prompt_tokens + row.output_tokens))
    prompt, output = max(1, round(row.prompt_tokens * share)), max(OUTPUT_MIN, round(row.output_tokens * share))
    return TraceRow(at_s, prompt, output)


def asks_of(rows: Sequence[TraceRow], url: str, model: str, seed: int, first: int) -> list[Ask]:
    """Requests for rows; prompts are numbered from `first`, so that no two share a beginning."""
    more = {"temperature": 0.0, "stream_options": {"include_usage": True}}
    return [
        Ask(
            at_s=row.arrival_s,
            tokens=row.output_tokens,
            request=request_of(url, request_body(model, first + index, row, seed) | more, PATH),
        )
        for index, row in enumerate(rows)
    ]


async def load(url: str, asks: Sequence[Ask]) -> list[Answer]:
    """Play all of them; what became of each, in their order. A failure is in its answer."""
    connections = Connections(url)
    begun_at = asyncio.get_running_loop().time() + LEAD_S
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_one(connections, ask, begun_at + ask.at_s)) for ask in asks]
    finally:
        connections.close()
    return [task.result() for task in tasks]


class Connections:
    """Connections to one server: an idle one for each request, or a new one."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._idle: list[Chats] = []

    async def take(self) -> Chats:
        """One that is free. Raises OSError."""
        if self._idle:
            return self._idle.pop()
        loop = asyncio.get_running_loop()
        _, chats = await loop.create_connection(lambda: Chats(TOKENS), self._host, self._port)
        return chats

    def give(self, chats: Chats) -> None:
        """It is free again."""
        self._idle.append(chats)

    def close(self) -> None:
        """End those that are idle."""
        for chats in self._idle:
            chats.close()


async def _one(connections: Connections, ask: Ask, planned_at: float) -> Answer:
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(planned_at - clock())
    try:
        timed = await _answered(connections, ask)
    except (MidstreamError, OSError) as failure:  # TimeoutError is an OSError
        error = f"{type(failure).__name__}: {failure}"[:ERROR_CHARS]
        return Answer(planned_at=planned_at, ended_at=clock(), error=error)
    return Answer(planned_at=planned_at, ended_at=clock(), timed=timed)


async def _answered(connections: Connections, ask: Ask) -> Timed:
    """The whole answer. Raises `MidstreamError`, OSError."""
    chats = await connections.take()
    try:
        timed = await chats.chat(ask.request, ANSWER_S)
    except BaseException:
        chats.close()
        raise
    connections.give(chats)
    if timed.tokens != ask.tokens:
        raise MidstreamError(f"{timed.tokens} of {ask.tokens} tokens")
    return timed
