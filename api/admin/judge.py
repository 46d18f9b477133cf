"""What can be refused at once, from the live state alone: nothing is recorded then. Pure.

The controller judges again when it folds the fact: what passes here may still be rejected there.
"""

from __future__ import annotations

import json

from midstream.api.problems import Problem
from midstream.control.policies.room import Room, blocks_needed, is_large_enough, pair_problem, too_small
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
    """Raises `Problem`, 404 or 409, for a move that cannot be. The codes are the controller's (`decide.manual`)."""
    view = find_request(state, request)
    wanted = None if target is None else find_instance(state, target)
    source = find_instance(state, view.owner.instance)
    room = Room(state, state.last_tick_ms)
    if wanted is not None and (problem := pair_problem(source, wanted)):
        raise Problem(409, *problem)
    if room.is_moving(view):
        raise Problem(409, "already_moving", f"{request} is being moved ({view.migration})")
    if source.owner != view.owner or source.health != "up":
        raise Problem(409, "source_down", f"{view.owner}, which holds {request}, is not up")
    if not view.is_movable:
        raise Problem(409, "not_movable", f"{request} cannot be moved exactly")
    _judge_room(state, room, view, source, wanted)


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


def _judge_room(state: State, room: Room, view: RequestView, source: InstanceView, wanted: InstanceView | None) -> None:
    """Raises `Problem` 409 if the target, or without one every instance, has no room."""
    others = [wanted] if wanted else [v for v in state.instances.values() if pair_problem(source, v) is None]
    if not others:
        raise Problem(409, "no_target", "no other instance could take it")
    if wanted is not None and not is_large_enough(view, wanted):
        raise Problem(409, *too_small(view, wanted))
    if not any(room.fits(other, blocks_needed(view, other.fingerprint.block_tokens)) for other in others):
        who = f"{wanted.owner.instance} has no" if wanted else "no other instance has"
        raise Problem(409, "target_full", f"{who} room for {view.request}")
