"""vLLM's `AsyncLLM` with the gateway in the engine core's place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from vllm.config import VllmConfig
from vllm.renderers import renderer_from_config
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import StatLoggerManager

from midstream.api.gateway.vllm.client import GatewayClient
from midstream.api.gateway.vllm.errors import error_of_refusal
from midstream.control.errors import Refused


class GatewayLLM(AsyncLLM):
    """Everything of `AsyncLLM` but its engine.

    `AsyncLLM.__init__` starts engine processes, so this one builds the same parts (as of vLLM 0.32) and takes the
    client it is given.
    """

    def __init__(self, vllm_config: VllmConfig, client: GatewayClient, *, log_requests: bool) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.scheduler_config = vllm_config.scheduler_config
        self.observability_config = vllm_config.observability_config
        self.log_requests = log_requests
        self.log_stats = True
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self.admission_stats = None
        self.output_processor = OutputProcessor(
            self.renderer.tokenizer,
            log_stats=self.log_stats,
            stream_interval=vllm_config.scheduler_config.stream_interval,
            tracing_enabled=vllm_config.observability_config.otlp_traces_endpoint is not None,
        )
        self.engine_core = client
        client.frontend = self
        self.logger_manager = StatLoggerManager(
            vllm_config=vllm_config, engine_idxs=client.engine_ranks_managed, enable_default_loggers=False
        )
        self.logger_manager.log_engine_initialized()
        self.output_handler: asyncio.Task[None] | None = None
        self.profiler = None
        self._client_count = 1
        self._elastic_ep_lock = asyncio.Lock()
        self._profile_lock = asyncio.Lock()
        self._profile_session_guard_enabled = True
        self._profile_session_active = False

    # --- what vLLM's application asks --------------------------------------------------------

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """vLLM asks this before it begins a response: a refusal still becomes an HTTP status. Raises vLLM's errors."""
        super().check_admission(n, request_id)
        try:
            self.engine_core.check()
        except Refused as refused:
            raise error_of_refusal(refused) from refused

    async def check_health(self) -> None:
        """Raises `EngineDeadError` while no request would be admitted: `/health` answers 503."""
        await super().check_health()
        try:
            self.engine_core.check()
        except Refused as refused:
            if refused.code not in ("overloaded", "tenant_queue_full"):
                raise EngineDeadError from refused

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """The client has gone (a stop string comes by `abort_requests_async` instead)."""
        asked = (request_id,) if isinstance(request_id, str) else tuple(request_id)
        self.engine_core.cancel(self.output_processor.abort_requests(asked, internal), "client")

    # --- what its client tells it ------------------------------------------------------------

    def forget(self, request: str) -> None:
        """See `Frontend`."""
        self.output_processor.abort_requests([request], internal=True)

    def fail(self, request: str, error: Exception) -> None:
        """See `Frontend`. One choice's failure fails all choices of its request."""
        state = self.output_processor.request_states.get(request)
        if state is None:
            return
        state.queue.put(error)
        whole = request if state.parent_req is None else state.parent_req.request_id
        ended = self.output_processor.abort_requests([whole], internal=True)
        self.engine_core.cancel([name for name in ended if name != request], "client")
