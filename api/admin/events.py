"""Facts for people and programs: pages of the archive, and the live stream that can be resumed exactly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from starlette.types import Send

from midstream.api.admin.deps import AdminDeps
from midstream.api.admin.models import EventBody
from midstream.api.problems import Problem, problem_body, problem_response
from midstream.control.codec import UnknownEvent
from midstream.control.errors import ArchiveUnavailable, BadInput
from midstream.control.events import EVENTS, Entry
from midstream.control.ids import Position, parse_position

STREAM_PAGE: Final = 200
"""Facts that one stream holds in memory: a slow client holds back its own reading, nothing else."""
CATCH_UP_S: Final = 0.05
"""How soon the archive is asked again for facts that the fold has seen and it has not."""


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """Which facts are wanted; `None` is all."""

    kind: str | None = None
    request: str | None = None
    migration: str | None = None
    instance: str | None = None


class _Document(msgspec.Struct, frozen=True):
    position: str
    kind: str
    version: int
    source: str
    incarnation: int
    source_seq: int
    at_ms: int
    event: Any


def document(entry: Entry) -> _Document:
    """A fact as the API shows it."""
    fact, event = entry.fact, entry.fact.event
    if isinstance(event, UnknownEvent):
        kind, version, payload = event.kind, event.version, msgspec.json.decode(event.payload)
    else:
        kind, version, payload = type(event).__name__, event.VERSION, event
    return _Document(
        str(entry.position), kind, version, fact.source, fact.incarnation, fact.source_seq, fact.at_ms, payload
    )


def event_body(entry: Entry) -> EventBody:
    """The same as a typed body."""
    return EventBody.model_validate(msgspec.to_builtins(document(entry)))


def check_kind(kind: str | None) -> None:
    """Raises `Problem` 400 for a kind of fact that does not exist."""
    if kind is not None and kind not in EVENTS:
        raise Problem(400, "unknown_kind", f"there is no fact kind {kind[:64]!r}")


def position_of(text: str, what: str) -> Position:
    """Raises `Problem` 400."""
    try:
        return parse_position(text)
    except BadInput as error:
        raise Problem(400, "bad_position", f"{what}: {error}") from error


async def read(deps: AdminDeps, after: Position, count: int, filters: Filters) -> list[Entry]:
    """Facts behind `after` that fit, in log order."""
    chosen = {name: getattr(filters, name) for name in filters.__struct_fields__}
    return await deps.archive.read(after, count, **chosen)


def page_bytes(entries: Sequence[Entry], limit: int) -> bytes:
    """A page as JSON: `entries` has one more than `limit` if there is a next page."""
    shown = entries[:limit]
    following = str(shown[-1].position) if len(entries) > limit else None
    return msgspec.json.encode({"items": [document(entry) for entry in shown], "next": following})


def event_bytes(entry: Entry) -> bytes:
    """One server-sent event; its id is the position, so that `Last-Event-ID` resumes right behind it."""
    shown = document(entry)
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (
        shown.position.encode(),
        shown.kind.encode(),
        msgspec.json.encode(shown),
    )


class EventStream:
    """An exchange that sends every fact behind a position, for ever: first the archive's, then each new one."""

    def __init__(self, deps: AdminDeps, after: Position, filters: Filters, streams: StreamCount) -> None:
        self._deps = deps
        self._after = after
        self._filters = filters
        self._streams = streams
        self._is_open = True
        self._has_started = False

    async def answer(self, send: Send) -> None:
        """Never returns by itself."""
        await self._start(send)
        while True:
            entries = await self._next(send)
            for entry in entries:
                await send({"type": "http.response.body", "body": event_bytes(entry), "more_body": True})
                self._after = entry.position

    def release(self, cause: str) -> None:
        """See `Exchange.release`."""
        if self._is_open:
            self._is_open = False
            self._streams.open -= 1

    async def fail(self, send: Send, code: str, reason: str) -> None:
        """See `Exchange.fail`."""
        problem = Problem(503, code, reason)
        if self._has_started:
            body = b"event: error\ndata: %s\n\n" % msgspec.json.encode(problem_body(problem))
            await send({"type": "http.response.body", "body": body, "more_body": False})
        else:
            await problem_response(problem)({"type": "http"}, _nothing, send)

    async def _start(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._has_started = True
        await send({"type": "http.response.body", "body": b": facts\n\n", "more_body": True})

    async def _next(self, send: Send) -> list[Entry]:
        """The next facts that fit; comments keep the connection alive until there are some."""
        heartbeat_at = self._now() + self._deps.settings.heartbeat_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(heartbeat_at):
                    return await self._wait()
            await send({"type": "http.response.body", "body": b": alive\n\n", "more_body": True})
            heartbeat_at = self._now() + self._deps.settings.heartbeat_s

    async def _wait(self) -> list[Entry]:
        """Facts of the archive, as soon as it has any."""
        while True:
            with contextlib.suppress(ArchiveUnavailable):
                archived = await self._deps.archive.position()
                entries = await read(self._deps, self._after, STREAM_PAGE, self._filters)
                if entries:
                    return entries
                self._after = max(self._after, archived)
                if archived >= self._deps.follower.state.position:
                    await self._deps.follower.changed()
            await asyncio.sleep(CATCH_UP_S)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class StreamCount:
    """How many event streams are open, and the bound on them."""

    def __init__(self, limit: int) -> None:
        self.open = 0
        self.limit = limit

    def take(self) -> None:
        """Raises `Problem` 503 when there are too many."""
        if self.open >= self.limit:
            raise Problem(503, "too_many_streams", f"{self.limit} event streams are open", {"Retry-After": "5"})
        self.open += 1


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}
