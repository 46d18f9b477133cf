"""The block pool: who holds which KV block, which content the prefix cache still has, and in which life a block is.

A block is free (blank, or kept by the prefix cache until somebody needs it), reserved (held only by
arrivals) or owned (held by at least one run or by a copy in progress). Pure bookkeeping, no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from midstream.instance.engines.prefixes import PrefixLog
from midstream.migration.protocol.prefixes import short


class BlockPool:
    """All blocks of one engine. `allocate` and `acquire` pair with `release`, `reserve` with `unreserve` or `adopt`."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.generations = [0] * total
        """Grows each time a block is given out for new content: a reference to an older life is stale."""
        self._refs = [0] * total
        self._holds = [0] * total
        self._keys: list[bytes | None] = [None] * total
        self._blocks_by_key: dict[bytes, int] = {}
        self._blank: list[int] = list(range(total - 1, -1, -1))
        self._kept: dict[int, None] = {}
        """Free blocks with known content, least recently used first."""
        self._owned = 0
        self._reserved = 0
        self.prefixes = PrefixLog()

    @property
    def owned(self) -> int:
        """Blocks with at least one run or copy on them."""
        return self._owned

    @property
    def reserved(self) -> int:
        """Blocks held by reservations alone."""
        return self._reserved

    @property
    def free(self) -> int:
        """Blocks anybody may have, those kept by the prefix cache included."""
        return len(self._blank) + len(self._kept)

    def refs(self, block: int) -> int:
        """Runs and copies that hold the block."""
        return self._refs[block]

    def holds(self, block: int) -> int:
        """Reservations that hold the block."""
        return self._holds[block]

    def key(self, block: int) -> bytes | None:
        """Under which key the prefix cache knows the block's content."""
        return self._keys[block]

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks for new content, or none at all."""
        if count > self.free:
            return None
        blank, refs, generations = self._blank, self._refs, self.generations
        blocks = blank[: -count - 1 : -1] if count else []
        del blank[len(blank) - len(blocks) :]
        for block in blocks:
            generations[block] += 1
        while len(blocks) < count:
            blocks.append(self._take())
        for block in blocks:
            refs[block] = 1
        self._owned += count
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more: cached ones for a run, a run's own for a copy."""
        for block in blocks:
            if self._refs[block] == 0:
                self._owned += 1
                self._reserved -= self._holds[block] > 0
                self._kept.pop(block, None)
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one hold on each block, last block first so that prefixes stay cached longest."""
        refs, holds, keys, blank = self._refs, self._holds, self._keys, self._blank
        for block in reversed(blocks):
            left = refs[block] - 1
            if left < 0:
                raise ValueError(f"block {block} is released but nobody owns it")
            refs[block] = left
            if left:
                continue
            self._owned -= 1
            if holds[block] or keys[block] is not None:
                self._let_go(block)
            else:
                blank.append(block)

    def reserve(self, count: int, cached: Sequence[int]) -> list[int] | None:
        """Hold the `cached` blocks and enough new ones to make `count`, or none at all."""
        fresh = count - len(cached)
        kept = sum(block in self._kept for block in cached)
        if fresh > self.free - kept:
            return None
        for block in cached:
            self._hold(block)
        blocks = list(cached)
        for _ in range(fresh):
            block = self._take()
            self._holds[block] = 1
            self._reserved += 1
            blocks.append(block)
        return blocks

    def unreserve(self, blocks: Sequence[int]) -> None:
        """End a reservation's hold on its blocks."""
        for block in reversed(blocks):
            if self._holds[block] <= 0:
                raise ValueError(f"block {block} is unreserved but nobody reserved it")
            self._holds[block] -= 1
            if self._holds[block] == 0 and self._refs[block] == 0:
                self._reserved -= 1
                self._let_go(block)

    def adopt(self, blocks: Sequence[int]) -> None:
        """Turn a reservation's hold on its blocks into a run's."""
        self.acquire(blocks)
        self.unreserve(blocks)

    def hits(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks with the content of the longest known prefix of `keys`."""
        blocks: list[int] = []
        for key in keys:
            block = self._blocks_by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def cost(self, count: int, cached: Sequence[int]) -> int:
        """Free blocks used up by taking `count` blocks of which `cached` are known."""
        return count - len(cached) + sum(block in self._kept for block in cached)

    def publish(self, block: int, key: bytes) -> None:
        """Let others find a full block by its content's key; the first block of a key stays."""
        if key in self._blocks_by_key or self._keys[block] is not None:
            return
        self._keys[block] = key
        self._blocks_by_key[key] = block
        self.prefixes.stored(short(key))

    def faults(self) -> tuple[str, ...]:
        """Broken invariants in words; empty when all is well (P07)."""
        found: list[str] = []
        owned = sum(refs > 0 for refs in self._refs)
        reserved = sum(h > 0 and r == 0 for h, r in zip(self._holds, self._refs, strict=True))
        if (owned, reserved) != (self._owned, self._reserved):
            found.append(
                f"counters say {self._owned} owned, {self._reserved} reserved; holders say {owned}, {reserved}"
            )
        if owned + self.free + reserved != self.total:
            found.append(f"{owned} owned + {self.free} free + {reserved} reserved != {self.total}")
        if any(self._blocks_by_key.get(k) != b for b, k in enumerate(self._keys) if k is not None):
            found.append("a cached block is not the one its key finds")
        held = {b for b in range(self.total) if self._refs[b] or self._holds[b]}
        if held & (set(self._blank) | set(self._kept)):
            found.append("a held block is on a free list")
        return tuple(found)

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block = next(iter(self._kept))
            del self._kept[block]
            self._forget(block)
        self.generations[block] += 1
        return block

    def _hold(self, block: int) -> None:
        if self._refs[block] == 0 and self._holds[block] == 0:
            self._reserved += 1
            self._kept.pop(block, None)
        self._holds[block] += 1

    def _let_go(self, block: int) -> None:
        if self._holds[block]:
            self._reserved += 1
        elif self._keys[block] is None:
            self._blank.append(block)
        else:
            self._kept[block] = None

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._blocks_by_key[key]
            self._keys[block] = None
            self.prefixes.removed(short(key))
