"""Moves asked for by hand: ordered, or rejected with a code and nothing done."""

from __future__ import annotations

from typing import Final

from midstream.control.decide.draft import Draft
from midstream.control.events import MoveRejected
from midstream.control.policies.base import NoParams, Proposal
from midstream.control.policies.room import Problem, Room, blocks_needed, is_large_enough, pair_problem, too_small
from midstream.control.policies.targets import best, ranked
from midstream.control.state import InstanceView, OperationView, RequestView, State

POLICY: Final = "manual"
VERSION: Final = 2


def move_problem(state: State, room: Room, view: RequestView, target: str | None) -> Problem | None:
    """Why this request cannot go to `target`, or without one nowhere; limits that pass by themselves are no reason."""
    source = state.instances.get(view.owner.instance)
    if room.is_moving(view):
        return "already_moving", f"{view.request} has an open move"
    if source is None or source.owner != view.owner or not room.is_up(source):
        return "source_down", f"{view.owner}, which holds {view.request}, is not up"
    if not view.is_movable:
        return "not_movable", f"{view.request} cannot be moved exactly"
    if target is None:
        return _nowhere(state, room, view, source)
    wanted = state.instances.get(target)
    if wanted is None:
        return "unknown_instance", f"there is no instance {target}"
    return _target_problem(room, view, source, wanted)


def answer_requests(state: State, room: Room, draft: Draft) -> None:
    """Answer every `MoveRequested` that has no answer yet.

    Cool-down, ping-pong and pair exclusion are for policies; a person may insist. A move whose source or target
    takes part in as many moves as it may waits for a later tick, ahead of all policies.
    """
    for operation in state.operations.values():
        if operation.kind == "move" and operation.status == "accepted":
            _answer(state, room, draft, operation)


def _answer(state: State, room: Room, draft: Draft, operation: OperationView) -> None:
    view = state.requests.get(operation.subject)
    if view is None:
        problem: Problem | None = ("unknown_request", f"no live request {operation.subject}: unknown, or ended")
    else:
        problem = move_problem(state, room, view, operation.target)
    if problem is not None:
        draft.say([MoveRejected(operation=operation.operation, code=problem[0], reason=problem[1])])
    elif view is not None and room.moves_left > 0 and not room.is_at_limit(view.owner.instance):
        _order(state, room, draft, operation, view)


def _target_problem(room: Room, view: RequestView, source: InstanceView, target: InstanceView) -> Problem | None:
    problem = pair_problem(source, target)
    if problem is not None:
        return problem
    if not room.is_up(target):
        return "target_down", f"{target.owner.instance} is silent"
    if not is_large_enough(view, target):
        return too_small(view, target)
    blocks = blocks_needed(view, target.fingerprint.block_tokens)
    return None if room.fits(target, blocks) else room.full(target, blocks)


def _nowhere(state: State, room: Room, view: RequestView, source: InstanceView) -> Problem | None:
    problems = [_target_problem(room, view, source, target) for target in state.instances.values()]
    if None in problems:
        return None
    if any(problem and problem[0] == "target_full" for problem in problems):
        return "target_full", f"no instance that could take {view.request} has room for it"
    return "no_target", f"no other instance could take {view.request}"


def _candidates(state: State, room: Room, view: RequestView, target: str | None) -> tuple[tuple[str, float], ...]:
    if target is None:
        return best(room, view, ranked(state, room, state.instances[view.owner.instance]), may_return=True)
    return () if room.is_at_limit(target) else ((target, room.freeness(state.instances[target])),)


def _order(state: State, room: Room, draft: Draft, operation: OperationView, view: RequestView) -> None:
    candidates = _candidates(state, room, view, operation.target)
    if not candidates:
        return
    proposal = Proposal(
        request=view.request,
        target=candidates[0][0],
        candidates=candidates,
        blocks_needed=blocks_needed(view, state.instances[view.owner.instance].fingerprint.block_tokens),
        reason=f"asked for by {operation.actor}",
    )
    draft.order(
        proposal,
        policy=POLICY,
        version=VERSION,
        params=NoParams(),
        operation=operation.operation,
        mode=operation.mode,
    )
