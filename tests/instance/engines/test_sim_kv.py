"""KV bytes: what is written is what is read, and no wrong byte goes unseen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.kv import KvMemory
from midstream.instance.engines.sim.model import block_keys, chain

TABLE = [5, 2, 7, 0]
TOKENS = list(range(3, 17))


def filled(planes: int) -> tuple[KvMemory, SimConfig]:
    config = SimConfig(blocks_total=8, block_tokens=4, bytes_per_token=8 * planes)
    memory = KvMemory(config)
    memory.write(TABLE, 0, chain(1, TOKENS, 0))
    return memory, config


def digests(memory: KvMemory, planes: int, table: list[int] = TABLE) -> list[int]:
    return [memory.digest(np.array(table), len(TOKENS), turn) for turn in range(planes)]


@pytest.mark.parametrize("planes", [1, 2, 5])
def test_words_are_read_back_from_every_plane_and_all_planes_say_the_same(planes: int) -> None:
    memory, _ = filled(planes)
    words = chain(1, TOKENS, 0)
    for turn in range(planes):
        assert [memory.word(TABLE, position, turn) for position in range(len(words))] == words
    assert len(set(digests(memory, planes))) == 1


def test_the_chain_depends_on_everything_before() -> None:
    words = chain(1, TOKENS, 0)
    assert chain(words[4], TOKENS[5:], 5) == words[5:]
    changed = chain(1, [TOKENS[0] + 1, *TOKENS[1:]], 0)
    assert all(a != b for a, b in zip(words, changed, strict=True))
    assert chain(1, [3, 3, 3], 0) != chain(1, [3, 3, 3], 1)


@given(
    planes=st.sampled_from([1, 3]),
    position=st.integers(0, len(TOKENS) - 1),
    byte=st.integers(0, 23),
    bit=st.integers(0, 7),
)
def test_P03_any_altered_bit_of_a_computed_position_is_seen(planes: int, position: int, byte: int, bit: int) -> None:
    """Within `planes` tokens; with one word a position at the very next token."""
    memory, config = filled(planes)
    before = digests(memory, planes)
    plane, offset = divmod(byte % (8 * planes), 8)
    block = memory.block(TABLE[position // 4])
    block[(plane * config.block_tokens + position % 4) * 8 + offset] ^= 1 << bit
    after = digests(memory, planes)
    assert [i for i in range(planes) if before[i] != after[i]] == [plane]


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("table", [[2, 5, 7, 0], [5, 2, 7, 1], [5, 5, 7, 0], [5, 2, 0, 7]])
def test_P05_a_swapped_lost_or_stale_block_is_seen_at_once(planes: int, table: list[int]) -> None:
    memory, _ = filled(planes)
    memory.write([6, 3, 4, 1], 0, chain(2, TOKENS, 0))
    right, wrong = digests(memory, planes), digests(memory, planes, table)
    assert all(a != b for a, b in zip(right, wrong, strict=True))


@pytest.mark.parametrize("planes", [1, 2])
def test_a_block_is_all_its_bytes_in_one_piece(planes: int) -> None:
    memory, config = filled(planes)
    copy = KvMemory(config)
    for i, block in enumerate(TABLE):
        assert memory.block(block).nbytes == config.block_bytes
        copy.block(i)[:] = memory.block(block)
    assert digests(copy, planes, [0, 1, 2, 3]) == digests(memory, planes)


def test_content_keys_cover_everything_up_to_the_blocks_end() -> None:
    keys: list[bytes] = []
    block_keys(TOKENS, keys, 2, 4)
    block_keys(TOKENS, keys, 3, 4)
    other: list[bytes] = []
    block_keys([99, *TOKENS[1:]], other, 3, 4)
    assert len({*keys, *other}) == 6
