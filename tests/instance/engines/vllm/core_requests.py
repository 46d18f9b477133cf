"""Requests as the gateway makes them: through vLLM's own input processor."""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from midstream.instance.engines.vllm.seams import host
from midstream.migration.protocol.messages import RequestSpec, Sampling


class RequestMaker:
    """Bad words, grammars and stop tokens are resolved here, with the tokenizer."""

    def __init__(self, config: Any) -> None:
        self._processor = InputProcessor(config)

    def spec(self, name: str, params: SamplingParams, prompt_tokens: int) -> RequestSpec:
        """A request whose prompt follows from its name."""
        first = sum(name.encode()) * 37
        prompt = tuple(3 + (first + 11 * i) % 900 for i in range(prompt_tokens))
        request = self._processor.process_inputs(name, {"prompt_token_ids": list(prompt)}, params, ("generate",))
        sampling = Sampling(max_tokens=params.max_tokens or 16, logprobs=params.logprobs)
        return RequestSpec(request=name, prompt=prompt, sampling=sampling, payload=host.encode_request(request))
