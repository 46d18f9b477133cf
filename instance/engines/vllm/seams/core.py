"""Touches of vLLM inside the engine-core process: requests, queues, grammars, outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder
from vllm.version import __version__ as VERSION

from midstream.instance.engines.vllm.seams.version import check_parts

# fmt: off
SCHEDULER_PARTS = (
    "requests", "running", "waiting", "kv_holding_waiting", "deferred_waiting", "finished_req_ids", "deferred_frees",
    "defer_block_free", "grammar_compile_error_reqs", "kv_cache_config", "kv_cache_manager", "max_model_len",
    "max_num_active_reqs", "needs_kv_cache_zeroing", "num_spec_tokens", "pause_state", "structured_output_manager",
    "use_v2_model_runner", "vllm_config", "connector", "block_size", "finish_requests", "update_from_output",
    "_enqueue_waiting_request", "_handle_blocked_waiting_request",
)
REQUEST_PARTS = (
    "request_id", "status", "stop_reason", "priority", "arrival_time", "num_tokens", "num_prompt_tokens",
    "num_output_tokens", "num_computed_tokens", "num_in_flight_tokens", "num_preemptions", "output_token_ids",
    "prompt_token_ids", "prompt_embeds", "mm_features", "lora_request", "pooling_params", "sampling_params",
    "resumable", "prefill_stats", "structured_output_request", "append_output_token_ids",
)
# fmt: on
GREEDY_BELOW = 1e-5
"""vLLM's: a lower temperature draws nothing."""
decode_request = MsgpackDecoder(EngineCoreRequest).decode


def check_core(scheduler: Any) -> None:
    """Raises `BadInput` if this vLLM lacks anything used here."""
    check_parts(scheduler, SCHEDULER_PARTS)
    check_parts(Request("probe", [1], SamplingParams(max_tokens=1), None), REQUEST_PARTS)
    check_parts(EngineCore, ("preprocess_add_request", "collective_rpc", "abort_requests"))
    check_parts(PauseState, ("UNPAUSED",))


def scheduler_of(core: Any) -> Any:
    """The core's scheduler, which is ours."""
    return core.scheduler


def collective(core: Any, method: str, argument: bytes) -> list[Any]:
    """Call a worker method on every rank and wait. Between steps only."""
    results: list[Any] = core.collective_rpc(method, args=(argument,))
    return results


# --- fixed facts -----------------------------------------------------------------------------------


def is_v1_runner(scheduler: Any) -> bool:
    """The V1 runner keeps a request's state in the worker; V2 gets all of it from the scheduler."""
    return not scheduler.use_v2_model_runner


def engine_refusal(scheduler: Any) -> str | None:
    """Why no run of this engine can be moved exactly, as a code."""
    groups, parallel = scheduler.kv_cache_config.kv_cache_groups, scheduler.vllm_config.parallel_config
    if len(groups) != 1:
        return "several_kv_groups"
    if type(groups[0].kv_cache_spec) is not FullAttentionSpec or groups[0].kv_cache_spec.sliding_window is not None:
        return "not_full_attention"
    if scheduler.num_spec_tokens:
        return "speculative_decoding"
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        return "parallel_layout"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "parallel_layout"
    return "kv_connector" if scheduler.connector is not None else None


def description(scheduler: Any) -> dict[str, Any]:
    """Sizes and names that do not change while the core lives."""
    config: VllmConfig = scheduler.vllm_config
    return {
        "slots_max": scheduler.max_num_active_reqs,
        "tokens_max": scheduler.max_model_len,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "workers": config.parallel_config.world_size,
        "vllm_version": VERSION,
        "has_overlapping_steps": isinstance(scheduler, AsyncScheduler),
    }


def overlapping_steps(config: VllmConfig) -> bool:
    """Whether a step may begin before the last one's output is there."""
    return int(config.max_concurrent_batches) > 1


def fence_block_frees(scheduler: Any) -> None:
    """Give a freed request's blocks back only after the steps in flight that may still write them."""
    scheduler.defer_block_free = True


def frees_fenced(scheduler: Any) -> int:
    """How many requests' blocks wait for a step in flight before they are free."""
    return len(scheduler.deferred_frees)


# --- requests --------------------------------------------------------------------------------------


def build_request(core: Any, encoded: bytes, outputs: Iterable[int]) -> Request:
    """A request as the core makes it, with outputs that count as generated; its grammar starts to compile."""
    request, _ = core.preprocess_add_request(decode_request(encoded))
    made = list(outputs)
    if made:
        request.append_output_token_ids(made)
    return request


def request_refusal(request: Request) -> str | None:
    """Why this request cannot go on exactly elsewhere, as a code."""
    params = request.sampling_params
    if request.pooling_params is not None or params is None:
        return "pooling"
    if request.lora_request is not None:
        return "lora"
    if request.mm_features:
        return "multimodal"
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompt_embeds"
    if request.resumable:
        return "streaming_input"
    if params.prompt_logprobs is not None and not request.num_output_tokens:
        return "prompt_logprobs"
    return None


