"""Which backend two ends use: the best, by the source's order, that both have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from midstream.control.errors import Refused


class Choice(NamedTuple):
    """A backend's name, and why it and no better one."""

    name: str
    why: str


def choose(offered: Sequence[str], here: Sequence[str]) -> Choice:
    """The first offer that is also ours. Raises `Refused("no_transfer")` if there is none.

    An offer is a backend's name, with `@place` behind it if it works only within that place: elsewhere it is another.
    """
    theirs, ours = ", ".join(offered) or "nothing", ", ".join(here) or "nothing"
    for number, offer in enumerate(offered):
        if offer in here:
            why = "the source's first" if number == 0 else f"the source has {theirs}; the target has {ours}"
            return Choice(name_of(offer), why)
    raise Refused("no_transfer", f"the source has {theirs}; the target has {ours}")


def name_of(offer: str) -> str:
    """The backend of an offer."""
    return offer.partition("@")[0]
