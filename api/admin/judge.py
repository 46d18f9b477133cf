"""What can be refused at once, from the live state alone: nothing is recorded then. Pure.

The controller judges again when it folds the fact: what passes here may still be rejected there.
"""

from __future__ import annotations

from midstream.api.problems import Problem
from midstream.control.policies.room import Room, blocks_needed, pair_problem
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
    wanted = None if target is None else find_instance(state, target)
    source = find_instance(state, view.owner.instance)
    room = Room(state, state.last_tick_ms)
    if wanted is not None and (problem := pair_problem(source, wanted)):
        raise Problem(409, *problem)
    if room.is_moving(view):
        raise Problem(409, "already_moving", f"{request} is being moved ({view.migration})")
    if not view.is_movable:
        raise Problem(409, "not_movable", f"{request} cannot be moved exactly")
    if wanted is not None and not _fits(room, view, wanted):
        raise Problem(409, "target_full", f"{target} has no room for {request}")
    if wanted is None and not any(pair_problem(source, other) is None for other in state.instances.values()):
        raise Problem(409, "no_target", "no other instance could take it")


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


def _fits(room: Room, view: RequestView, target: InstanceView) -> bool:
    return room.fits(target, blocks_needed(view, target.fingerprint.block_tokens))
