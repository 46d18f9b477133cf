"""What a gateway remembers of requests that ended: tombstones for late messages, and drops not yet answered."""

from __future__ import annotations

from collections.abc import Callable

from midstream.api.gateway.settings import DROPS_MAX, TOMBSTONES_MAX
from midstream.control.ids import Owner
from midstream.migration.protocol.messages import Drop


class Aftermath:
    """Bounded in time and number. An unanswered `Drop` is repeated until `Gone` comes or its owner is gone."""

    def __init__(self, tombstone_s: float) -> None:
        self._tombstone_s = tombstone_s
        self._drops: dict[tuple[str, Owner], tuple[Drop, int]] = {}
        self._tombstones: dict[str, float] = {}

    @property
    def has_drops(self) -> bool:
        """Is any drop unanswered."""
        return bool(self._drops)

    def knows(self, request: str) -> bool:
        """Did this request end here a short while ago."""
        return request in self._tombstones

    def bury(self, request: str, now: float) -> None:
        """A request ended."""
        self._tombstones[request] = now

    def dropping(self, owner: Owner, drop: Drop) -> None:
        """A drop was just sent."""
        self._drops[(drop.request, owner)] = (drop, 0)

    def answered(self, request: str, owner: Owner) -> None:
        """The owner says that nothing is left there."""
        self._drops.pop((request, owner), None)

    def repeat(self, send: Callable[[Owner, Drop], None], is_current: Callable[[Owner], bool]) -> None:
        """Send every drop that was not answered since the last time again."""
        for key, (drop, times) in list(self._drops.items()):
            owner = key[1]
            if times >= DROPS_MAX or not is_current(owner):
                del self._drops[key]
                continue
            self._drops[key] = (drop, times + 1)
            if times:
                send(owner, drop)

    def forget(self, now: float) -> None:
        """Tombstones older than their time go, and the oldest of too many."""
        for request, since in list(self._tombstones.items()):
            if since > now - self._tombstone_s and len(self._tombstones) <= TOMBSTONES_MAX:
                break
            del self._tombstones[request]
