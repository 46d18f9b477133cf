"""A toy tokenizer for simulated models: every text becomes token ids and back, every token id is some text.

Ids 0-2 are special (`PAD BEGIN END`), 3-258 are the bytes, all others are made-up words derived from the id
alone, so that no vocabulary file is needed.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from midstream.control.errors import BadInput

PAD: Final = 0
BEGIN: Final = 1
END: Final = 2
_BYTES: Final = 3
_WORDS: Final = _BYTES + 256
VOCABULARY_MIN: Final = _WORDS + 1
VOCABULARY_DEFAULT: Final = 32_000

_SYLLABLES: Final = tuple(c + v for c in "bdfghjklmnprstvz" for v in "aeiou")
_DIGIT: Final = {syllable: digit for digit, syllable in enumerate(_SYLLABLES, start=1)}
_WORD: Final = re.compile(r" (?:[bdfghjklmnprstvz][aeiou]){1,4}(?![A-Za-z])")

LOGPROBS_PER_TOKEN_MAX: Final = 21
"""The chosen token and up to 20 alternatives."""

_logprobs_encoder = msgspec.msgpack.Encoder()
_logprobs_decoder = msgspec.msgpack.Decoder(tuple[tuple[int, float], ...])


class Tokenizer:
    """Text to ids and back for a vocabulary of `size` ids. Raises `BadInput` if `size` has no room for words."""

    def __init__(self, size: int = VOCABULARY_DEFAULT) -> None:
        if size < VOCABULARY_MIN:
            raise BadInput(f"a vocabulary needs at least {VOCABULARY_MIN} ids, not {size}")
        self.size = size

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text: words of the vocabulary as one id, everything else byte by byte."""
        ids: list[int] = []
        done = 0
        for match in _WORD.finditer(text):
            word = _word_id(match.group())
            if word < self.size:
                ids.extend(_byte_ids(text[done : match.start()]))
                ids.append(word)
                done = match.end()
        ids.extend(_byte_ids(text[done:]))
        return tuple(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a whole token sequence."""
        detokenizer = IncrementalDetokenizer()
        return "".join(detokenizer.feed(token) for token in ids) + detokenizer.finish()


class IncrementalDetokenizer:
    """Turns ids into text one by one; the concatenated pieces never depend on how the ids were cut into chunks."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that became certain with this token: empty inside a multi-byte character, and for specials."""
        if token >= _WORDS:
            return self.finish() + _word(token)
        if token >= _BYTES:
            return self._decoder.decode(bytes((token - _BYTES,)))
        return ""

    def finish(self) -> str:
        """What an unfinished character comes to if nothing more follows."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class StopFinder:
    """Finds the first of some stop strings in a growing text; holds back only what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """(text that may be shown now, whether a stop string is complete). Nothing from the stop on is shown."""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max(_overlap(text, stop) for stop in self._stops) if self._stops else 0
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """The text held back, once it is sure that nothing more follows."""
        rest, self._held = self._held, ""
        return rest


def token_text(token: int) -> str:
    """One token shown alone, as in logprobs."""
    return Tokenizer().decode((token,))


def token_bytes(token: int) -> bytes:
    """The bytes one token stands for."""
    if token >= _WORDS:
        return _word(token).encode()
    return bytes((token - _BYTES,)) if token >= _BYTES else b""


def encode_logprobs(entry: Sequence[tuple[int, float]]) -> bytes:
    """One token's logprobs as they travel: (id, logprob) of the chosen token, then of the most likely ones."""
    return _logprobs_encoder.encode(tuple(entry[:LOGPROBS_PER_TOKEN_MAX]))


def decode_logprobs(data: bytes) -> tuple[tuple[int, float], ...]:
    """Read what `encode_logprobs` wrote. Raises `msgspec.DecodeError`."""
    return _logprobs_decoder.decode(data)


def _byte_ids(text: str) -> list[int]:
    return [byte + _BYTES for byte in text.encode("utf-8", "replace")]


def _word(token: int) -> str:
    """Bijective base-80: every id beyond the bytes is exactly one word."""
    number = token - _WORDS + 1
    word = ""
    while number:
        number, digit = divmod(number - 1, len(_SYLLABLES))
        word = _SYLLABLES[digit] + word
    return " " + word


def _word_id(word: str) -> int:
    number = 0
    for at in range(1, len(word), 2):
        number = number * len(_SYLLABLES) + _DIGIT[word[at : at + 2]]
    return _WORDS + number - 1


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
