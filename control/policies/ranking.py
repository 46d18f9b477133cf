"""From scores to a choice: the end of every dispatch policy that weighs its candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nsmallest

from midstream.control.policies.base import CANDIDATES_MAX, DispatchChoice, InFlight, finite
from midstream.control.state import InstanceView

NOTHING_SENT = InFlight(0, 0)
"""In flight to an instance that this gateway sent nothing to since its last reports."""


def best_of(
    views: Sequence[InstanceView], scores: Sequence[float], turn: int, reason: Callable[[InstanceView, float], str]
) -> DispatchChoice:
    """The candidate with the highest score; equal ones take turns, so that many dispatches spread (P22)."""
    count = len(views)
    rows = [(-score, (index - turn) % count, index) for index, score in enumerate(scores)]
    ranked = nsmallest(CANDIDATES_MAX, rows)
    best = views[ranked[0][2]]
    return DispatchChoice(
        owner=best.owner,
        address=best.address,
        scores=tuple((views[index].owner.instance, finite(-score)) for score, _, index in ranked),
        reason=reason(best, -ranked[0][0]),
    )
