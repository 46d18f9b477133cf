"""A mixed load for the SDK: what is asked, what came back, and whether two answers are the same."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import openai

LOGPROB_TOLERANCE = 2e-3
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 20, "maxLength": 30},
        "people": {"type": "array", "items": {"type": "string", "minLength": 20, "maxLength": 30}, "minItems": 12},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": PLACE, "strict": True}}


@dataclass
class Heard:
    """One streamed answer as its client saw it."""

    text: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    arguments: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    finishes: dict[int, str] = field(default_factory=dict)
    roles: int = 0
    usages: list[tuple[int, int]] = field(default_factory=list)
    events: int = 0

    def take(self, chunk: Any) -> None:
        self.events += 1
        if chunk.usage:
            self.usages.append((chunk.usage.prompt_tokens, chunk.usage.completion_tokens))
        for choice in chunk.choices:
            if choice.finish_reason:
                assert choice.index not in self.finishes, "two finish reasons for one choice (P06)"
                self.finishes[choice.index] = choice.finish_reason
            self._take_delta(choice)

    def _take_delta(self, choice: Any) -> None:
        delta = getattr(choice, "delta", None)
        self.text[choice.index] += (choice.text if delta is None else delta.content) or ""
        if delta is not None:
            self.roles += delta.role is not None
            for call in delta.tool_calls or ():
                self.arguments[choice.index] += call.function.arguments or ""
        if delta is not None and choice.logprobs:
            self.logprobs += [(entry.token, entry.logprob) for entry in choice.logprobs.content]

    def assert_same(self, other: Heard) -> None:
        """Equal in everything but how it was cut into events."""
        assert dict(self.text) == dict(other.text)
        assert dict(self.arguments) == dict(other.arguments)
        assert (self.finishes, self.usages, self.roles) == (other.finishes, other.usages, other.roles)
        assert [token for token, _ in self.logprobs] == [token for token, _ in other.logprobs]
        for (_, mine), (_, theirs) in zip(self.logprobs, other.logprobs, strict=True):
            assert math.isclose(mine, theirs, abs_tol=LOGPROB_TOLERANCE)

    def assert_begins(self, whole: Heard) -> None:
        """A cancelled answer holds nothing but the beginning of the whole one."""
        for index, text in self.text.items():
            assert whole.text[index].startswith(text)
        for index, text in self.arguments.items():
            assert whole.arguments[index].startswith(text)


def asked(index: int, name: str) -> tuple[bool, dict[str, Any]]:
    """(is chat, arguments) of the mix's `index`-th request: seeded or greedy, so that it may be compared."""
    chat = {"model": name, "messages": [{"role": "user", "content": f"Tell me about place number {index}."}]}
    plain = {"model": name, "prompt": f"Once, in place number {index}, there was"}
    seeded = {"seed": 1_000 + index, "temperature": 0.8}
    tokens = 160 + index % 5 * 10
    whole = {"ignore_eos": True}
    kinds: tuple[tuple[bool, dict[str, Any]], ...] = (
        (
            True,
            {
                **chat,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": 3,
                "max_completion_tokens": tokens,
                "extra_body": whole,
            },
        ),
        (False, {**plain, **seeded, "n": 2, "max_tokens": tokens, "extra_body": whole}),
        (True, {**chat, **seeded, "max_completion_tokens": tokens, "response_format": _schema()}),
        (True, {**chat, **seeded, "tools": [TOOL], "tool_choice": _tool(), "max_completion_tokens": tokens}),
        (
            False,
            {
                **plain,
                **seeded,
                "presence_penalty": 0.7,
                "frequency_penalty": 0.4,
                "max_tokens": tokens,
                "extra_body": whole,
            },
        ),
        (False, {**plain, **seeded, "stop": ["th", "se"], "max_tokens": tokens, "extra_body": {"min_tokens": 140}}),
        (True, {**chat, **seeded, "top_p": 0.9, "max_completion_tokens": tokens, "extra_body": {**whole, "top_k": 40}}),
        (False, {**plain, "temperature": 0, "extra_body": {**whole, "repetition_penalty": 1.2}, "max_tokens": tokens}),
    )
    return kinds[index % len(kinds)]


def _schema() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}


def _tool() -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look_up"}}


async def hear(client: openai.AsyncOpenAI, index: int, name: str, leave_after: int | None = None) -> Heard:
    """Stream the mix's `index`-th request; leave after so many events if given."""
    is_chat, arguments = asked(index, name)
    create = client.chat.completions.create if is_chat else client.completions.create
    stream = await create(
        **arguments, stream=True, stream_options={"include_usage": True}, extra_headers={"X-Request-Id": f"mix-{index}"}
    )
    heard = Heard()
    async for chunk in stream:
        heard.take(chunk)
        if heard.events == leave_after:
            await stream.close()
            break
    return heard
