"""Policies by name. One file each, pure; loaded when first asked for, and an unknown name is told the known ones.

Adding one: write its file with a `POLICY`, name it in the table below, done.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from midstream.control.errors import UnknownThing
from midstream.control.policies import base
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
    "check_param",
    "check_params",
    "choose",
    "dispatch_policy",
    "move_policy",
    "needs_cached",
    "scale_policy",
]

_HERE: Final = "midstream.control.policies"

DISPATCH: Final = {
    "flood": f"{_HERE}.dispatch_flood",
    "freeness": f"{_HERE}.dispatch_freeness",
    "least_kv": f"{_HERE}.dispatch_least_kv",
    "least_requests": f"{_HERE}.dispatch_least_requests",
    "prefix_affinity": f"{_HERE}.dispatch_prefix_affinity",
    "round_robin": f"{_HERE}.dispatch_round_robin",
    "session_affinity": f"{_HERE}.dispatch_session_affinity",
    "slo": f"{_HERE}.dispatch_slo",
}
"""Dispatch policies: name to module."""

MOVES: Final = {
    "balance": f"{_HERE}.moves_balance",
    "consolidate": f"{_HERE}.moves_consolidate",
    "defragment": f"{_HERE}.moves_defragment",
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
    """Choose an instance by the dispatch policy in force; `None` if no instance may take the request.

    Raises `UnknownThing` or `BadInput` if that policy or its parameters are not known here.
    """
    configured = state.policies.dispatch
    policy = dispatch_policy(configured.name)
    return policy.choose(state, wanted, in_flight, policy.params(configured.params), turn)


def needs_cached(state: State) -> bool:
    """Does the dispatch policy in force read what instances have cached; one that is not known here does not."""
    name = state.policies.dispatch.name
    return name in DISPATCH and dispatch_policy(name).needs_cached


def check(settings: PolicySettings) -> None:
    """Raise `UnknownThing` or `BadInput` unless every policy named exists and takes its parameters."""
    dispatch_policy(settings.dispatch.name).params(settings.dispatch.params)
    for chosen in settings.moves:
        move_policy(chosen.name).params(chosen.params)
    if settings.scale is not None:
        scale_policy(settings.scale.name).params(settings.scale.params)


def check_param(name: str, param: str, value: Any) -> None:
    """Raise `UnknownThing` or `BadInput` unless a policy has that parameter and it may have that value."""
    base.check_param(name, _any_policy(name).params_type, param, value)


def check_params(params: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `UnknownThing` or `BadInput` unless every policy named exists and takes its parameters."""
    for name, given in params.items():
        _any_policy(name).params(given)


def _any_policy(name: str) -> DispatchPolicy | MovePolicy | ScalePolicy:
    if name in DISPATCH:
        return dispatch_policy(name)
    return scale_policy(name) if name in SCALE else move_policy(name)


def _load(what: str, table: Mapping[str, str], name: str) -> Any:
    module = table.get(name)
    if module is None:
        raise UnknownThing(f"no {what} is named {name!r}; known: {', '.join(sorted(table))}")
    return import_module(module).POLICY
