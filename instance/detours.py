"""Which transfers a source asks a target for, after some could not connect to it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from midstream.control.ids import Owner
from midstream.migration.transfers.choice import name_of, unusable

AVOID_S: Final = 600.0
"""Longer than a controller leaves the pair alone, so that the next move between them takes another way."""


class Detours:
    """Transfers that could not connect, by target. An instance that comes back has another incarnation: a new try."""

    def __init__(self) -> None:
        self._failed_at_s: dict[tuple[Owner, str], float] = {}

    def add(self, target: Owner, transfer: str, now_s: float) -> None:
        """This transfer did not reach that target."""
        self._failed_at_s = {key: at_s for key, at_s in self._failed_at_s.items() if now_s - at_s < AVOID_S}
        self._failed_at_s[target, transfer] = now_s

    def offers(self, offered: Sequence[str], target: Owner, now_s: float) -> tuple[str, ...]:
        """What to offer: those that failed come last, as one may be all there is, and say in their old place why."""
        first, last = [], []
        for offer in offered:
            name = name_of(offer)
            failed_at_s = self._failed_at_s.get((target, name))
            if failed_at_s is None or now_s - failed_at_s >= AVOID_S:
                first.append(offer)
            else:
                first.append(unusable(name, f"no connection to {target} {now_s - failed_at_s:.0f} s ago"))
                last.append(offer)
        return (*first, *last)
