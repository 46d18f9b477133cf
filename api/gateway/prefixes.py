"""What this gateway knows of the instances' prefix caches: followed by pings, only while a policy asks for it.

A guess, always a little old: it decides where a request goes, never what is computed there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from midstream.control.ids import Owner
from midstream.control.state import State
from midstream.migration.protocol.messages import CacheChange
from midstream.migration.protocol.prefixes import KEY_BYTES, each_prefix_key

BLOCKS_MAX: Final = 1_024
"""Leading blocks of a prompt that are looked up: bounds what one look costs."""

KEYS_MAX: Final = 2_000_000
"""Names held for all instances together; more are not taken in (P28)."""


class PrefixIndex:
    """Which instances hold which blocks, by name.

    Sets of instances are bits of one integer, so that a look costs one operation for each block, not for each holder.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._bits: dict[str, int] = {}
        self._seen: dict[str, tuple[Owner, int]] = {}
        self._keys: dict[str, dict[bytes, None]] = {}
        self._count = 0

    def seen(self, owner: Owner) -> int:
        """Number of the last change of this incarnation's cache that is known."""
        known = self._seen.get(owner.instance)
        return known[1] if known is not None and known[0] == owner else 0

    def learn(self, owner: Owner, change: CacheChange) -> None:
        """Take in an answer. A restarted instance begins with an empty cache."""
        known = self._seen.get(owner.instance)
        if known is not None and known[0].incarnation > owner.incarnation:
            return
        if change.is_whole or known is None or known[0] != owner:
            self.forget(owner.instance)
        self._seen[owner.instance] = (owner, change.upto)
        keys, bit = self._keys.setdefault(owner.instance, {}), self._bit_of(owner.instance)
        for key in _split(change.removed):
            if keys.pop(key, key) is None:
                self._drop(bit, key)
        for key in _split(change.stored):
            if key not in keys and self._count < KEYS_MAX:
                keys[key] = None
                self._holders[key] = self._holders.get(key, 0) | bit
                self._count += 1

    def forget(self, instance: str) -> None:
        """An instance is gone, or its cache is told anew."""
        self._seen.pop(instance, None)
        bit = self._bits.pop(instance, 0)
        for key in self._keys.pop(instance, {}):
            self._drop(bit, key)

    def cached(self, state: State, tokens: Sequence[int]) -> dict[str, int]:
        """Instance to leading tokens that its cache holds, for those that hold any."""
        found: dict[str, int] = {}
        for size, alive in sorted(self._by_size(state).items()):
            found |= self._walk(alive, tokens, size)
        return found

    def _by_size(self, state: State) -> dict[int, int]:
        """Block size to the instances whose present caches are known."""
        sizes: dict[int, int] = {}
        for name, (owner, _) in self._seen.items():
            view = state.instances.get(name)
            if view is not None and view.owner == owner:
                size = view.fingerprint.block_tokens
                sizes[size] = sizes.get(size, 0) | self._bits[name]
        return sizes

    def _walk(self, alive: int, tokens: Sequence[int], size: int) -> dict[str, int]:
        """Instance to leading tokens held: with every block only those go on that held all before."""
        ended: list[tuple[int, int]] = []
        held = 0
        for key in each_prefix_key(tokens, size, BLOCKS_MAX):
            still = alive & self._holders.get(key, 0)
            if still != alive:
                ended.append((alive ^ still, held))
                alive = still
                if not alive:
                    break
            held += size
        ended.append((alive, held))
        return self._named([(bits, count) for bits, count in ended if bits and count])

    def _named(self, ended: Sequence[tuple[int, int]]) -> dict[str, int]:
        counts = {bit: count for bits, count in ended for bit in _each_bit(bits)}
        return {name: counts[bit] for name, bit in self._bits.items() if bit in counts} if counts else {}

    def _bit_of(self, instance: str) -> int:
        """The bit of an instance: the lowest that no other has."""
        bit = self._bits.get(instance)
        if bit is None:
            taken = 0
            for other in self._bits.values():
                taken |= other
            bit = self._bits[instance] = ~taken & (taken + 1)
        return bit

    def _drop(self, bit: int, key: bytes) -> None:
        self._count -= 1
        holders = self._holders[key] & ~bit
        if holders:
            self._holders[key] = holders
        else:
            del self._holders[key]


def _each_bit(bits: int) -> Iterator[int]:
    while bits:
        bit = bits & -bits
        yield bit
        bits ^= bit


def _split(keys: bytes) -> Iterable[bytes]:
    return (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
