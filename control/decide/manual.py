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
VERSION: Final = 1


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
    source = None if view is None else state.instances.get(view.owner.instance)
    if view is None:
        problem: Problem | None = ("unknown_request", f"no live request {operation.subject}: unknown, or ended")
    else:
        problem = _request_problem(room, view, source)
    if problem is None and view is not None and source is not None:
        if room.moves_left <= 0 or room.is_at_limit(source.owner.instance):
            return
        if operation.target is None:
            problem = _order_freest(state, room, draft, operation, view)
        else:
            problem = _order_to(state, room, draft, operation, view)
    if problem is not None:
        draft.say([MoveRejected(operation=operation.operation, code=problem[0], reason=problem[1])])


def _request_problem(room: Room, view: RequestView, source: InstanceView | None) -> Problem | None:
    if room.is_moving(view):
        return "already_moving", f"{view.request} has an open move"
    if source is None or source.owner != view.owner or not room.is_up(source):
        return "source_down", f"{view.owner}, which holds {view.request}, is not up"
    if not view.is_movable:
        return "not_movable", f"{view.request} cannot be moved exactly"
    return None


def _order_to(state: State, room: Room, draft: Draft, operation: OperationView, view: RequestView) -> Problem | None:
    name = operation.target or ""
    source, target = state.instances[view.owner.instance], state.instances.get(name)
    if target is None:
        return "unknown_instance", f"there is no instance {name}"
    problem = pair_problem(source, target)
    if problem is not None:
        return problem
    if not room.is_up(target):
        return "target_down", f"{name} is silent"
    if not is_large_enough(view, target):
        return too_small(view, target)
    blocks = blocks_needed(view, target.fingerprint.block_tokens)
    if not room.fits(target, blocks):
        return room.full(target, blocks)
    if not room.is_at_limit(name):
        _order(draft, operation, view, ((name, room.freeness(target)),), blocks)
    return None


def _order_freest(
    state: State, room: Room, draft: Draft, operation: OperationView, view: RequestView
) -> Problem | None:
    source = state.instances[view.owner.instance]
    candidates = best(room, view, ranked(state, room, source), may_return=True)
    if not candidates:
        return "target_full", f"no instance of the same fingerprint has room for {view.request}"
    blocks = blocks_needed(view, source.fingerprint.block_tokens)
    _order(draft, operation, view, candidates, blocks)
    return None


def _order(
    draft: Draft,
    operation: OperationView,
    view: RequestView,
    candidates: tuple[tuple[str, float], ...],
    blocks: int,
) -> None:
    proposal = Proposal(
        request=view.request,
        target=candidates[0][0],
        candidates=candidates,
        blocks_needed=blocks,
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
