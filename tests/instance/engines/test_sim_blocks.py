"""The block pool under every order of calls: no block is lost, given twice, or read in an older life."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from midstream.instance.engines.sim.blocks import BlockPool

TOTAL = 12
KEYS = [bytes([i]) for i in range(6)]


class AllocatorMachine(RuleBasedStateMachine):
    """Runs, copies and arrivals on one pool, against what they believe they hold."""

    owned = Bundle("owned")
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.lives = [0] * TOTAL

    def start_life(self, blocks: list[int]) -> None:
        for block in blocks:
            assert self.pool.generations[block] == self.lives[block] + 1, "a new life without a new generation"
            self.lives[block] += 1

    @rule(target=owned, count=st.integers(0, TOTAL))
    def allocate(self, count: int) -> object:
        free = self.pool.free
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > free)
        if blocks is None:
            assert self.pool.free == free
            return multiple()
        self.start_life(blocks)
        return [(block, self.lives[block]) for block in blocks]

    @rule(target=owned, holding=owned)
    def pin(self, holding: list[tuple[int, int]]) -> object:
        if any(self.pool.refs(b) == 0 or self.lives[b] != life for b, life in holding):
            return multiple()
        self.pool.acquire([block for block, _ in holding])
        return holding

    @rule(holding=consumes(owned))
    def free(self, holding: list[tuple[int, int]]) -> None:
        assert all(self.pool.generations[block] == life for block, life in holding), "held, but given to others"
        self.pool.release([block for block, _ in holding])

    @rule(holding=owned, key=st.sampled_from(KEYS))
    def publish(self, holding: list[tuple[int, int]], key: bytes) -> None:
        if holding and self.pool.refs(holding[0][0]):
            self.pool.publish(holding[0][0], key)

    @rule(target=owned, keys=st.lists(st.sampled_from(KEYS), max_size=3, unique=True))
    def hit(self, keys: list[bytes]) -> object:
        blocks = self.pool.hits(keys)
        assert [self.pool.key(block) for block in blocks] == keys[: len(blocks)]
        self.pool.acquire(blocks)
        return [(block, self.lives[block]) for block in blocks]

    @rule(target=held, count=st.integers(0, TOTAL), keys=st.lists(st.sampled_from(KEYS), max_size=2, unique=True))
    def reserve(self, count: int, keys: list[bytes]) -> object:
        cached = self.pool.hits(keys)[:count]
        before = (self.pool.owned, self.pool.free, self.pool.reserved)
        fits = self.pool.cost(count, cached) <= self.pool.free
        blocks = self.pool.reserve(count, cached)
        assert (blocks is not None) == fits
        if blocks is None:
            assert (self.pool.owned, self.pool.free, self.pool.reserved) == before
            return multiple()
        assert blocks[: len(cached)] == cached
        self.start_life(blocks[len(cached) :])
        assert all(self.pool.key(block) is None for block in blocks[len(cached) :])
        return [(block, self.lives[block]) for block in blocks]

    @rule(target=owned, holding=consumes(held))
    def adopt(self, holding: list[tuple[int, int]]) -> object:
        self.pool.adopt([block for block, _ in holding])
        return holding

    @rule(holding=consumes(held))
    def revoke(self, holding: list[tuple[int, int]]) -> None:
        assert all(self.pool.generations[block] == life for block, life in holding)
        self.pool.unreserve([block for block, _ in holding])

    @invariant()
    def all_blocks_are_somewhere(self) -> None:
        assert self.pool.faults() == ()
        assert self.pool.owned + self.pool.free + self.pool.reserved == TOTAL
        assert self.pool.generations == self.lives


TestP05P07Allocator = AllocatorMachine.TestCase
TestP05P07Allocator.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_P07_a_block_shared_by_several_counts_once() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.publish(blocks[0], b"k")
    pool.acquire(pool.hits([b"k"]))
    reserved = pool.reserve(2, pool.hits([b"k"]))
    assert reserved is not None
    assert (pool.owned, pool.reserved, pool.free) == (2, 1, 1)
    pool.release(blocks)
    pool.release(blocks[:1])
    assert (pool.owned, pool.reserved, pool.free) == (0, 2, 2)


def test_the_least_recently_used_content_goes_first_and_prefixes_last() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    assert old is not None
    assert new is not None
    for block, key in zip(old + new, (b"a", b"ab", b"c", b"cd"), strict=True):
        pool.publish(block, key)
    pool.release(old)
    pool.release(new)
    taken = pool.allocate(3)
    assert taken == [old[1], old[0], new[1]]
    assert pool.hits([b"c", b"cd"]) == [new[0]]


def test_P05_a_double_free_is_an_error_not_a_second_owner() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(ValueError, match="nobody owns"):
        pool.release(blocks)
    with pytest.raises(ValueError, match="nobody reserved"):
        pool.unreserve(blocks)
