"""Which backend two ends use: the best, by the source's order, that both have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from midstream.control.errors import Refused

UNUSABLE = "!"


class Choice(NamedTuple):
    """A backend's name, and why it and no better one."""

    name: str
    why: str


def choose(offered: Sequence[str], here: Sequence[str]) -> Choice:
    """The first offer that is also ours. Raises `Refused("no_transfer")` if there is none.

    An offer is a backend's name, with `@place` behind it if it works only within that place: elsewhere it is another.
    With `!reason` behind it, it is none: whoever was told to use it says why it cannot.
    """
    theirs, ours = ", ".join(offered) or "nothing", ", ".join(here) or "nothing"
    for number, offer in enumerate(offered):
        if offer in here and is_usable(offer):
            why = "the source's first" if number == 0 else f"the source has {theirs}; the target has {ours}"
            return Choice(name_of(offer), why)
    raise Refused("no_transfer", f"the source has {theirs}; the target has {ours}")


def unusable(name: str, reason: str) -> str:
    """An offer that says why there is none."""
    return f"{name}{UNUSABLE}{reason}"


def is_usable(offer: str) -> bool:
    """Whether a backend is offered at all."""
    return UNUSABLE not in offer


def name_of(offer: str) -> str:
    """The backend of an offer."""
    return offer.partition("@")[0].partition(UNUSABLE)[0]
