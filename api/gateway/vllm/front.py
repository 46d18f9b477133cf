"""What stands before vLLM's application, as pure ASGI: keys, paths, bounds, request ids, choice of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from midstream.api.auth import Keyring, caller_now
from midstream.api.closing import Closing
from midstream.api.gateway.vllm.errors import RETRY_AFTER_S, problem_response
from midstream.api.gateway.vllm.metrics import FrontMetrics, Together
from midstream.api.problems import Problem

PATHS: Final[Mapping[str, str | None]] = {
    "/detokenize": "generate",
    "/health": None,
    "/load": "read",
    "/metrics": "read",
    "/ping": None,
    "/tokenize": "generate",
    "/version": "read",
}
"""Paths that are served, and the scope that each needs. Below `/v1/` all are, and need `generate`."""

INTERNAL_HEADERS: Final = ("x-midstream-", "x-kv-", "x-data-parallel-", "x-prefill-", "x-decode-")
"""Header prefixes that only parts of a serving system may use among themselves."""
CHOICES_MAX: Final = 16
"""Each choice is a request of its own in the cluster."""
PROMPTS_MAX: Final = 16
REQUEST_ID: Final = "x-request-id"

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_BUSY = frozenset({429, 503})

logger = structlog.get_logger(__name__)


class Model(Protocol):
    """One served model as the front sees it."""

    @property
    def app(self) -> ASGIApp: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def metrics(self) -> CollectorRegistry: ...

    async def cards(self) -> list[Any]: ...


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one face."""

    body_bytes_max: int
    open_max: int
    """HTTP requests answered at once."""


