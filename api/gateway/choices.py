"""From token chunks to text, for one choice of an answer: detokenising, stop strings, counts. Pure."""

from __future__ import annotations

import msgspec

from midstream.api.gateway.port import Chunk
from midstream.api.gateway.text import IncrementalDetokenizer, StopFinder, decode_logprobs, token_text

LOGPROB_MIN = -9_999.0
"""JSON has no infinities; vLLM clamps to the same value."""


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One output token with its logprob, its alternatives, and where its text begins in the answer."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one chunk adds to a choice. With `error` the choice failed; with `finish` it is complete."""

    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    error: tuple[str, str] | None = None


class Choice:
    """One choice of an answer. Tokens after a complete stop string do not exist for the client."""

    def __init__(self, *, stops: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self.tokens = 0
        self.has_ended = False
        self.was_stopped = False
        """A stop string, not the engine, ended it."""
        self._min_tokens = min_tokens
        self._detokenizer = IncrementalDetokenizer()
        self._finder = StopFinder(stops) if stops else None
        self._offset = 0

    def feed(self, chunk: Chunk) -> Delta:
        """Take the next chunk. After the end every chunk is empty."""
        if self.has_ended:
            return Delta()
        text, used = self._plain(chunk) if self._finder is None else self._searched(chunk, self._finder)
        finish = "stop" if self.was_stopped else chunk.finish
        error = None if self.was_stopped else chunk.error
        self.has_ended = finish is not None or error is not None
        logprobs = tuple(self._logprob(*pair) for pair in zip(chunk.ids[:used], chunk.logprobs, strict=False))
        return Delta(text=text, ids=chunk.ids[:used], logprobs=logprobs, finish=finish, error=error)

    def _plain(self, chunk: Chunk) -> tuple[str, int]:
        feed = self._detokenizer.feed
        text = "".join([feed(token) for token in chunk.ids])
        self.tokens += len(chunk.ids)
        if chunk.finish is not None:
            text += self._detokenizer.finish()
        return text, len(chunk.ids)

    def _searched(self, chunk: Chunk, finder: StopFinder) -> tuple[str, int]:
        """(text to show, tokens used): up to the token that completed a stop string, or all."""
        text = ""
        for used, token in enumerate(chunk.ids, start=1):
            piece = self._detokenizer.feed(token)
            self.tokens += 1
            if self.tokens <= self._min_tokens:
                text += piece
                continue
            shown, self.was_stopped = finder.feed(piece)
            text += shown
            if self.was_stopped:
                return text, used
        if chunk.finish is not None:
            shown, self.was_stopped = finder.feed(self._detokenizer.finish())
            text += shown if self.was_stopped else shown + finder.finish()
        return text, len(chunk.ids)

    def _logprob(self, token: int, encoded: bytes) -> TokenLogprob:
        entry = tuple((other, max(value, LOGPROB_MIN)) for other, value in decode_logprobs(encoded))
        offset = self._offset
        self._offset += len(token_text(token))
        return TokenLogprob(token=token, logprob=entry[0][1], top=entry[1:], offset=offset)
