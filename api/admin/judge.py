"""What can be refused at once, from the live state alone: nothing is recorded then. Pure.

The controller judges again when it folds the fact: what passes here may still be rejected there.
"""

from __future__ import annotations

import json

from midstream.api.problems import Problem
from midstream.control.decide.manual import move_problem
from midstream.control.policies.room import Room
from midstream.control.state import InstanceView, RequestView, State


def find_instance(state: State, instance: str) -> InstanceView:
    """Raises `Problem` 404."""
    view = state.instances.get(instance)
    if view is None:
        raise Problem(404, "unknown_instance", f"there is no instance {instance[:64]!r}")
    return view


def find_request(state: State, request: str) -> RequestView:
    """Raises `Problem` 404."""
    view = state.requests.get(request)
    if view is None:
        raise Problem(404, "unknown_request", f"there is no live request {request[:64]!r}")
    return view


def judge_move(state: State, request: str, target: str | None) -> None:
    """Raises `Problem`, 404 or 409, for a move that cannot be."""
    view = find_request(state, request)
    if target is not None:
        find_instance(state, target)
    if problem := move_problem(state, Room(state, state.last_tick_ms), view, target):
        raise Problem(409, *problem)


def judge_drain(state: State, instance: str) -> None:
    """Raises `Problem`, 404 or 409."""
    view = find_instance(state, instance)
    if view.health in ("lost", "stopped"):
        raise Problem(409, "instance_down", f"{instance} is {view.health}")
    if view.is_draining:
        raise Problem(409, "already_draining", f"{instance} is draining already")


def judge_undrain(state: State, instance: str) -> None:
    """Raises `Problem`, 404 or 409."""
    if not find_instance(state, instance).is_draining:
        raise Problem(409, "not_draining", f"{instance} is not draining")


def require_json(value: object) -> None:
    """Raises `Problem` 422 for values that JSON text cannot carry: infinities, no-numbers, broken characters."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        raise Problem(422, "invalid_input", f"a value in the body cannot be kept: {error}") from error
