"""A light client of streamed answers: it shares the machine with what it measures, so it parses nothing.

One connection serves one request after the other. Times are the event loop's, seconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec

from midstream.control.errors import MidstreamError

ANSWER_S: Final = 120.0
CHATS: Final = "/v1/chat/completions"
OK: Final = b"HTTP/1.1 200"
EVENT: Final = b"data: {"
TEXT: Final = b'"delta":{"content":"'
"""Starts the part of an event that brings text; an event of the role alone has it not, nor that of the usage."""
USAGE: Final = b'"completion_tokens":'
LAST: Final = b"0\r\n\r\n"
"""Ends a chunked body."""
DONE: Final = b"data: [DONE]"


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """One answer as its client saw it."""

    sent_at: float
    arrivals: tuple[float, ...]
    """When bytes with text came."""
    tokens: int
    """As the usage says."""

    @property
    def ttft_ms(self) -> float:
        """Time to first text."""
        return 1e3 * (self.arrivals[0] - self.sent_at)

    @property
    def gaps_ms(self) -> list[float]:
        """Times between two arrivals of text."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [1e3 * (later - earlier) for earlier, later in pairs]


class Chats(asyncio.Protocol):
    """One connection. `chat` sends a body and waits for the whole answer. Not for concurrent use.

    `text` is what bytes have in them that bring something of the answer.
    """

    def __init__(self, text: bytes = TEXT) -> None:
        self._text = text
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Timed] | None = None
        self._arrivals: list[float] = []
        self._sent_at = 0.0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has the methods, not the class

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was closed: {exc or 'by the server'}")

    def data_received(self, data: bytes) -> None:
        """Note when text came; at the end of the body the answer is whole."""
        if not self._tail and not data.startswith(OK):
            self._fail(f"refused: {data[:300]!r}")
            return
        if self._text in data:
            self._arrivals.append(self._loop.time())
        self._tail = (self._tail + data)[-4096:]
        if self._tail.endswith(LAST):
            self._finish()

    async def chat(self, request: bytes, answer_s: float = ANSWER_S) -> Timed:
        """One answer. Raises `MidstreamError` for anything but a whole one, and `TimeoutError`."""
        assert self._transport is not None
        self._answer = self._loop.create_future()
        self._arrivals, self._tail = [], b""
        self._sent_at = self._loop.time()
        self._transport.write(request)
        async with asyncio.timeout(answer_s):
            return await self._answer

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()

    def _finish(self) -> None:
        usage = self._tail.rpartition(USAGE)[2]
        digits = usage[: len(usage) - len(usage.lstrip(b"0123456789"))]
        if DONE not in self._tail or not digits or not self._arrivals:
            self._fail(f"not a whole answer: {self._tail[-300:]!r}")
        elif self._answer is not None and not self._answer.done():
            arrivals = tuple(self._arrivals)
            self._answer.set_result(Timed(sent_at=self._sent_at, arrivals=arrivals, tokens=int(digits)))

    def _fail(self, reason: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(MidstreamError(reason))


def request_of(url: str, body: dict[str, Any], path: str = CHATS) -> bytes:
    """The bytes of one POST."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def play(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Timed]:
    """All chats, `concurrency` at a time, each connection taking the next one. Raises `MidstreamError`."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    waiting = [request_of(url, body) for body in reversed(bodies)]
    answers: list[Timed] = []

    async def work() -> None:
        _, chats = await asyncio.get_running_loop().create_connection(Chats, host, port)
        try:
            while waiting:
                answers.append(await chats.chat(waiting.pop()))
        finally:
            chats.close()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return answers
