"""One completion being answered: admit its choices, turn their chunks into a response, let go of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.types import Send

from midstream.api.gateway.choices import Choice, Delta
from midstream.api.gateway.port import Chunk, Stream, TextGateway
from midstream.api.gateway.rendering import DONE, Finished, Look, Renderer, error_body, error_event
from midstream.control.errors import Refused
from midstream.migration.protocol.messages import RequestSpec

RETRY_AFTER_S: Final = 1
MERGE_MAX: Final = 64
"""Chunks of the choices of one request that wait to be written."""

STATUS: Final[Mapping[str, int]] = {
    "bad_request": 400,
    "draining": 503,
    "duplicate": 409,
    "no_capacity": 503,
    "overloaded": 429,
    "tenant_queue_full": 429,
    "server_closing": 503,
    "too_long": 400,
}
"""HTTP status of the gateway's refusals and errors; everything else is a 500."""


class FaceMetrics:
    """What the HTTP face counts. Label values are from fixed sets."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "midstream_http_requests", "Completions by outcome", ("outcome",), registry=registry
        )  # refused finished failed cancelled
        self.tokens = Counter("midstream_http_output_tokens", "Output tokens sent to clients", registry=registry)
        self.opened = 0
        """Completions being answered now."""
        gauge = Gauge("midstream_http_open_requests", "Completions being answered", registry=registry)
        gauge.set_function(lambda: self.opened)


class Exchange:
    """Base of the streamed and the whole answer. `release` may be called at any moment, any number of times."""

    def __init__(
        self,
        gateway: TextGateway,
        specs: Sequence[RequestSpec],
        choices: Sequence[Choice],
        *,
        renderer: Renderer,
        look: Look,
        metrics: FaceMetrics,
    ) -> None:
        self._gateway = gateway
        self._specs = specs
        self._choices = choices
        self._renderer = renderer
        self._metrics = metrics
        self._look = look
        self._streams: list[Stream] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._has_started = False
        self._outcome: str | None = None
        metrics.opened += 1

    async def answer(self, send: Send) -> None:
        """Admit, generate, send."""
        try:
            for spec in self._specs:
                self._streams.append(self._gateway.admit(spec))
        except Refused as refused:
            self._end("refused")
            self.release("client")
            await self._send_error(send, refused.code, refused.reason)
            return
        await self._generate(send)

    def release(self, cause: str) -> None:
        """End what still runs. Requests that ended well are not touched by it."""
        for stream in self._streams:
            stream.cancel(cause)
        for pump in self._pumps:
            pump.cancel()
        self._end("cancelled")

    async def fail(self, send: Send, code: str, reason: str) -> None:
        """An error response, or inside a stream an explicit error event and the end without `[DONE]`."""
        self._end("failed")
        if self._has_started:
            await self._write(send, error_event(_status(code), code, reason), is_last=True)
        else:
            await self._send_error(send, code, reason)

    async def _generate(self, send: Send) -> None:
        raise NotImplementedError

    @property
    def _prompt_tokens(self) -> int:
        return len(self._specs[0].prompt)

    @property
    def _output_tokens(self) -> int:
        return sum(choice.tokens for choice in self._choices)

    def _end(self, outcome: str) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._metrics.opened -= 1
            self._metrics.requests.labels(outcome).inc()
            self._metrics.tokens.inc(self._output_tokens)

    def _take(self, index: int, chunk: Chunk) -> Delta:
        """Feed a choice; a request that a stop string completed is ended at once."""
        choice = self._choices[index]
        delta = choice.feed(chunk)
        if choice.was_stopped:
            self._streams[index].cancel("stop")
        return delta

    async def _chunks(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        """The chunks of all choices, as they come, until each choice has ended."""
        if len(self._streams) == 1:
            async for chunk in self._streams[0]:
                yield 0, chunk
                if self._choices[0].has_ended:
                    return
            return
        queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(MERGE_MAX)
        self._pumps = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(self._streams)]
        ended = 0
        while ended < len(self._streams):
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                ended += 1
            elif not self._choices[index].has_ended:
                yield index, item

    def _unfinished(self) -> tuple[str, str] | None:
        """The error to show when the streams ended without saying how (A11)."""
        if all(choice.has_ended for choice in self._choices):
            return None
        return "stream_broken", "the stream ended without a finish reason"

    async def _start(self, send: Send, status: int, media_type: bytes, extra: Mapping[str, str] | None = None) -> None:
        headers = [(b"content-type", media_type), (b"cache-control", b"no-store")]
        if self._streams:
            headers.append((b"x-request-id", ",".join(stream.request for stream in self._streams).encode()))
        headers.extend((name.lower().encode(), value.encode()) for name, value in (extra or {}).items())
        self._has_started = True
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def _send_error(self, send: Send, code: str, reason: str) -> None:
        status = _status(code)
        extra = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
        body = msgspec.json.encode(error_body(status, code, reason, None))
        await self._start(send, status, b"application/json", {**extra, "Content-Length": str(len(body))})
        await self._write(send, body, is_last=True)


class StreamedExchange(Exchange):
    """Server-sent events, one per chunk."""

    async def _generate(self, send: Send) -> None:
        await self._start(send, 200, b"text/event-stream; charset=utf-8")
        opened: set[int] = set()
        async with contextlib.aclosing(self._chunks()) as chunks:
            async for index, chunk in chunks:
                delta = self._take(index, chunk)
                if body := self._events(index, delta, opened):
                    await self._write(send, body)
                if delta.error is not None:
                    await self.fail(send, *delta.error)
                    return
        if broken := self._unfinished():
            await self.fail(send, *broken)
            return
        self._end("finished")
        usage = self._renderer.usage(self._prompt_tokens, self._output_tokens) if self._look.has_usage else b""
        await self._write(send, usage + DONE, is_last=True)

    def _events(self, index: int, delta: Delta, opened: set[int]) -> bytes:
        """Nothing for a chunk that shows nothing: its text is held back, or it only carries an error."""
        has_details = delta.ids and (self._look.has_ids or self._look.has_logprobs)
        if not (delta.text or delta.finish or has_details):
            return b""
        event = self._renderer.chunk(index, delta)
        if index in opened:
            return event
        opened.add(index)
        return self._renderer.opening(index) + event


class WholeExchange(Exchange):
    """One JSON body when everything is there."""

    async def _generate(self, send: Send) -> None:
        deltas: list[list[Delta]] = [[] for _ in self._choices]
        async with contextlib.aclosing(self._chunks()) as chunks:
            async for index, chunk in chunks:
                delta = self._take(index, chunk)
                deltas[index].append(delta)
                if delta.error is not None:
                    await self.fail(send, *delta.error)
                    return
        if broken := self._unfinished():
            await self.fail(send, *broken)
            return
        self._end("finished")
        finished = [_finished(parts) for parts in deltas]
        body = self._renderer.whole(finished, self._prompt_tokens, self._output_tokens)
        await self._start(send, 200, b"application/json", {"Content-Length": str(len(body))})
        await self._write(send, body, is_last=True)


async def _pump(index: int, stream: Stream, queue: asyncio.Queue[tuple[int, Chunk | Exception | None]]) -> None:
    try:
        async for chunk in stream:
            await queue.put((index, chunk))
    except Exception as error:  # noqa: BLE001 - raised again by the reader of the queue
        await queue.put((index, error))
    else:
        await queue.put((index, None))


def _finished(parts: Sequence[Delta]) -> Finished:
    return Finished(
        text="".join(part.text for part in parts),
        ids=tuple(token for part in parts for token in part.ids),
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        finish=parts[-1].finish or "",
    )


def _status(code: str) -> int:
    return STATUS.get(code, 500)
