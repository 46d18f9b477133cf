"""The light OpenAI face: `/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/health`, `/metrics`."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
import structlog
from fastapi import Depends, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from midstream.api.auth import Caller, Keyring, Scoped, check_guarded
from midstream.api.closing import Closing, LiveResponse, closing_of
from midstream.api.gateway.choices import Choice
from midstream.api.gateway.exchange import Exchange, FaceMetrics, StreamedExchange, WholeExchange
from midstream.api.gateway.openai_types import (
    Asked,
    ChatAsked,
    CompletionAsked,
    Invalid,
    chat_text,
    prompt_ids,
    read_request,
    refuse_internal_headers,
    sampling_of,
)
from midstream.api.gateway.port import TextGateway
from midstream.api.gateway.rendering import ChatRenderer, CompletionRenderer, Look, Renderer, error_body
from midstream.api.gateway.text import VOCABULARY_DEFAULT, Tokenizer
from midstream.api.guards import BodyGuard, HostGuard
from midstream.api.keys import Key
from midstream.api.problems import Problem, from_http
from midstream.control.ports import Clock
from midstream.migration.protocol.messages import RequestSpec

BODY_BYTES_MAX: Final = 8 * 1024 * 1024
OUTPUT_TOKENS_DEFAULT: Final = 1_024
"""Output limit of a chat that names none."""
COMPLETION_TOKENS_DEFAULT: Final = 16
"""OpenAI's own default for completions."""
OPEN_MAX: Final = 2_048
"""Completions answered at once; more are refused with 429."""

Generator = Annotated[Caller, Depends(Scoped("generate"))]
"""Who may have text generated."""

logger = structlog.get_logger(__name__)


SESSION_CHARS_MAX: Final = 256
"""Of the session that a client names."""


class FaceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one HTTP face needs to know. `gateway` and `incarnation` make its request ids unique for ever."""

    gateway: str
    incarnation: int
    host: str = "127.0.0.1"
    keys: tuple[Key, ...] = ()
    vocabulary: int = VOCABULARY_DEFAULT
    context_tokens: int = 32_768
    """Longest prompt + output that any instance takes."""
    body_bytes_max: int = BODY_BYTES_MAX
    open_max: int = OPEN_MAX


class Sender(msgspec.Struct, frozen=True):
    """Who sent a request, and what it says belongs together."""

    caller: Caller
    session: str


class Face:
    """Turns HTTP requests into exchanges."""

    def __init__(self, gateway: TextGateway, settings: FaceSettings, clock: Clock, registry: CollectorRegistry) -> None:
        self.gateway = gateway
        self.settings = settings
        self.metrics = FaceMetrics(registry)
        self._clock = clock
        self._tokenizer = Tokenizer(settings.vocabulary)
        self._started_s = clock.now_ms() // 1000
        self._count = 0

    async def complete(self, request: Request, caller: Caller, closing: Closing) -> Response:
        """`POST /v1/completions`."""
        asked = read_request(await self._body(request), CompletionAsked)
        prompt = prompt_ids(asked.prompt, self._tokenizer.encode, self.settings.vocabulary)
        return self._respond(asked, prompt, COMPLETION_TOKENS_DEFAULT, sender_of(request, caller), closing)

    async def chat(self, request: Request, caller: Caller, closing: Closing) -> Response:
        """`POST /v1/chat/completions`."""
        asked = read_request(await self._body(request), ChatAsked)
        prompt = self._tokenizer.encode(chat_text(asked.messages))
        return self._respond(asked, prompt, OUTPUT_TOKENS_DEFAULT, sender_of(request, caller), closing)

    def models(self) -> dict[str, Any]:
        """`GET /v1/models`."""
        limits = {"created": self._started_s, "owned_by": "midstream", "max_model_len": self.settings.context_tokens}
        return {
            "object": "list",
            "data": [{"id": name, "object": "model", **limits} for name in self.gateway.models],
        }

    async def _body(self, request: Request) -> bytes:
        refuse_internal_headers(request.headers)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Invalid("unsupported_media_type", "the body must be application/json", status=415)
        return await request.body()

    def _respond(
        self, asked: Asked, prompt: tuple[int, ...], tokens_default: int, sender: Sender, closing: Closing
    ) -> Response:
        if asked.model not in self.gateway.models:
            raise Invalid("model_not_found", f"the model {asked.model[:64]!r} does not exist", "model", status=404)
        if closing.has_begun:
            raise Problem(503, "server_closing", "the server is shutting down", {"Retry-After": "1"})
        if self.metrics.opened >= self.settings.open_max:
            raise Problem(429, "overloaded", "too many requests are open", {"Retry-After": "1"})
        self._count += 1
        name = f"r-{self.settings.gateway}-{self.settings.incarnation}-{self._count}"
        specs = [self._spec(asked, prompt, name, index, tokens_default, sender) for index in range(asked.n)]
        return LiveResponse(self._exchange(asked, specs, name), closing)

    def _spec(
        self, asked: Asked, prompt: tuple[int, ...], name: str, index: int, tokens_default: int, sender: Sender
    ) -> RequestSpec:
        return RequestSpec(
            request=name if asked.n == 1 else f"{name}.{index}",
            prompt=prompt,
            sampling=sampling_of(
                asked,
                index,
                prompt_tokens=len(prompt),
                context=self.settings.context_tokens,
                default=tokens_default,
            ),
            priority=sender.caller.priority(asked.priority),
            tenant=sender.caller.name,
            arrival_ms=self._clock.now_ms(),
            session=sender.session,
        )

    def _exchange(self, asked: Asked, specs: list[RequestSpec], name: str) -> Exchange:
        is_chat = isinstance(asked, ChatAsked)
        look = Look(
            id=f"chatcmpl-{name}" if is_chat else f"cmpl-{name}",
            model=asked.model,
            created=self._clock.now_ms() // 1000,
            has_usage=asked.has_usage,
            has_ids=asked.return_token_ids,
            has_logprobs=asked.logprobs_wanted is not None,
        )
        renderer: Renderer = ChatRenderer(look) if is_chat else CompletionRenderer(look)
        choices = [Choice(stops=asked.stops, min_tokens=asked.min_tokens) for _ in specs]
        kind = StreamedExchange if asked.stream else WholeExchange
        return kind(self.gateway, specs, choices, renderer=renderer, look=look, metrics=self.metrics)


def sender_of(request: Request, caller: Caller) -> Sender:
    """The session is the header that vLLM reads too."""
    return Sender(caller, request.headers.get("x-session-id", "")[:SESSION_CHARS_MAX])


def create_openai_app(
    gateway: TextGateway, settings: FaceSettings, clock: Clock, registry: CollectorRegistry | None = None
) -> FastAPI:
    """The app. Other parts of the process may have registered their metrics in `registry`.

    Raises `BadInput` for bad keys, and for no keys on another address than loopback.
    """
    face = Face(gateway, settings, clock, registry or CollectorRegistry())
    app = FastAPI(title="Midstream gateway", openapi_url=None)
    app.state.keyring = keyring = Keyring(settings.keys, host=settings.host)
    _install_errors(app)
    app.add_middleware(BodyGuard, bytes_max=settings.body_bytes_max, refuse=error_response)
    app.add_middleware(HostGuard, hosts=keyring.hosts, refuse=error_response)
    _install_routes(app, face, closing_of(app))
    check_guarded(app.routes, frozenset({"/health"}))
    return app


def error_response(problem: Problem) -> Response:
    """A problem in OpenAI's form."""
    param = problem.param if isinstance(problem, Invalid) else None
    body = error_body(problem.status, problem.code, problem.detail, param)
    return JSONResponse(body, status_code=problem.status, headers=problem.headers)


def _install_routes(app: FastAPI, face: Face, closing: Closing) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request, caller: Generator) -> Response:
        return await face.complete(request, caller, closing)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, caller: Generator) -> Response:
        return await face.chat(request, caller, closing)

    @app.get("/v1/models", dependencies=[Depends(Scoped("generate"))])
    async def models() -> dict[str, Any]:
        return face.models()

    @app.get("/metrics", dependencies=[Depends(Scoped("read"))])
    async def metrics() -> Response:
        return Response(generate_latest(face.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/health")
    async def health() -> Response:
        status = "closing" if closing.has_begun else "ok"
        return JSONResponse({"status": status}, status_code=503 if closing.has_begun else 200)


def _install_errors(app: FastAPI) -> None:
    async def on_problem(_: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        return error_response(error)

    async def on_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(from_http(error))

    async def on_leaving(_: Request, error: Exception) -> Response:
        return Response(status_code=400)  # nobody reads it: the client left while it sent its body

    async def on_bug(_: Request, error: Exception) -> Response:
        logger.error("request failed", error=repr(error), exc_info=error)
        return error_response(Problem(500, "internal_error", "the server failed; see its log"))

    app.add_exception_handler(Problem, on_problem)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientDisconnect, on_leaving)
    app.add_exception_handler(Exception, on_bug)
