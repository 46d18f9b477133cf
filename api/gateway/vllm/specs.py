"""vLLM's request to an engine core as a Midstream request, or a refusal before anything happened."""

from __future__ import annotations

from typing import Final

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from midstream.migration.protocol.messages import RequestSpec, Sampling

PAYLOAD_BYTES_MAX: Final = 16 * 1024 * 1024
"""Half a frame of the data plane: the prompt's ids travel beside the payload."""
INTERNAL_EXTRAS: Final = ("kv_transfer_params", "ec_transfer_params")
"""Extra sampling arguments that belong to the engines' own data plane."""


def spec_of(request: EngineCoreRequest, model: str) -> RequestSpec:
    """What the gateway's core admits. `payload` is the request in vLLM's msgpack form, tensors inline, no pickle.

    Raises `VLLMValidationError` for what cannot be carried on exactly on another instance.
    """
    params = request.sampling_params
    _refuse_inexact(request, params)
    assert params is not None
    return RequestSpec(
        request=request.request_id,
        model=model,
        prompt=tuple(request.prompt_token_ids),
        sampling=sampling_of(params),
        priority=request.priority,
        arrival_ms=int(request.arrival_time * 1000),
        payload=_encode(request),
        session=request.session_id or "",
    )


def sampling_of(params: SamplingParams) -> Sampling:
    """As much of vLLM's parameters as Midstream's own have names for; the payload has all of them."""
    return Sampling(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        seed=params.seed,
        ignore_eos=params.ignore_eos,
        stop_token_ids=tuple(params.stop_token_ids or ()),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logprobs=params.num_logprobs,
    )


def _encode(request: EngineCoreRequest) -> bytes:
    encoder = MsgpackEncoder(size_threshold=PAYLOAD_BYTES_MAX)
    try:
        parts = encoder.encode(request)
    except TypeError as error:
        raise VLLMValidationError(f"this request has no form that may travel: {error}") from error
    if len(parts) != 1 or len(parts[0]) > PAYLOAD_BYTES_MAX:
        raise VLLMValidationError(f"a request may have {PAYLOAD_BYTES_MAX} bytes at most, tensors included")
    return bytes(parts[0])


def _refuse_inexact(request: EngineCoreRequest, params: SamplingParams | None) -> None:
    """Say no to the first thing that a move or a replay could not carry on."""
    if params is None or request.pooling_params is not None:
        raise VLLMValidationError("only text generation is served here, not pooling")
    extras = params.extra_args or {}
    refused = {
        "prompt_embeds": request.prompt_embeds is not None or request.prompt_token_ids is None,
        "stream input": request.resumable,
        "data_parallel_rank": request.data_parallel_rank is not None,
        "prompt_logprobs": params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None,
        "lora": request.lora_request is not None,
        **{name: name in extras for name in INTERNAL_EXTRAS},
    }
    for name, is_there in refused.items():
        if is_there:
            raise VLLMValidationError(f"{name} is not served by this gateway", parameter=name)
