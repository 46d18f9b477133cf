"""OpenAI response bodies and stream events as bytes. Everything that is equal for all chunks is rendered once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from midstream.api.gateway.choices import Delta, TokenLogprob
from midstream.api.gateway.openai_types import CHOICES_MAX
from midstream.api.gateway.text import token_bytes, token_text

DONE: Final = b"data: [DONE]\n\n"

_encode: Final = msgspec.json.Encoder().encode


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A complete choice of an answer that is not streamed."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: str


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What all parts of one answer have in common."""

    id: str
    model: str
    created: int
    has_usage: bool
    has_ids: bool
    has_logprobs: bool


class Renderer(Protocol):
    """One endpoint's way to write an answer."""

    def opening(self, index: int) -> bytes:
        """What precedes a choice's first tokens."""
        ...

    def chunk(self, index: int, delta: Delta) -> bytes:
        """One stream event."""
        ...

    def usage(self, prompt_tokens: int, output_tokens: int) -> bytes:
        """The one usage event of a stream."""
        ...

    def whole(self, choices: Sequence[Finished], prompt_tokens: int, output_tokens: int) -> bytes:
        """The body of an answer that is not streamed."""
        ...


class CompletionRenderer:
    """`/v1/completions`."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._frame = _Frame(look, "text_completion")

    def opening(self, index: int) -> bytes:
        return b""

    def chunk(self, index: int, delta: Delta) -> bytes:
        logprobs = _encode(completion_logprobs(delta.logprobs)) if self._look.has_logprobs else b"null"
        return self._frame.event(index, b'"text":' + _encode(delta.text), logprobs, delta)

    def usage(self, prompt_tokens: int, output_tokens: int) -> bytes:
        return self._frame.usage(prompt_tokens, output_tokens)

    def whole(self, choices: Sequence[Finished], prompt_tokens: int, output_tokens: int) -> bytes:
        rows = [_row(self._look, i, c, {"text": c.text}, completion_logprobs) for i, c in enumerate(choices)]
        return _whole(self._look, "text_completion", rows, prompt_tokens, output_tokens)


class ChatRenderer:
    """`/v1/chat/completions`."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._frame = _Frame(look, "chat.completion.chunk")

    def opening(self, index: int) -> bytes:
        return self._frame.event(index, b'"delta":{"role":"assistant","content":""}', b"null", Delta())

    def chunk(self, index: int, delta: Delta) -> bytes:
        logprobs = _encode(chat_logprobs(delta.logprobs)) if self._look.has_logprobs else b"null"
        content = b'"delta":{"content":' + _encode(delta.text) + b"}" if delta.text else b'"delta":{}'
        return self._frame.event(index, content, logprobs, delta)

    def usage(self, prompt_tokens: int, output_tokens: int) -> bytes:
        return self._frame.usage(prompt_tokens, output_tokens)

    def whole(self, choices: Sequence[Finished], prompt_tokens: int, output_tokens: int) -> bytes:
        rows = [
            _row(
                self._look, i, c, {"message": {"role": "assistant", "content": c.text, "refusal": None}}, chat_logprobs
            )
            for i, c in enumerate(choices)
        ]
        return _whole(self._look, "chat.completion", rows, prompt_tokens, output_tokens)


class _Frame:
    """The unchanging bytes around each stream event of one answer."""

    def __init__(self, look: Look, kind: str) -> None:
        self._has_ids = look.has_ids
        self._head = b"data: " + _encode(_head(look, kind))[:-1]
        self._before = tuple(self._head + b',"choices":[{"index":%d,' % i for i in range(CHOICES_MAX))
        self._after = b'}],"usage":null}\n\n' if look.has_usage else b"}]}\n\n"

    def event(self, index: int, content: bytes, logprobs: bytes, delta: Delta) -> bytes:
        finish = b"null" if delta.finish is None else b'"' + delta.finish.encode() + b'"'
        ids = b',"token_ids":' + _encode(delta.ids) if self._has_ids else b""
        parts = (self._before[index], content, b',"logprobs":', logprobs, b',"finish_reason":', finish, ids)
        return b"".join((*parts, self._after))

    def usage(self, prompt_tokens: int, output_tokens: int) -> bytes:
        usage = _encode(usage_of(prompt_tokens, output_tokens))
        return self._head + b',"choices":[],"usage":' + usage + b"}\n\n"


def usage_of(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    """OpenAI's usage object: output counts over all choices, wherever their tokens were made (P06)."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }


def completion_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The legacy form: four parallel lists."""
    return {
        "tokens": [token_text(e.token) for e in entries],
        "token_logprobs": [e.logprob for e in entries],
        "top_logprobs": [{token_text(token): value for token, value in e.top} for e in entries],
        "text_offset": [e.offset for e in entries],
    }


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The chat form: one object per token."""
    return {
        "content": [
            {**_token(e.token, e.logprob), "top_logprobs": [_token(token, value) for token, value in e.top]}
            for e in entries
        ],
        "refusal": None,
    }


def error_body(status: int, code: str, message: str, param: str | None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {
        "error": {"message": message, "type": _ERROR_TYPES.get(status, "server_error"), "param": param, "code": code}
    }


def error_event(status: int, code: str, message: str) -> bytes:
    """An error inside a stream (P04)."""
    return b"data: " + _encode(error_body(status, code, message, None)) + b"\n\n"


_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}


def _token(token: int, logprob: float) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": logprob, "bytes": list(token_bytes(token))}


def _head(look: Look, kind: str) -> dict[str, Any]:
    return {"id": look.id, "object": kind, "created": look.created, "model": look.model}


def _row(look: Look, index: int, choice: Finished, content: dict[str, Any], logprobs: Any) -> dict[str, Any]:
    row = {"index": index, **content, "logprobs": None, "finish_reason": choice.finish}
    if look.has_logprobs:
        row["logprobs"] = logprobs(choice.logprobs)
    if look.has_ids:
        row["token_ids"] = choice.ids
    return row


def _whole(look: Look, kind: str, rows: list[dict[str, Any]], prompt_tokens: int, output_tokens: int) -> bytes:
    return _encode({**_head(look, kind), "choices": rows, "usage": usage_of(prompt_tokens, output_tokens)})
