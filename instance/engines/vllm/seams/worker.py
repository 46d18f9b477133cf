"""Touches of vLLM inside a worker process: the V1 runner's request cache and the KV tensors."""

from __future__ import annotations

import platform
from typing import Any

import torch
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from midstream.instance.engines.vllm import calls
from midstream.instance.engines.vllm.generators import generator_for, state_of
from midstream.instance.engines.vllm.seams.version import check_parameters, check_parts

RUNNER_PARTS = (
    "kv_caches",
    "kv_cache_config",
    "attn_groups",
    "device",
    "compilation_config",
    "requests",
    "input_batch",
)
GREEDY_BELOW = 1e-5
"""vLLM's: a lower temperature draws nothing."""
# fmt: off
CACHED_FIELDS = (
    "req_id", "prompt_token_ids", "mm_features", "sampling_params", "generator", "block_ids", "num_computed_tokens",
    "output_token_ids",
)
# fmt: on


def check_worker(worker: Any) -> None:
    """Raises `BadInput` if this vLLM's worker lacks anything used here."""
    check_parts(worker, ("model_runner", "rank"))
    check_parts(worker.model_runner, RUNNER_PARTS[:5] if is_v2(worker) else RUNNER_PARTS)
    check_parameters(CachedRequestState, CACHED_FIELDS)


def is_v2(worker: Any) -> bool:
    """Whether the V2 model runner is in use; it keeps no request state that would have to move."""
    return bool(worker.use_v2_model_runner)


def rank_of(worker: Any) -> int:
    """The worker's number; equal numbers exchange KV."""
    return int(worker.rank)


def kv_tensors(worker: Any) -> tuple[list[Any], int]:
    """One tensor per layer that has KV of its own, and the number of blocks."""
    runner = worker.model_runner
    own = {int(tensor.data_ptr()): tensor for tensor in runner.kv_caches}
    return list(own.values()), int(runner.kv_cache_config.num_blocks)


def kv_holders(worker: Any) -> list[Any]:
    """Every tensor object through which the runner or a layer reaches KV."""
    runner = worker.model_runner
    layers = runner.compilation_config.static_forward_context.values()
    kept = [getattr(layer, "kv_cache", None) for layer in layers]
    return [tensor for tensor in (*runner.kv_caches, *kept) if isinstance(tensor, torch.Tensor)]


def layout_of(worker: Any) -> str:
    """What must be equal for bytes of KV to mean the same: shape, strides, type, back end and, on CPU, its ISA."""
    tensors, _ = kv_tensors(worker)
    first = tensors[0]
    at = [f"{size}/{stride}" for size, stride in zip(first.shape[1:], first.stride()[1:], strict=True)]
    group = worker.model_runner.attn_groups[0][0]
    place = f"cpu-{_instruction_set(group)}" if first.device.type == "cpu" else first.device.type
    kind = str(first.dtype).removeprefix("torch.")
    return f"{group.backend.get_name()} {place} {len(tensors)}x{kind}[{' '.join(at)}]"


def _instruction_set(group: Any) -> str:
    """The attention kernel's choice: it may pack keys differently for each."""
    chosen = getattr(group.get_metadata_builder(), "isa", "any")
    return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability().lower()}-{chosen}"


def insert_request(worker: Any, insert: calls.Insert) -> None:
    """Put a run that did not begin here into the V1 runner's cache, before it is first scheduled."""
    runner = worker.model_runner
    request = MsgpackDecoder(EngineCoreRequest).decode(insert.request)
    cached = CachedRequestState(
        req_id=insert.slot,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=[],
        sampling_params=request.sampling_params,
        generator=None,
        block_ids=(list(insert.block_ids),),
        num_computed_tokens=insert.computed,
        output_token_ids=list(insert.outputs),
    )
    cached.generator = _generator(runner, cached, insert.rng)
    runner.requests[insert.slot] = cached


def _generator(runner: Any, cached: Any, state: bytes) -> torch.Generator | None:
    params = cached.sampling_params
    if params.seed is None or params.temperature < GREEDY_BELOW:
        return None
    kept = lambda: len(cached.output_token_ids)  # noqa: E731 - the runner puts another list there now and then
    return generator_for(params.seed, kept, state, runner.device, runner.input_batch.vocab_size)


def generator_state(worker: Any, slot: str) -> bytes:
    """The state of a run's generator; empty if it has none."""
    cached = worker.model_runner.requests.get(slot)
    generator = None if cached is None else cached.generator
    return b"" if generator is None else state_of(generator)
