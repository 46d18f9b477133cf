"""Choosing where one request may go, for every policy that only knows what must leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from midstream.control.policies.leavers import freeness_with
from midstream.control.policies.room import Room, blocks_needed
from midstream.control.state import InstanceView, RequestView, State

FITTING_MAX: Final = 8
"""Targets with room that are compared, taken in order of their freeness."""


def ranked(state: State, room: Room, source: InstanceView) -> list[InstanceView]:
    """Instances that may take something from `source`, freest first, and those for prompts after all others."""
    fit = [view for view in state.instances.values() if room.may_pair(source, view)]
    return sorted(fit, key=lambda view: (view.role == "prefill", -room.freeness(view), view.owner.instance))


def best(
    room: Room, view: RequestView, targets: Sequence[InstanceView], *, may_return: bool
) -> tuple[tuple[str, float], ...]:
    """The targets with room for the request and their freeness with it there, best first; empty if none has."""
    fitting: list[tuple[float, str]] = []
    for target in targets:
        if target.role == "prefill" and fitting:
            break
        name = target.owner.instance
        blocks = blocks_needed(view, target.fingerprint.block_tokens)
        if room.is_at_limit(name) or not room.fits(target, blocks):
            continue
        if not room.may_host(view, target, may_return=may_return):
            continue
        fitting.append((-freeness_with(room, target, view), name))
        if len(fitting) == FITTING_MAX:
            break
    return tuple((name, -score) for score, name in sorted(fitting))
