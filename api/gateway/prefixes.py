"""What this gateway knows of the instances' prefix caches: followed by pings, only while a policy asks for it.

A guess, always a little old: it decides where a request goes, never what is computed there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from midstream.control.ids import Owner
from midstream.control.state import State
from midstream.migration.protocol.messages import CacheChange
from midstream.migration.protocol.prefixes import KEY_BYTES, prefix_keys

BLOCKS_MAX: Final = 1_024
"""Leading blocks of a prompt that are looked up."""

KEYS_MAX: Final = 2_000_000
"""Names held for all instances together; more are not taken in (P28)."""


class PrefixIndex:
    """Which instances hold which blocks, by name."""

    def __init__(self) -> None:
        self._holders: dict[bytes, dict[str, None]] = {}
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
        keys = self._keys.setdefault(owner.instance, {})
        for key in _split(change.removed):
            if keys.pop(key, key) is None:
                self._drop(owner.instance, key)
        for key in _split(change.stored):
            if key not in keys and self._count < KEYS_MAX:
                keys[key] = None
                self._holders.setdefault(key, {})[owner.instance] = None
                self._count += 1

    def forget(self, instance: str) -> None:
        """An instance is gone, or its cache is told anew."""
        self._seen.pop(instance, None)
        for key in self._keys.pop(instance, {}):
            self._drop(instance, key)

    def cached(self, state: State, tokens: Sequence[int]) -> dict[str, int]:
        """Instance to leading tokens that its cache holds, for those that hold any."""
        sizes = {view.fingerprint.block_tokens for name, view in state.instances.items() if name in self._seen}
        found: dict[str, int] = {}
        for size in sorted(sizes):
            holders = self._walk(prefix_keys(tokens, size, BLOCKS_MAX))
            for name, blocks in holders.items():
                view = state.instances.get(name)
                if view is not None and view.fingerprint.block_tokens == size and self._seen[name][0] == view.owner:
                    found[name] = blocks * size
        return found

    def _walk(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Instance to leading keys held: with every key only those go on that held all before."""
        found: dict[str, int] = {}
        alive: Iterable[str] | None = None
        for index, key in enumerate(keys, 1):
            holders = self._holders.get(key, {})
            alive = list(holders) if alive is None else [name for name in alive if name in holders]
            if not alive:
                break
            found.update(dict.fromkeys(alive, index))
        return found

    def _drop(self, instance: str, key: bytes) -> None:
        self._count -= 1
        holders = self._holders[key]
        del holders[instance]
        if not holders:
            del self._holders[key]


def _split(keys: bytes) -> Iterable[bytes]:
    return (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
