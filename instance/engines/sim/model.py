"""The made-up language model: what a token writes into KV, and which next tokens the KV it reads back suggests.

A position's word is a hash chain over all tokens before it. The next token's logits are a hash of the
weighted sum of *all* words of the run, read from its blocks: any lost, swapped, stale or altered
word changes them. The chain's and the sum's arithmetic is modulo 2^64.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from midstream.instance.engines.sim.config import SimConfig

Words = npt.NDArray[np.uint64]

MASK = (1 << 64) - 1
EOS = 2
FIRST_ID = 3
"""Ids below are special (padding, beginning, end) and, but for the end, never made."""
COMMON_IDS = 64
"""Half of all candidates come from this many ids, so that tokens repeat and penalties have something to do."""
CANDIDATES = 8
LOGIT_SPAN = 6.0

_TOKEN_FACTOR = 0x9E3779B97F4A7C15
_POSITION_FACTOR = 0xD1B54A32D192ED03
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_DRAWS = struct.Struct("<8I8HQQ")
_LOGIT_UNIT = LOGIT_SPAN / 65_536


class Candidates(NamedTuple):
    """The tokens the model would say next; all others have no chance. `ends` asks for the end token above all."""

    ids: tuple[int, ...]
    logits: tuple[float, ...]
    ends: bool


class Model:
    """The arithmetic of one model and weights revision. Holds no state of any run."""

    def __init__(self, config: SimConfig) -> None:
        name = f"{config.model}\0{config.weights_revision}".encode()
        self.start = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        """What the chain starts from."""
        self._ids = config.vocab_size - FIRST_ID
        self._eos_below = int(config.eos_probability * (1 << 64))

    def candidates(self, digest: int) -> Candidates:
        """What may follow a run whose KV has this digest."""
        draws = _DRAWS.unpack(hashlib.blake2b(digest.to_bytes(8, "little")).digest())
        rare = [FIRST_ID + draw % self._ids for draw in draws[0:4]]
        common = [FIRST_ID + draw % COMMON_IDS for draw in draws[4:8]]
        logits = tuple([draw * _LOGIT_UNIT for draw in draws[8:16]])
        return Candidates((*rare, *common), logits, draws[16] < self._eos_below)


def mix(value: int) -> int:
    """A bijection of 64-bit words in which every bit depends on every bit (splitmix64's finaliser)."""
    value = ((value ^ (value >> 30)) * _MIX_1) & MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & MASK
    return value ^ (value >> 31)


def chain(before: int, tokens: Sequence[int], first: int) -> list[int]:
    """KV words of `tokens` at positions `first` .., given the word of the position before."""
    words = []
    word = before
    step = first * _POSITION_FACTOR
    for token in tokens:
        word ^= (token * _TOKEN_FACTOR + step) & MASK
        word = ((word ^ (word >> 30)) * _MIX_1) & MASK
        word = ((word ^ (word >> 27)) * _MIX_2) & MASK
        word ^= word >> 31
        words.append(word)
        step += _POSITION_FACTOR
    return words


@lru_cache(maxsize=8)
def weights(count: int) -> Words:
    """Odd factors of the positions 0 .. count-1 in a run's digest; odd, so that no changed word is lost in the sum."""
    value = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_TOKEN_FACTOR)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MIX_1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MIX_2)
    value = (value ^ (value >> np.uint64(31))) | np.uint64(1)
    value.setflags(write=False)
    return value


def block_keys(tokens: Sequence[int], keys: list[bytes], count: int, block_tokens: int) -> None:
    """Extend `keys` to the content keys of the first `count` full blocks; each covers all tokens up to its end."""
    for block in range(len(keys), count):
        content = array("I", tokens[block * block_tokens : (block + 1) * block_tokens]).tobytes()
        before = keys[block - 1] if block else b""
        keys.append(hashlib.blake2b(before + content, digest_size=16).digest())
