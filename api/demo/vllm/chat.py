"""One streamed chat as its client sees it: every token with its time."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec

from midstream.control.errors import MidstreamError


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and how to sample the answer."""

    title: str
    prompt: str
    tokens: int
    temperature: float = 0.0
    seed: int | None = None

    @property
    def sampling(self) -> str:
        """As a person says it."""
        return "greedy" if self.temperature == 0 else f"seed {self.seed}, T {self.temperature:g}"


class Delta(msgspec.Struct, frozen=True):
    """What arrived at once. `at` is the event loop's time, seconds."""

    at: float
    text: str
    ids: tuple[int, ...]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer. `error` is None if it ended well."""

    deltas: tuple[Delta, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: str | None = None
    error: str | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """All output tokens."""
        return tuple(itertools.chain.from_iterable(delta.ids for delta in self.deltas))

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(delta.text for delta in self.deltas)

    def gap_ms(self, index: int) -> float | None:
        """Time between the arrivals of output tokens `index` - 1 and `index`, milliseconds."""
        times = [delta.at for delta in self.deltas for _ in delta.ids]
        return 1e3 * (times[index] - times[index - 1]) if 0 < index < len(times) else None


async def ask(http: httpx.AsyncClient, model: str, what: Ask, on_delta: Callable[[Delta], None]) -> Answer:
    """Stream one answer to its end. A failure is in the result."""
    clock = asyncio.get_running_loop().time
    deltas: list[Delta] = []
    usage: dict[str, int] = {}
    finish = error = None
    try:
        async for chunk in _chunks(http, _body(model, what)):
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                finish = choice.get("finish_reason") or finish
                delta = Delta(clock(), choice["delta"].get("content") or "", tuple(choice.get("token_ids") or ()))
                if delta.text or delta.ids:
                    deltas.append(delta)
                    on_delta(delta)
    except (httpx.HTTPError, MidstreamError) as failure:
        error = f"{type(failure).__name__}: {failure}"[:300]
    return Answer(
        deltas=tuple(deltas),
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        finish=finish,
        error=error,
    )


def _body(model: str, what: Ask) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": what.prompt}],
        "max_completion_tokens": what.tokens,
        "ignore_eos": True,
        "temperature": what.temperature,
        "seed": what.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


async def _chunks(http: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The chunks of one stream. Raises `MidstreamError` for an error or an end without `[DONE]`."""
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise MidstreamError(f"HTTP {response.status_code}: {(await response.aread()).decode()[:200]}")
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise MidstreamError(str(chunk["error"].get("message", chunk["error"])))
                yield chunk
    raise MidstreamError("the stream ended without [DONE]")
