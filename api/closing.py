"""Responses made while the client listens: they end at once when it leaves, and honestly when the server closes."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

import structlog
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

FAREWELL_S: Final = 2.0
"""A client that does not read has so long to take the last event."""

logger = structlog.get_logger(__name__)


class Closing:
    """One server's intent to stop, which live responses watch."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self.has_begun = False

    def begin(self) -> None:
        """Tell every live response; later ones learn at once."""
        self.has_begun = True
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    def watch(self) -> asyncio.Future[None]:
        """A future that is done when the server closes; give it back with `forget`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        if self.has_begun:
            future.set_result(None)
        return future

    def forget(self, future: asyncio.Future[None]) -> None:
        """Stop watching."""
        self._waiting.discard(future)
        future.cancel()


def closing_of(app: Starlette) -> Closing:
    """The app's own `Closing`, made on first use."""
    if not hasattr(app.state, "closing"):
        app.state.closing = Closing()
    closing: Closing = app.state.closing
    return closing


class Exchange(Protocol):
    """One request being answered."""

    async def answer(self, send: Send) -> None:
        """Send the whole response."""
        ...

    def release(self, cause: str) -> None:
        """Let go of what was taken for the answer: synchronous, idempotent, also after a good end (R9)."""
        ...

    async def fail(self, send: Send, code: str, reason: str) -> None:
        """End the response with an explicit error, whatever was sent before. `answer` no longer runs."""
        ...


class LiveResponse(Response):
    """Runs an exchange while watching for the client's leaving and the server's closing."""

    def __init__(self, exchange: Exchange, closing: Closing) -> None:
        self._exchange = exchange
        self._closing = closing
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        answer = loop.create_task(self._exchange.answer(send))
        gone = loop.create_task(_disconnected(receive))
        closed = self._closing.watch()
        try:
            await asyncio.wait({answer, gone, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and not gone.done():
                self._exchange.release("shutdown")
        finally:
            left = gone.done()
            self._exchange.release("client")
            self._closing.forget(closed)
            answer.cancel()
            gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)
        error = None if answer.cancelled() else answer.exception()
        if error:
            logger.error("response failed", error=repr(error), exc_info=error)
        if left:
            return
        if error:
            await self._fail(send, "internal_error", "the server failed; see its log")
        elif answer.cancelled():
            await self._fail(send, "server_closing", "the server is shutting down")

    async def _fail(self, send: Send, code: str, reason: str) -> None:
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._exchange.fail(send, code, reason)
        except TimeoutError:
            logger.warning("client did not read its last event", code=code)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
