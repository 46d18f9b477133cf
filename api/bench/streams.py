"""One streamed completion as its client sees it: every token with the time it came."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx

from midstream.api.traces.load import TraceRow
from midstream.api.traces.send import chunks, ids_of, request_body
from midstream.control.adapters.clock import SystemClock
from midstream.control.errors import MidstreamError

CLOCK = SystemClock()
POLL_S = 0.02


class Stream:
    """Reads in a task of its own, until it is left. Times are microseconds of the wall clock, as those of facts."""

    def __init__(self, prompt_tokens: int, max_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.times_us: list[int] = []
        """One per output token."""
        self.error: str | None = None
        self._news = asyncio.Event()

    @property
    def tokens(self) -> int:
        """Prompt and output so far."""
        return self.prompt_tokens + len(self.times_us)

    def gap_ms(self, index: int) -> float:
        """Time between the arrivals of output tokens `index` - 1 and `index`, milliseconds."""
        return (self.times_us[index] - self.times_us[index - 1]) / 1e3

    async def has(self, outputs: int, deadline_s: float) -> None:
        """Wait until so many output tokens came. Raises `MidstreamError` when the stream ended, or is too slow."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while len(self.times_us) < outputs and self.error is None:
                    self._news.clear()
                    await self._news.wait()
        if len(self.times_us) < outputs:
            missing = f"{len(self.times_us)} of {outputs} tokens came within {deadline_s:g} s"
            raise MidstreamError(self.error or missing)

    async def read(self, http: httpx.AsyncClient, model: str, index: int, seed: int) -> None:
        """Ask, and note what comes."""
        row = TraceRow(arrival_s=0.0, prompt_tokens=self.prompt_tokens, output_tokens=self.max_tokens)
        body = request_body(model, index, row, seed) | {"temperature": 0.0}
        try:
            async for chunk in chunks(http, body):
                self.times_us += [CLOCK.now_us()] * len(ids_of(chunk))
                self._news.set()
            self.error = "the stream came to its end"
        except (httpx.HTTPError, MidstreamError) as failure:
            self.error = f"{type(failure).__name__}: {failure}"[:300]
        self._news.set()


@contextlib.asynccontextmanager
async def streaming(
    http: httpx.AsyncClient, model: str, index: int, seed: int, prompt_tokens: int, max_tokens: int
) -> AsyncIterator[Stream]:
    """A stream that runs; its client leaves at the end."""
    stream = Stream(prompt_tokens, max_tokens)
    reading = asyncio.create_task(stream.read(http, model, index, seed))
    try:
        yield stream
    finally:
        reading.cancel()
        await asyncio.wait({reading})
