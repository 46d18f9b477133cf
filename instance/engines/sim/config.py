"""The settings of one simulated engine, checked once."""

from __future__ import annotations

from typing import Literal

import msgspec

from midstream.control.errors import BadInput
from midstream.migration.plan import blocks_for
from midstream.migration.protocol.messages import RequestSpec, Sampling

WORD_BYTES = 8
"""One KV word. A token position holds `bytes_per_token / WORD_BYTES` of them."""

VOCAB_MIN = 128

STEPS_AT_ONCE_MAX = 4_096


class SimConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulated engine. Engines that are to move runs to each other share all but sizes and speed."""

    model: str = "sim-llama2-70b"
    weights_revision: str = "1"
    """Another revision makes other tokens, as with a real model."""
    vocab_size: int = 32_000
    eos_probability: float = 0.002
    """Chance per token that the model ends by itself."""
    block_tokens: int = 16
    blocks_total: int = 4_096
    bytes_per_token: int = WORD_BYTES
    """KV bytes of one position, a multiple of 8. Small for many runs, large to measure transfers."""
    slots_max: int = 64
    tokens_max: int = 32_768
    """Longest prompt + output; never more than the blocks hold."""
    step_tokens_max: int = 2_048
    """Token budget of one step (chunked prefill)."""
    waiting_max: int = 10_000
    """Runs that may wait; more are refused."""
    step_times: str = "llama2-70b/h100-80gb/8"
    """Which fitted step-time model: model/hardware/tensor-parallel."""
    time_scale: float = 1.0
    """Factor on step times; 0 runs as fast as it can."""
    secret: bytes = b""
    """Key of the transfer handles this engine hands out."""
    kv: Literal["bytes", "lengths"] = "bytes"
    """`lengths`: blocks without bytes and tokens that are only numbered, for simulations of scheduling."""
    prefix_cache: bool = True
    """Full blocks are found again by their content."""
    stream_interval_ms: float = 0.0
    """Tokens between the first and the last are told at most so often; 0: at every step."""
    steps_at_once_max: int = 1
    """Decode steps between which nothing can change are made in one go, at most so many; needs `kv = "lengths"`."""

    def __post_init__(self) -> None:
        positive = (
            "block_tokens", "blocks_total", "slots_max", "tokens_max", "step_tokens_max", "waiting_max",
            "steps_at_once_max",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise BadInput(f"{name} must be at least 1")
        if self.bytes_per_token < WORD_BYTES or self.bytes_per_token % WORD_BYTES:
            raise BadInput(f"bytes_per_token must be a positive multiple of {WORD_BYTES}")
        if self.vocab_size < VOCAB_MIN:
            raise BadInput(f"vocab_size must be at least {VOCAB_MIN}")
        if not 0 <= self.eos_probability < 1:
            raise BadInput("eos_probability must be in [0, 1)")
        if self.time_scale < 0:
            raise BadInput("time_scale must not be negative")
        if self.stream_interval_ms < 0:
            raise BadInput("stream_interval_ms must not be negative")
        if self.steps_at_once_max > (STEPS_AT_ONCE_MAX if self.kv == "lengths" else 1):
            raise BadInput(f"steps_at_once_max is at most {STEPS_AT_ONCE_MAX}, and 1 unless kv is lengths")

    @property
    def planes(self) -> int:
        """Copies of each position's word: `bytes_per_token / 8`."""
        return self.bytes_per_token // WORD_BYTES

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""
        return self.block_tokens * self.bytes_per_token

    @property
    def kv_bytes(self) -> int:
        """Bytes of all KV blocks."""
        return self.blocks_total * self.block_bytes

    @property
    def length_max(self) -> int:
        """Longest prompt + output that this engine can hold."""
        return min(self.tokens_max, self.blocks_total * self.block_tokens)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return blocks_for(tokens, self.block_tokens)


def check_spec(spec: RequestSpec, outputs: tuple[int, ...], config: SimConfig) -> str | None:
    """Why a request makes no sense, or None."""
    if not spec.prompt:
        return "the prompt is empty"
    if config.kv == "lengths":
        return _check_sampling(spec.sampling) or _check_lengths(spec.sampling)
    vocab_size = config.vocab_size
    for name, ids in (("prompt", spec.prompt), ("outputs", outputs)):
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            return f"{name} has a token id outside 0..{vocab_size - 1}"
    return _check_sampling(spec.sampling)


def _check_lengths(sampling: Sampling) -> str | None:
    """Numbered tokens mean nothing: only their number can end a run."""
    if not sampling.ignore_eos or sampling.stop_token_ids or sampling.logprobs is not None:
        return "without KV bytes a request must ignore the end token, and have neither stop tokens nor logprobs"
    return None


def _check_sampling(sampling: Sampling) -> str | None:
    if sampling.max_tokens < 1:
        return "max_tokens must be at least 1"
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        return "min_tokens must be between 0 and max_tokens"
    if not 0 <= sampling.temperature <= 100:
        return "temperature must be between 0 and 100"
    if sampling.top_k < -1 or not 0 < sampling.top_p <= 1:
        return "top_k must be at least -1 and top_p in (0, 1]"
    if not (abs(sampling.presence_penalty) <= 2 and abs(sampling.frequency_penalty) <= 2):
        return "penalties must be between -2 and 2"
    return None
