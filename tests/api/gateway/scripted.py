"""A gateway core that follows a script, and the real HTTP face served on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx

from midstream.api.gateway.http import FaceSettings, create_openai_app
from midstream.api.gateway.port import Chunk
from midstream.api.gateway.text import Tokenizer
from midstream.api.http_server import Served, serve
from midstream.control.adapters.clock import SystemClock
from midstream.control.errors import Refused
from midstream.migration.protocol.messages import RequestSpec

Script = Callable[[RequestSpec], AsyncIterator[Chunk]]

TOKENIZER = Tokenizer()


def words(spec: RequestSpec, count: int | None = None) -> tuple[int, ...]:
    """Deterministic output ids for a request."""
    base = sum(spec.prompt) + (spec.sampling.seed or 0)
    return tuple(300 + (base + 7 * i) % 5_000 for i in range(count or spec.sampling.max_tokens))


async def one_by_one(spec: RequestSpec) -> AsyncIterator[Chunk]:
    """All tokens, one per chunk, then `length`."""
    ids = words(spec)
    for at, token in enumerate(ids):
        yield Chunk(ids=(token,), finish="length" if at == len(ids) - 1 else None)


def says(*pieces: str, finish: str | None = "stop") -> Script:
    """A script whose chunks are the ids of these texts."""

    async def script(_: RequestSpec) -> AsyncIterator[Chunk]:
        for piece in pieces:
            yield Chunk(ids=TOKENIZER.encode(piece))
        if finish is not None:
            yield Chunk(finish=finish)

    return script


def plays(*chunks: Chunk, then_wait: bool = False) -> Script:
    """A script of these chunks; with `then_wait` it never ends by itself."""

    async def script(_: RequestSpec) -> AsyncIterator[Chunk]:
        for chunk in chunks:
            yield chunk
        if then_wait:
            await asyncio.Event().wait()

    return script


class ScriptedStream:
    """One request that follows the script until it is cancelled."""

    def __init__(self, spec: RequestSpec, script: Script) -> None:
        self.request = spec.request
        self.spec = spec
        self.causes: list[str] = []
        self.cancelled = asyncio.Event()
        self._script = script
        self._chunks: deque[Chunk] = deque()
        self._player: asyncio.Task[None] | None = None

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._script(self.spec)

    def watch(self, on_news: Callable[[], None]) -> None:
        self._player = asyncio.create_task(self._play(on_news))

    async def _play(self, on_news: Callable[[], None]) -> None:
        async for chunk in self._script(self.spec):
            self._chunks.append(chunk)
            on_news()
            await asyncio.sleep(0)

    def take(self) -> Chunk | None:
        return self._chunks.popleft() if self._chunks else None

    def cancel(self, cause: str = "client") -> None:
        self.causes.append(cause)
        self.cancelled.set()
        if self._player is not None:
            self._player.cancel()


class ScriptedGateway:
    """Implements `TextGateway`."""

    def __init__(
        self, script: Script = one_by_one, *, models: Sequence[str] = ("sim",), refusals: Sequence[Refused | None] = ()
    ) -> None:
        self.models = models
        self.streams: list[ScriptedStream] = []
        self.admitted = asyncio.Event()
        self._script = script
        self._refusals = list(refusals)

    def admit(self, spec: RequestSpec) -> ScriptedStream:
        refusal = self._refusals.pop(0) if self._refusals else None
        if refusal is not None:
            raise refusal
        stream = ScriptedStream(spec, self._script)
        self.streams.append(stream)
        self.admitted.set()
        return stream


@contextlib.asynccontextmanager
async def serving(gateway: ScriptedGateway, **settings: Any) -> AsyncIterator[Served]:
    """The face on a free port."""
    app = create_openai_app(gateway, FaceSettings(gateway="g1", incarnation=7, **settings), SystemClock())
    served = await serve(app, "127.0.0.1", 0)
    try:
        yield served
    finally:
        await served.stop()


@contextlib.asynccontextmanager
async def client_of(gateway: ScriptedGateway, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A raw HTTP client of the face."""
    async with serving(gateway, **settings) as served, httpx.AsyncClient(base_url=served.url, timeout=20) as client:
        yield client


async def within(awaitable: Any, seconds: float = 10.0) -> Any:
    """A generous deadline for something that must happen."""
    async with asyncio.timeout(seconds):
        return await awaitable