def is_seeded(request: Request) -> bool:
    """Whether it draws from a generator of its own."""
    params = request.sampling_params
    return params is not None and params.seed is not None and bool(params.temperature >= GREEDY_BELOW)


def computed_of(request: Request) -> int:
    """Tokens whose KV is written: steps in flight are not counted."""
    return int(request.num_computed_tokens - request.num_in_flight_tokens)


def ended(scheduler: Any, request: Request) -> bool:
    """Whether its outputs already end it; notes status and stop reason."""
    return bool(request.num_output_tokens) and check_stop(request, scheduler.max_model_len)


def finish_of(request: Request) -> tuple[int, int | str | None] | None:
    """Finish reason (its number in vLLM) and stop reason."""
    reason = request.get_finished_reason()
    return None if reason is None else (int(reason), request.stop_reason)


def is_finished(request: Request) -> bool:
    """Whether it has come to its end."""
    return bool(request.is_finished())


def is_running(request: Request) -> bool:
    """Whether it is in the batch, or was when it was frozen."""
    return bool(request.status == RequestStatus.RUNNING)


def is_paused(scheduler: Any) -> bool:
    """Whether the engine takes no new work."""
    return bool(scheduler.pause_state != PauseState.UNPAUSED)


# --- queues ----------------------------------------------------------------------------------------


def take_out(scheduler: Any, request: Request) -> int:
    """Take a request out of batch or queue, and keep everything it has; return where it was in the batch."""
    if request.status == RequestStatus.RUNNING:
        place = scheduler.running.index(request)
        del scheduler.running[place]
        return int(place)
    scheduler.waiting.remove_requests([request])
    scheduler.kv_holding_waiting.remove_requests([request])
    scheduler.deferred_waiting.discard(request)
    return 0


def put_back(scheduler: Any, request: Request, place: int) -> None:
    """Undo `take_out`."""
    if request.status == RequestStatus.RUNNING:
        scheduler.running.insert(place, request)
    else:
        scheduler._enqueue_waiting_request(request)


def enter(scheduler: Any, request: Request, *, is_resumed: bool) -> None:
    """Make the scheduler know a request that did not come through vLLM's own door.

    `is_resumed`: treat it as preempted, so that the tokens it has are recomputed or, if its KV is here, kept.
    """
    request.prefill_stats = None
    if is_resumed and request.status == RequestStatus.WAITING:
        request.status = RequestStatus.PREEMPTED
    scheduler.requests[request.request_id] = request
    scheduler._enqueue_waiting_request(request)


def waits_for_grammar(request: Request) -> bool:
    """Whether its grammar has yet to be compiled or advanced."""
    return bool(request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)


def grammar_ready(request: Request, *, is_resumed: bool) -> None:
    """The grammar stands where the outputs end; it may run."""
    request.status = RequestStatus.PREEMPTED if is_resumed else RequestStatus.WAITING


def advance_grammar(scheduler: Any, request: Request) -> bool:
    """Replay the outputs through the compiled grammar, all as one; False if it rejects them."""
    outputs = list(request.output_token_ids)
    return bool(scheduler.structured_output_manager.accept_tokens(request, outputs))


def give_up_for_grammar(scheduler: Any, request: Request) -> None:
    """Let the request end with an error at the next step."""
    scheduler.grammar_compile_error_reqs.add(request.request_id)


def is_grammar_compiled(request: Request) -> bool:
    """Whether there is a usable grammar now."""
    wanted = request.structured_output_request
    return wanted is not None and wanted.grammar is not None and not isinstance(wanted.grammar, Exception)


def drop(scheduler: Any, slot: str) -> None:
    """End a request, whatever it is doing, and free what it has."""
    scheduler.finish_requests(slot, RequestStatus.FINISHED_ABORTED)


def forget_in_workers(scheduler: Any, slot: str) -> None:
    """Let the workers drop what they know of a request at the next step."""
    scheduler.finished_req_ids.add(slot)


def request_counts(scheduler: Any) -> tuple[int, list[Request]]:
    """How many are in the batch, and those in the queues, first come first."""
    return len(scheduler.running), [*scheduler.kv_holding_waiting, *scheduler.waiting]


# --- outputs ---------------------------------------------------------------------------------------


def add_output(outputs: dict[int, EngineCoreOutputs], request_id: str, extra: dict[str, Any]) -> None:
    """Send something of our own along with a step's outputs."""
    output = EngineCoreOutput(request_id=request_id, new_token_ids=[], kv_transfer_params=extra)
    outputs.setdefault(0, EngineCoreOutputs(outputs=[])).outputs.append(output)


__all__ = ["VERSION", "EngineCore", "Request", "Scheduler"]
