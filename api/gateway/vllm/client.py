"""A vLLM engine-core client whose engine core is the gateway: requests are admitted there, tokens come from there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn, Protocol

import structlog
from msgspec.structs import replace
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.stats import SchedulerStats

from midstream.api.auth import caller_now
from midstream.api.gateway.port import Stream, TextGateway
from midstream.api.gateway.vllm.errors import error_of, error_of_refusal
from midstream.api.gateway.vllm.outputs import output_of
from midstream.api.gateway.vllm.specs import spec_of
from midstream.control.errors import Refused
from midstream.migration.protocol.messages import RequestSpec

TASKS: Final[tuple[SupportedTask, ...]] = ("generate",)

logger = structlog.get_logger(__name__)


class CheckedGateway(TextGateway, Protocol):
    """A gateway's core that can say beforehand whether it takes requests."""

    def check(self, model: str | None = None, tenant: str = "") -> None:
        """Raises `Refused` as `admit` would for any request of the tenant for the model now."""
        ...


class Frontend(Protocol):
    """What the client tells the part of vLLM above it, besides outputs."""

    def forget(self, request: str) -> None:
        """The request was refused; it never ran."""
        ...

    def fail(self, request: str, error: Exception) -> None:
        """The request ends with an error that its client is told."""
        ...


@dataclass
class Resources:
    """vLLM asks its client here whether the engine is dead. The gateway outlives every engine."""

    engine_dead: bool = False


class Running:
    """One admitted request and its stream."""

    def __init__(self, stream: Stream, *, has_logprobs: bool) -> None:
        self.stream = stream
        self.has_logprobs = has_logprobs
        self.has_begun = False


class GatewayClient(EngineCoreClient):
    """vLLM's client interface over a gateway, for one model. `frontend` is bound before the first request."""

    def __init__(self, gateway: CheckedGateway, model: str) -> None:
        self.frontend: Frontend
        self.resources = Resources()
        self.engine_ranks_managed = [0]
        self._gateway = gateway
        self._model = model
        self._running: dict[str, Running] = {}
        self._fresh: dict[str, None] = {}
        """Requests with something to take, in the order in which it came."""
        self._news = asyncio.Event()

    def check(self) -> None:
        """Raises `Refused` if the gateway would admit no request of this caller for this model now."""
        caller = caller_now.get()
        self._gateway.check(self._model, "" if caller is None else caller.name)

    # --- requests ----------------------------------------------------------------------------

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Admit it. Raises vLLM's own errors for a refusal, after which vLLM knows nothing of the request."""
        try:
            spec = _of_caller(spec_of(request, self._model))
            stream = self._gateway.admit(spec)
        except Refused as refused:
            self.frontend.forget(request.request_id)
            raise error_of_refusal(refused) from refused
        except Exception:
            self.frontend.forget(request.request_id)
            raise
        self._running[spec.request] = Running(stream, has_logprobs=spec.sampling.logprobs is not None)
        stream.watch(partial(self._note, spec.request))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """vLLM's output handler found a stop string: these requests ended well."""
        self.cancel(request_ids, "stop")

    def cancel(self, requests: Iterable[str], cause: str) -> None:
        """End requests; `cause` as in `Stream.cancel`. Unknown ones are no error."""
        for name in requests:
            running = self._running.pop(name, None)
            if running is not None:
                running.stream.cancel(cause)
                self._news.set()

    def fail_all(self, code: str, reason: str, cause: str) -> None:
        """End every request with an error."""
        for name in list(self._running):
            self.frontend.fail(name, error_of(code, reason))
            self.cancel([name], cause)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for tokens of any request, or for a change of the numbers below."""
        await self._news.wait()
        self._news.clear()
        fresh, self._fresh = self._fresh, {}
        outputs = [output for name in fresh for output in self._taken(name)]
        waiting = sum(not running.has_begun for running in self._running.values())
        stats = SchedulerStats(num_running_reqs=len(self._running) - waiting, num_waiting_reqs=waiting)
        return EngineCoreOutputs(outputs=outputs, scheduler_stats=stats)

    def _note(self, name: str) -> None:
        self._fresh[name] = None
        self._news.set()

    def _taken(self, name: str) -> list[EngineCoreOutput]:
        """What has come of one request; one that cannot be read fails alone (P14)."""
        running = self._running.get(name)
        if running is None:
            return []
        try:
            return self._take(name, running)
        except Exception as error:  # noqa: BLE001 - or no other request would be heard again
            logger.error("reading a stream failed", request=name, error=repr(error), exc_info=error)
            self.frontend.fail(name, error_of("internal_error", "the gateway could not read the request's tokens"))
            self.cancel([name], "client")
            return []

    def _take(self, name: str, running: Running) -> list[EngineCoreOutput]:
        outputs = []
        while (chunk := running.stream.take()) is not None:
            if chunk.error is not None:
                del self._running[name]
                self.frontend.fail(name, error_of(*chunk.error))
                return []
            running.has_begun = True
            outputs.append(output_of(name, chunk, has_logprobs=running.has_logprobs))
            if chunk.finish is not None:
                del self._running[name]
        return outputs

    # --- utilities ---------------------------------------------------------------------------

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return TASKS

    async def is_sleeping_async(self) -> bool:
        return False

    async def is_scheduler_paused_async(self) -> bool:
        return False

    async def reset_mm_cache_async(self) -> None:
        """Engines behind a gateway keep no multimodal cache in common with it."""

    def dp_engines_running(self) -> bool:
        """Whether any request is in flight."""
        return bool(self._running)

    def shutdown(self, timeout: float | None = None) -> None:
        """End what still runs. The gateway itself is not the client's to stop."""
        self.cancel(list(self._running), "shutdown")


def _of_caller(spec: RequestSpec) -> RequestSpec:
    """The front let the request in; what its caller's key means for it vLLM's application does not pass on."""
    caller = caller_now.get()
    if caller is None:
        return spec
    return replace(spec, tenant=caller.name, priority=max(spec.priority, caller.priority_min))


def _no(name: str) -> Any:
    async def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is for one engine: ask the instance itself, the gateway has many")

    return refuse


for _name in (
    "add_lora", "collective_rpc", "compute_weight_checksums", "get_weight_version", "list_loras", "pause_scheduler",
    "pin_lora", "profile", "release_kv_cache_memory", "remove_lora", "reset_encoder_cache", "reset_prefix_cache",
    "resume_scheduler", "save_sharded_state", "set_weight_version", "sleep", "wake_up",
):  # fmt: skip
    setattr(GatewayClient, f"{_name}_async", _no(_name))