class Peek(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of any request body that the front must know."""

    model: Any = None
    n: Any = None
    priority: Any = None
    request_id: Any = None
    prompt: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    prompt_logprobs: Any = None
    prompt_embeds: Any = None
    use_beam_search: Any = None


_peek = msgspec.json.Decoder(Peek)


def priority_of(peek: Peek) -> int | None:
    """The priority as vLLM will read it, which takes the text of a number too; None: none, or a bad one."""
    try:
        return int(float(peek.priority)) if isinstance(peek.priority, int | float | str) else None
    except (ValueError, OverflowError):
        return None


class Front:
    """The ASGI application of a face. `name` begins the ids of requests that bring none."""

    def __init__(self, models: Sequence[Model], keyring: Keyring, limits: Limits, closing: Closing, name: str) -> None:
        self._models = {name: model for model in models for name in model.names}
        self._all = tuple(models)
        self._keyring = keyring
        self._limits = limits
        self._closing = closing
        self._name = name
        self._count = 0
        self._open = 0
        self._metrics = FrontMetrics()
        self._metrics.open.set_function(lambda: self._open)
        everything = (self._metrics.registry, *(model.metrics for model in models), REGISTRY)
        self._exposition = Together(everything)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this face does not speak {scope['type']}")
        self._count += 1
        headers = MutableHeaders(scope=scope)
        call = Call(scope, send, self._id_of(headers))
        headers[REQUEST_ID] = call.id
        self._open += 1
        try:
            await self._handle(call, headers, receive)
        except Problem as problem:
            await problem_response(problem, getattr(problem, "param", None))(scope, receive, call.send)
        finally:
            self._open -= 1
            self._metrics.answered.labels(call.outcome).inc()

    async def _handle(self, call: Call, headers: Headers, receive: Receive) -> None:
        path = call.scope["path"]
        self._let_in(path, headers)
        own = await self._own_answer(path) if call.scope["method"] == "GET" else None
        if own is not None:
            await own(call.scope, receive, call.send)
            return
        model = self._all[0]
        if call.scope["method"] == "POST":
            body = await read_body(headers, receive, self._limits.body_bytes_max)
            peek = check_body(body)
            caller = caller_now.get()
            if caller is not None:
                caller.priority(priority_of(peek))
            model = self._models.get(peek.model, model) if isinstance(peek.model, str) else model
            receive = Replay(body, receive)
        await call.run(model.app, receive)

    async def _own_answer(self, path: str) -> Response | None:
        """Of the paths that are about all models."""
        if path == "/v1/models":
            cards = [card for model in self._all for card in await model.cards()]
            return JSONResponse({"object": "list", "data": cards})
        if path == "/metrics":
            return Response(generate_latest(self._exposition), media_type=CONTENT_TYPE_LATEST)
        return None

    def _let_in(self, path: str, headers: Headers) -> None:
        """Raises `Problem`. Unknown paths are refused before vLLM's application sees them."""
        if not path.startswith("/v1/") and path not in PATHS:
            raise Problem(404, "not_found", "there is nothing at this path")
        scope = PATHS.get(path, "generate")
        if scope is None:
            return
        caller_now.set(self._keyring.authorize(bearer_of(headers), scope))
        for name in headers:
            if name.startswith(INTERNAL_HEADERS):
                raise Problem(400, "forbidden_header", f"the header {name} is not for clients")
        if self._closing.has_begun:
            raise Problem(503, "server_closing", "the server is shutting down")
        if self._open > self._limits.open_max:
            raise Problem(429, "overloaded", "too many requests are open")

    def _id_of(self, headers: Headers) -> str:
        asked = headers.get(REQUEST_ID, "")
        return asked if _ID.fullmatch(asked) else f"r-{self._name}-{self._count}"


class Call:
    """One HTTP request and what was answered so far."""

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self.scope = scope
        self.id = request_id
        self._send = send
        self._is_stream = False
        self._status = 0
        self._has_ended = False
        self._is_broken = False

    @property
    def outcome(self) -> str:
        """`2xx`, `4xx`, …; `broken` if the client did not get it all."""
        return f"{self._status // 100}xx" if self._has_ended and not self._is_broken else "broken"

    async def send(self, message: Message) -> None:
        """Pass on, with the request's id, and a hint to busy clients."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID] = self.id
            self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
            if self._status in _BUSY:
                headers.setdefault("retry-after", str(RETRY_AFTER_S))
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._has_ended = True
        await self._send(message)

    async def run(self, app: ASGIApp, receive: Receive) -> None:
        """Let an application answer. If it breaks, the client is told so, whatever was sent before (P04)."""
        try:
            await app(self.scope, receive, self.send)
        except Exception as error:  # noqa: BLE001 - the client must learn of every end
            logger.error("request failed", request=self.id, error=repr(error), exc_info=error)
            if self._has_ended:
                return
            if not self._status:
                raise Problem(500, "internal_error", "the server failed; see its log") from error
            self._is_broken = True
            if self._is_stream:
                await self.send({"type": "http.response.body", "body": LAST_EVENT})


LAST_EVENT: Final = (
    b'event: error\ndata: {"error": {"message": "the server failed; see its log", '
    b'"type": "InternalServerError", "param": null, "code": 500}}\n\n'
)


class Replay:
    """`receive` for a body that was read already; afterwards the client's own messages."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class Misused(Problem):
    """A 400 that names a parameter."""

    def __init__(self, code: str, detail: str, param: str | None = None) -> None:
        super().__init__(400, code, detail)
        self.param = param


async def read_body(headers: Headers, receive: Receive, bytes_max: int) -> bytes:
    """The whole body. Raises `Problem` 413, and 400 if the client left."""
    announced = headers.get("content-length", "")
    parts, size = [], int(announced) if announced.isdecimal() else 0
    has_more = size <= bytes_max
    size = 0 if has_more else size
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Problem(400, "client_left", "the client left while it sent its body")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        has_more = message.get("more_body", False) and size <= bytes_max
    if size > bytes_max or not parts:
        raise Problem(413, "body_too_large", f"a body may have {bytes_max} bytes at most", {"Connection": "close"})
    return b"".join(parts)


def check_body(body: bytes) -> Peek:
    """What the front must know. Raises `Misused` for what a client may not ask for, before anything is done."""
    if not body:
        return Peek()
    try:
        peek = _peek.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Misused("malformed_json", f"the body is not a JSON object: {str(error)[:200]}") from error
    for name in ("kv_transfer_params", "ec_transfer_params"):
        extras = peek.vllm_xargs if isinstance(peek.vllm_xargs, dict) else {}
        if getattr(peek, name) is not None or name in extras:
            raise Misused("forbidden_parameter", f"{name} is not for clients", name)
    for name in ("prompt_logprobs", "prompt_embeds", "use_beam_search"):
        if getattr(peek, name) not in (None, False):
            raise Misused("unsupported_parameter", f"{name} is not served by this gateway", name)
    if isinstance(peek.n, int) and peek.n > CHOICES_MAX:
        raise Misused("invalid_value", f"n is at most {CHOICES_MAX}", "n")
    if isinstance(peek.prompt, list) and sum(isinstance(part, str | list) for part in peek.prompt) > PROMPTS_MAX:
        raise Misused("invalid_value", f"at most {PROMPTS_MAX} prompts in one request", "prompt")
    return peek


def bearer_of(headers: Headers) -> str | None:
    """The bearer token, `None` without one."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token if kind.lower() == "bearer" and token else None
