"""A request as vLLM's core takes it: from the bytes that the gateway sent, or from plain sampling settings."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from midstream.control.errors import Refused
from midstream.instance.engines.vllm.seams import host
from midstream.migration.protocol.messages import RequestSpec, Sampling

INTERNAL_EXTRAS = ("kv_transfer_params", "ec_transfer_params")


class Requests:
    """Makes and checks the requests of one engine."""

    def __init__(self, config: host.VllmConfig, tokens_max: int, engine_name: str) -> None:
        self._tokens_max = tokens_max
        self._vocabulary = config.model_config.get_vocab_size()
        self._defaults = config.model_config.try_get_generation_config()
        self._eos = getattr(config.model_config.hf_text_config, "eos_token_id", None)
        self._engine_name = engine_name
        self._arrivals = itertools.count(1)
        self._has_lora = config.lora_config is not None
        self._is_multimodal = bool(config.model_config.supports_multimodal_inputs)
        self._is_on_cpu = config.device_config.device_type == "cpu"

    def needs_own_door(self, request: host.EngineCoreRequest) -> bool:
        """Whether it must enter through `mig_submit` even when fresh.

        Grammars are compiled from one thread only; and a stock engine on CPU dies of a seeded request whose
        prompt it computes in several steps, unless the request brings a generator of ours.
        """
        params = request.sampling_params
        is_seeded = params.seed is not None and params.temperature >= 1e-5
        return params.structured_outputs is not None or (is_seeded and self._is_on_cpu)

    def encoded(self, request: host.EngineCoreRequest) -> bytes:
        """The request as one piece of bytes. Raises `Refused` for what has no such form."""
        try:
            return host.encode_request(request)
        except TypeError as error:
            raise Refused("bad_request", str(error)) from error

    def core_request(self, slot: str, spec: RequestSpec) -> host.EngineCoreRequest:
        """The request under the slot's name. Raises `Refused` (`bad_request`, `too_long`)."""
        try:
            request = self._decoded(spec) if spec.payload else self._from_sampling(spec)
        except (ValueError, TypeError, host.VLLMValidationError) as error:  # msgspec's is a ValueError
            raise Refused("bad_request", str(error)) from error
        request.request_id = slot
        request.priority = spec.priority
        self._check(spec, request)
        return request

    def _decoded(self, spec: RequestSpec) -> host.EngineCoreRequest:
        request: host.EngineCoreRequest = host.decode_request(spec.payload)
        if request.prompt_token_ids is not None and tuple(request.prompt_token_ids) != spec.prompt:
            raise ValueError("the payload has another prompt")
        return request

    def _from_sampling(self, spec: RequestSpec) -> host.EngineCoreRequest:
        params = sampling_params(spec.sampling)
        eos = self._eos[0] if isinstance(self._eos, list) else self._eos
        params.update_from_generation_config(dict(self._defaults), eos)
        return host.EngineCoreRequest(
            request_id=spec.request,
            prompt_token_ids=list(spec.prompt),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=(spec.arrival_ms or next(self._arrivals)) / 1000,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )

    def _check(self, spec: RequestSpec, request: host.EngineCoreRequest) -> None:
        params = request.sampling_params
        self._check_kind(request)
        if not spec.prompt:
            raise Refused("bad_request", "an empty prompt")
        if max(spec.prompt) >= self._vocabulary or min(spec.prompt) < 0:
            raise Refused("bad_request", f"token ids go up to {self._vocabulary - 1}")
        if any(name in (params.extra_args or {}) for name in INTERNAL_EXTRAS):
            raise Refused("bad_request", f"{', '.join(INTERNAL_EXTRAS)} belong to the engines")
        if not params.max_tokens or params.max_tokens < 1:
            raise Refused("bad_request", "max_tokens must be at least 1")
        if len(spec.prompt) + params.max_tokens > self._tokens_max:
            total = len(spec.prompt) + params.max_tokens
            raise Refused("too_long", f"prompt and output may have {self._tokens_max} tokens, asked for {total}")

    def _check_kind(self, request: host.EngineCoreRequest) -> None:
        refused = {
            "pooling": request.sampling_params is None or request.pooling_params is not None,
            "prompt_embeds": request.prompt_embeds is not None or request.prompt_token_ids is None,
            "streaming_input": request.resumable,
            "lora": request.lora_request is not None and not self._has_lora,
            "multimodal": bool(request.mm_features) and not self._is_multimodal,
        }
        for code, is_there in refused.items():
            if is_there:
                raise Refused(code, f"{self._engine_name} does not serve it")


def sampling_params(sampling: Sampling) -> host.SamplingParams:
    """vLLM's parameters for ours. Raises `ValueError`."""
    return host.SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=list(sampling.stop_token_ids),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logprobs=sampling.logprobs,
    )


def logprob_entries(output: host.EngineCoreOutput) -> tuple[bytes, ...]:
    """One entry per new token: msgpack of (token ids, log probabilities, rank of the chosen one); chosen first."""
    rows: Any = output.new_logprobs
    if rows is None:
        return ()
    return tuple(
        msgspec.msgpack.encode((ids.tolist(), values.tolist(), int(rank)))
        for ids, values, rank in zip(rows.logprob_token_ids, rows.logprobs, rows.sampled_token_ranks, strict=True)
    )
