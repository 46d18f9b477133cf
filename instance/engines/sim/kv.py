"""KV memory: real bytes in paged blocks, written and read through block tables.

One block is contiguous: `planes` rows of `block_tokens` words. Row j holds each position's word XOR salt j.
Each read for a next token takes one whole row of every block, row (output index mod planes): a wrong,
stale or swapped block is seen at the next token, one altered byte after at most `planes` tokens, and at the
next token for certain when a position holds one word.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from midstream.instance.engines.sim.config import WORD_BYTES, SimConfig
from midstream.instance.engines.sim.model import MASK, Words, mix, weights

Rows = npt.NDArray[np.intp]


class KvMemory:
    """The bytes of all blocks of one engine. Nothing read is remembered: bytes are the only truth."""

    def __init__(self, config: SimConfig, memory: memoryview | None = None) -> None:
        """`memory`: `config.kv_bytes` bytes to use; None: memory of its own."""
        self._block_tokens = config.block_tokens
        self._planes = config.planes
        self._block_bytes = config.block_bytes
        words: Words = np.zeros(config.kv_bytes // WORD_BYTES, np.uint64)
        if memory is not None:
            words = np.frombuffer(memory, np.uint64)
        self._bytes = words.data.cast("B")
        self._flat = self._bytes.cast("Q")
        self._rows = words.reshape(-1, config.block_tokens)
        self._cube = words.reshape(config.blocks_total, config.planes, config.block_tokens)
        self._salts: Words = np.array([mix(plane) for plane in range(config.planes)], dtype=np.uint64)
        self._weights = weights(config.length_max)

    def block(self, block: int) -> memoryview:
        """The writable bytes of one block."""
        start = block * self._block_bytes
        return self._bytes[start : start + self._block_bytes]

    def word(self, table: Sequence[int], position: int, turn: int) -> int:
        """Read back the word of one position."""
        block, offset = divmod(position, self._block_tokens)
        plane = turn % self._planes
        index = (table[block] * self._planes + plane) * self._block_tokens + offset
        return self._flat[index] ^ int(self._salts[plane])

    def write(self, table: Sequence[int], first: int, words: Sequence[int]) -> None:
        """Store the words of positions `first` .. through a block table."""
        size, flat = self._block_tokens, self._flat
        for position, word in enumerate(words, first):
            block, offset = divmod(position, size)
            if self._planes == 1:
                flat[table[block] * size + offset] = word
            else:
                self._cube[table[block], :, offset] = self._salts ^ np.uint64(word)

    def digest(self, rows: Rows, computed: int, turn: int) -> int:
        """Weighted sum, modulo 2^64, of the first `computed` words of a run whose blocks are `rows`."""
        used = rows[: -(-computed // self._block_tokens)]
        plane = turn % self._planes
        if self._planes > 1:
            used = used * self._planes + plane
        words = self._rows.take(used, axis=0).ravel()[:computed]
        if self._planes > 1:
            words ^= self._salts[plane]
        return int(np.dot(words, self._weights[:computed])) & MASK
