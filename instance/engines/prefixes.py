"""What an engine's prefix cache holds, told as numbered changes, so that every gateway can follow at its own pace."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

from midstream.migration.protocol.messages import CacheChange

KEYS_MAX: Final = 16_384
"""Blocks that are remembered and told of, the newest; 128 KiB on the wire."""

CHANGES_MAX: Final = 8_192
"""Changes kept for those who follow; who is further behind gets the whole."""


class PrefixLog:
    """The cached blocks of one engine since it started. Keys as `migration.protocol.prefixes` makes them."""

    def __init__(self) -> None:
        self.number = 0
        """Changes so far."""
        self._known: dict[bytes, None] = {}
        self._changes: deque[tuple[bytes, bool]] = deque(maxlen=CHANGES_MAX)

    def __len__(self) -> int:
        return len(self._known)

    def stored(self, key: bytes) -> None:
        """A full block with this content can be found; again: nothing."""
        if key in self._known:
            return
        if len(self._known) >= KEYS_MAX:
            self.removed(next(iter(self._known)))
        self._known[key] = None
        self._change(key, True)

    def removed(self, key: bytes) -> None:
        """It cannot any more. Unknown: nothing."""
        if key in self._known:
            del self._known[key]
            self._change(key, False)

    def clear(self) -> None:
        """Nothing can be found, or nobody knows what: who follows begins afresh."""
        self._known.clear()
        self._changes.clear()
        self.number += 1

    def _change(self, key: bytes, is_stored: bool) -> None:
        self.number += 1
        self._changes.append((key, is_stored))

    def since(self, seen: int) -> CacheChange | None:
        """What became of the cache after change number `seen`; `None` if nothing did."""
        behind = self.number - seen
        if behind == 0:
            return None
        if not 0 < behind <= len(self._changes):
            return CacheChange(upto=self.number, is_whole=True, stored=b"".join(self._known))
        last = dict(islice(self._changes, len(self._changes) - behind, None))
        return CacheChange(
            upto=self.number,
            stored=b"".join(key for key, is_stored in last.items() if is_stored),
            removed=b"".join(key for key, is_stored in last.items() if not is_stored),
        )
