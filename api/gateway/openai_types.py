"""OpenAI request bodies as typed values: read, checked, and turned into prompts and sampling parameters.

What this gateway cannot carry out exactly is refused by name; nothing a client sends is silently ignored
except labels that never change an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from midstream.api.keys import PRIORITY_MIN
from midstream.api.problems import Problem
from midstream.migration.protocol.messages import Sampling

CHOICES_MAX: Final = 4
STOPS_MAX: Final = 4
STOP_CHARS_MAX: Final = 256
STOP_IDS_MAX: Final = 64
MESSAGES_MAX: Final = 2_048

LABELS: Final = frozenset(
    {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier", "parallel_tool_calls"}
)
"""Accepted and dropped: they never change what is generated here."""

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
"""Known options that a simulated engine cannot honour, with the values that ask for nothing."""

INTERNAL: Final = frozenset({"kv_transfer_params", "request_id", "data_parallel_rank", "vllm_xargs", "cache_salt"})
"""Options of the engines' own data plane: refused, whatever their value."""

INTERNAL_HEADERS: Final = ("x-midstream-", "x-kv-", "x-data-parallel-", "x-prefill-", "x-decode-")
"""Header prefixes that only parts of a serving system may use among themselves."""

Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopText = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stream is dressed."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints take. Defaults are OpenAI's; the names beyond OpenAI's are vLLM's."""

    model: str
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    seed: Seed | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=STOPS_MAX)] = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=STOP_IDS_MAX)] = []
    ignore_eos: bool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=PRIORITY_MIN, le=-PRIORITY_MIN)] | None = None
    """Lower runs first; below 0 is the high class. Unset: 0, or the best that the caller's key has."""
    return_token_ids: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def logprobs_wanted(self) -> int | None:
        """How many alternatives per token, `None` for no logprobs at all."""
        raise NotImplementedError


class CompletionAsked(Asked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None

    @property
    def logprobs_wanted(self) -> int | None:
        return self.logprobs


class TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a message; only text here."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """All text of the message."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatAsked(Asked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0

    @property
    def logprobs_wanted(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


A = TypeVar("A", bound=Asked)


class Invalid(Problem):
    """A request that is wrong in one named parameter: always a 400."""

    def __init__(self, code: str, detail: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(status, code, detail)
        self.param = param


def read_request(body: bytes, kind: type[A]) -> A:
    """Read one request body. Raises `Invalid`, naming the parameter."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Invalid("malformed_json", f"the body is not JSON: {str(error)[:200]}") from error
    if not isinstance(fields, dict):
        raise Invalid("invalid_type", "the body must be a JSON object")
    try:
        asked = msgspec.convert(_wanted(fields, kind), kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    _check_together(asked)
    return asked


def prompt_ids(prompt: str | list[Any], encode: Callable[[str], tuple[int, ...]], vocabulary: int) -> tuple[int, ...]:
    """Token ids of a completion prompt: a text, a list of ids, or a list of just one of these."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        ids = encode(prompt)
    elif all(type(token) is int and 0 <= token < vocabulary for token in prompt):
        ids = tuple(prompt)
    elif any(isinstance(item, str | list) for item in prompt):
        raise Invalid("unsupported_parameter", "one prompt per request, please", "prompt")
    else:
        raise Invalid("invalid_value", f"token ids are integers from 0 to {vocabulary - 1}", "prompt")
    if not ids:
        raise Invalid("invalid_value", "the prompt is empty", "prompt")
    return ids


def chat_text(messages: list[ChatMessage]) -> str:
    """The template of the simulated model: each message as `role: text`, then the assistant's turn."""
    return "".join(f"{message.role}: {message.text}\n" for message in messages) + "assistant:"


def sampling_of(asked: Asked, index: int, *, prompt_tokens: int, context: int, default: int) -> Sampling:
    """Sampling parameters of the `index`-th choice. Raises `Invalid` if prompt and output exceed the context."""
    room = context - prompt_tokens
    wanted = asked.max_completion_tokens or asked.max_tokens
    if room < 1 or (wanted or 0) > room:
        total = f"{prompt_tokens} prompt tokens and {wanted or 1} of output"
        raise Invalid("context_length_exceeded", f"{total} exceed the context of {context} tokens", "max_tokens")
    max_tokens = wanted or min(default, room)
    if asked.min_tokens > max_tokens:
        raise Invalid("invalid_value", "min_tokens is above max_tokens", "min_tokens")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=asked.min_tokens,
        temperature=asked.temperature,
        top_k=max(asked.top_k, 0),
        top_p=asked.top_p,
        seed=None if asked.seed is None else asked.seed + index,
        ignore_eos=asked.ignore_eos,
        stop_token_ids=tuple(asked.stop_token_ids),
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logprobs=asked.logprobs_wanted,
    )


def refuse_internal_headers(headers: Mapping[str, str]) -> None:
    """Raises `Invalid` if a client sent a header of the data plane."""
    for name in headers:
        if name.lower().startswith(INTERNAL_HEADERS):
            raise Invalid("forbidden_header", f"the header {name} is not for clients", name)


def _wanted(fields: dict[str, Any], kind: type[Asked]) -> dict[str, Any]:
    """The fields that mean something here; `null` is as absent."""
    kept = {}
    for name, value in fields.items():
        if name in INTERNAL:
            raise Invalid("forbidden_parameter", f"{name} is not for clients", name)
        if value is None or name in LABELS:
            continue
        if name in kind.__struct_fields__:
            kept[name] = value
        elif name not in NEUTRAL:
            raise Invalid("unknown_parameter", f"unknown parameter {name[:64]!r}", name[:64])
        elif not any(value == neutral for neutral in NEUTRAL[name]):
            raise Invalid("unsupported_parameter", f"this model does not support {name}", name)
    return kept


def _invalid(message: str) -> Invalid:
    """msgspec's message names the place as `$.field` at its end, or a missing field."""
    if place := re.search(r" - at `\$\.?([^`.\[]*)", message):
        return Invalid("invalid_value", message, place.group(1) or None)
    missing = re.search(r"required field `(\w+)`", message)
    return Invalid("missing_parameter" if missing else "invalid_value", message, missing.group(1) if missing else None)


def _check_together(asked: Asked) -> None:
    if asked.stream_options is not None and not asked.stream:
        raise Invalid("invalid_value", "stream_options is only for streams", "stream_options")
    if isinstance(asked, ChatAsked) and asked.top_logprobs and not asked.logprobs:
        raise Invalid("invalid_value", "top_logprobs needs logprobs", "top_logprobs")
    if asked.max_tokens and asked.max_completion_tokens and asked.max_tokens != asked.max_completion_tokens:
        raise Invalid("invalid_value", "max_tokens and max_completion_tokens differ", "max_tokens")
