"""Which vLLM this face was checked with, and what it must not be run with."""

from __future__ import annotations

from typing import Final

from midstream.control.errors import BadInput

CHECKED: Final = ("0.32.",)
"""Versions whose `AsyncLLM` and `OutputProcessor` this face was tested with."""


def check_vllm(*, any_version: bool = False) -> str:
    """The installed version. Raises `BadInput` without vLLM, for an unchecked version unless `any_version`, for pickle."""
    try:
        import vllm
        from vllm import envs
    except ImportError as error:
        raise BadInput(f"engine vllm needs vLLM in this environment: {error}") from error
    version: str = vllm.__version__
    if not any_version and not version.startswith(CHECKED):
        raise BadInput(f"the gateway was checked with vLLM {', '.join(CHECKED)}x, this is {version}")
    if envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise BadInput("VLLM_ALLOW_INSECURE_SERIALIZATION is set: pickle on a wire is never allowed here")
    return version
