"""Names of full KV blocks by content: equal leading tokens have equal names on every engine. Pure.

Each name covers all tokens up to the block's end. It depends on no engine's own hashing, whose seeds differ from
process to process.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

KEY_BYTES: Final = 8
"""Of a name on the wire. Two of 100,000 blocks share one with odds of 1 to 4 x 10^9; then only a guess is off."""

CHAIN_BYTES: Final = 16


def chain(before: bytes, tokens: Sequence[int]) -> bytes:
    """The full name of the block with these tokens behind the block named `before` (empty: none)."""
    return hashlib.blake2b(before + array("I", tokens).tobytes(), digest_size=CHAIN_BYTES).digest()


def short(name: bytes) -> bytes:
    """The name as the wire carries it."""
    return name[:KEY_BYTES]


def prefix_keys(tokens: Sequence[int], block_tokens: int, count_max: int) -> list[bytes]:
    """Wire names of the leading full blocks. The last token is always computed, so its block never helps."""
    return list(each_prefix_key(tokens, block_tokens, count_max))


def each_prefix_key(tokens: Sequence[int], block_tokens: int, count_max: int) -> Iterator[bytes]:
    """The same one by one, for who may stop early."""
    count = min((len(tokens) - 1) // block_tokens, count_max)
    if count <= 0:
        return
    said = array("I", tokens[: count * block_tokens])
    text, width, name = said.tobytes(), block_tokens * said.itemsize, b""
    for at in range(0, count * width, width):
        name = hashlib.blake2b(name + text[at : at + width], digest_size=CHAIN_BYTES).digest()
        yield name[:KEY_BYTES]
