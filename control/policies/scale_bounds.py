"""Who counts towards the bounds on how many instances there are, and who of them may go. Pure.

The bounds are those of all instances together, whatever model or role they have: a decision that one should come names
neither, and whoever starts it chooses. Below one that computes prompts and one that makes tokens for each model nothing
shrinks, whatever the bounds say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from midstream.control.fold.scaling import GAP_MS_MAX
from midstream.control.state import InstanceView, State

AWAY_MS_MAX: Final = 300_000
"""However long a start takes: so long after an instance went, and after the cluster was first watched, nobody waits."""
NEEDED_FOR: Final = {"prompts": frozenset({"mixed", "prefill"}), "tokens": frozenset({"mixed", "decode"})}
"""What each model needs an instance for: the roles that do it."""


def is_watched(state: State, now_ms: int, for_ms: int) -> bool:
    """Has the cluster been sampled, without a gap, for so long (at most `AWAY_MS_MAX`) and until now."""
    samples = state.samples
    if not samples or now_ms - samples[-1].at_ms > GAP_MS_MAX:
        return False
    return now_ms - samples[0].at_ms >= min(for_ms, AWAY_MS_MAX)


def away(state: State, now_ms: int, boot_ms: int) -> int:
    """Instances that count as there although they do not serve.

    Those that an operator drains, and those that went untold less than a start ago: they may well be restarting.
    """
    removals = [view for view in state.scalings.values() if view.action == "remove"]
    leaving = {view.instance for view in removals if view.status == "open"}
    told = {view.instance: view.ended_at_ms for view in removals if view.status == "done"}
    since_ms = now_ms - min(boot_ms, AWAY_MS_MAX)
    return sum(
        view.is_draining and name not in leaving
        if view.health in ("up", "suspect")
        else view.reported_at_ms > since_ms and told.get(name, 0) < view.registered_at_ms
        for name, view in state.instances.items()
    )


def who_may_go(views: Sequence[InstanceView]) -> Iterator[InstanceView]:
    """Those of `views` that may go one after the other, in their order: each model keeps who does what it needs."""
    staying = list(views)
    for view in views:
        others = [other for other in staying if other is not view]
        if all(_is_done(others, view.fingerprint.model, by) for by in NEEDED_FOR.values() if view.role in by):
            staying = others
            yield view


def _is_done(views: Sequence[InstanceView], model: str, by: frozenset[str]) -> bool:
    return any(view.fingerprint.model == model and view.role in by for view in views)
