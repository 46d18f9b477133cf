"""Policies by name. One file each, pure; loaded when first asked for, and an unknown name is told the known ones.

Adding one: write its file with a `POLICY`, name it in the table below, done.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from midstream.control.errors import UnknownThing
from midstream.control.policies.base import (
    DispatchChoice,
    DispatchPolicy,
    DispatchWanted,
    InFlight,
    MovePolicy,
    ScalePolicy,
)
from midstream.control.state import PolicySettings, State

__all__ = [
    "DISPATCH",
    "MOVES",
    "SCALE",
    "DispatchChoice",
    "DispatchWanted",
    "InFlight",
    "check",
    "choose",
    "dispatch_policy",
    "move_policy",
    "scale_policy",
]

_HERE: Final = "midstream.control.policies"

DISPATCH: Final = {
    "freeness": f"{_HERE}.dispatch_freeness",
    "round_robin": f"{_HERE}.dispatch_round_robin",
}
"""Dispatch policies: name to module."""

MOVES: Final = {
    "balance": f"{_HERE}.moves_balance",
    "drain": f"{_HERE}.moves_drain",
    "none": f"{_HERE}.moves_none",
    "prefill_decode": f"{_HERE}.moves_prefill_decode",
    "priority": f"{_HERE}.moves_priority",
}
"""Move policies: name to module."""


SCALE: Final = {
    "scale_freeness": f"{_HERE}.scale_freeness",
}
"""Scale policies: name to module."""


def dispatch_policy(name: str) -> DispatchPolicy:
    """The dispatch policy of that name. Raises `UnknownThing`."""
    policy: DispatchPolicy = _load("dispatch policy", DISPATCH, name)
    return policy


def move_policy(name: str) -> MovePolicy:
    """The move policy of that name. Raises `UnknownThing`."""
    policy: MovePolicy = _load("move policy", MOVES, name)
    return policy


def scale_policy(name: str) -> ScalePolicy:
    """The scale policy of that name. Raises `UnknownThing`."""
    policy: ScalePolicy = _load("scale policy", SCALE, name)
    return policy


def choose(state: State, wanted: DispatchWanted, in_flight: Mapping[str, InFlight], turn: int) -> DispatchChoice | None:
    """Choose an instance by the dispatch policy in force; `None` if no instance may take the request."""
    configured = state.policies.dispatch
    return dispatch_policy(configured.name).choose(state, wanted, in_flight, configured.params, turn)


def check(settings: PolicySettings) -> None:
    """Raise `UnknownThing` or `BadInput` unless every policy named exists and takes its parameters."""
    dispatch_policy(settings.dispatch.name).params(settings.dispatch.params)
    for chosen in settings.moves:
        move_policy(chosen.name).params(chosen.params)
    if settings.scale is not None:
        scale_policy(settings.scale.name).params(settings.scale.params)


def _load(what: str, table: Mapping[str, str], name: str) -> Any:
    module = table.get(name)
    if module is None:
        raise UnknownThing(f"no {what} is named {name!r}; known: {', '.join(sorted(table))}")
    return import_module(module).POLICY
