"""What the HTTP face needs from the gateway's core: admit a request, iterate over its tokens, cancel it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import msgspec

from midstream.migration.protocol.messages import RequestSpec


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """The next output tokens of one request, in index order, each once.

    The last chunk has `finish` (`stop` or `length`) or `error` (code, reason), never both; it may have no ids.
    """

    ids: tuple[int, ...] = ()
    logprobs: tuple[bytes, ...] = ()
    """One encoded entry per id (see `api.gateway.text.decode_logprobs`), empty if none were asked for."""
    finish: str | None = None
    error: tuple[str, str] | None = None


class Stream(Protocol):
    """The output of one admitted request; ends after the chunk with `finish` or `error`. It has one reader.

    Who reads one request iterates over it. Who reads many watches each, and takes what is there: no task per request.
    """

    request: str
    """The Midstream request id: what an operator names to move it."""

    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    def watch(self, on_news: Callable[[], None]) -> None:
        """Call `on_news` whenever there is something to `take`, also now; it must not take in that very call."""
        ...

    def take(self) -> Chunk | None:
        """The next chunk; None if there is none yet, and after the last one."""
        ...

    def cancel(self, cause: str = "client") -> None:
        """End the request now, in whatever state it is; synchronous, idempotent, after the end a no-op.

        `cause` is `client` when nobody reads any more, `stop` when a stop string completed it (the request
        then ended well), `shutdown` when the face closes. The gateway owns all clean-up that has to wait.
        """
        ...


class TextGateway(Protocol):
    """The gateway's core as the HTTP face sees it."""

    models: Sequence[str]

    def admit(self, spec: RequestSpec) -> Stream:
        """Take a request on; it may have to wait for its turn.

        Raises `Refused`: `no_capacity`, `draining`, `overloaded`, `tenant_queue_full`, `too_long`, `duplicate`.
        """
        ...
