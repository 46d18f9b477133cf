"""Whether the installed vLLM is one that this face fits."""

from __future__ import annotations

from typing import Final

from midstream.control.errors import BadInput
from midstream.instance.engines.vllm.seams.version import check_parameters, check_parts, check_version

LLM_PARTS: Final = [
    "add_request",
    "abort",
    "generate",
    "check_admission",
    "check_health",
    "errored",
    "_run_output_handler",
]
PROCESSOR_PARTS: Final = ["request_states", "parent_requests", "abort_requests", "process_outputs", "propagate_error"]


def check_vllm(*, any_version: bool = False) -> None:
    """Raises `BadInput` without vLLM, for a version not checked (unless `any_version`), and where pickle is allowed."""
    try:
        import vllm
        from vllm import envs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.output_processor import OutputProcessor
    except ImportError as error:
        raise BadInput(f"engine vllm needs vLLM in this environment: {error}") from error
    check_version(vllm.__version__, is_untested_allowed=any_version)
    check_parts(AsyncLLM, LLM_PARTS)
    check_parts(OutputProcessor("", log_stats=False), PROCESSOR_PARTS)
    check_parameters(OutputProcessor, ("tokenizer", "log_stats", "stream_interval", "tracing_enabled"))
    if envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise BadInput("VLLM_ALLOW_INSECURE_SERIALIZATION is set: pickle on a wire is never allowed here")
