"""Why a decision came out as it did: by deciding again, at the recorded position, and watching. Pure.

The log carries what was chosen and what it was weighed against. What was considered and refused is not in it, because
it follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final

import msgspec

from midstream.control.decide import decide
from midstream.control.decide.rules import may_return, request_rule, target_rule
from midstream.control.events import MoveDecided, RequestDispatched, TickElapsed
from midstream.control.ids import Owner, Position
from midstream.control.policies.base import CANDIDATES_MAX, DispatchWanted, Proposal, finite
from midstream.control.policies.candidates import candidate_problem
from midstream.control.policies.leavers import freeness_with
from midstream.control.policies.room import Problem, Room, blocks_needed
from midstream.control.policies.saturation import takes
from midstream.control.state import InstanceView, PolicySettings, RequestView, State

QUEUE_MAX: Final = 1_000_000
"""A line of any length: how long one may be is the gateway's setting, and not in the log."""

SHOWN_MAX: Final = 64
"""Instances, requests and refusals that one explanation names each."""


class Weighed(msgspec.Struct, frozen=True, kw_only=True):
    """An instance or a request that was looked at. `code` and `reason` say why not; without them it was possible."""

    name: str
    score: float | None = None
    """Higher is better; of a target its freeness with the request there."""
    code: str | None = None
    reason: str | None = None


class RefusedProposal(msgspec.Struct, frozen=True, kw_only=True):
    """A move that a policy wanted in the same tick and the limits refused."""

    policy: str
    request: str
    target: str
    code: str
    reason: str


class MoveExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One move: the rule that chose it, and everything else that could have been."""

    migration: str
    request: str
    source: Owner
    target: Owner
    policy: str
    policy_version: int
    params: dict[str, Any]
    reason: str
    decided_at: Position
    candidates: tuple[tuple[str, float], ...]
    targets: tuple[Weighed, ...]
    """Every other instance, as the limits saw it at that moment."""
    requests: tuple[Weighed, ...]
    """What else was on the source, oldest first."""
    refused: tuple[RefusedProposal, ...]
    limits: PolicySettings
    """Policies and limits that were in force."""
    is_rederived: bool
    """Deciding again gave this very fact."""


class DispatchExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of an instance for a request."""

    policy: str
    reason: str
    cause: str
    owner: Owner
    epoch: int
    scores: tuple[tuple[str, float], ...]
    instances: tuple[Weighed, ...]
    """As the log showed them just before the fact; the gateway's own fold may have been a little behind."""


class StayExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Where a live request could go now."""

    code: str | None
    reason: str | None
    """Why no policy may move it now, whatever it wants."""
    targets: tuple[Weighed, ...]


class _Witness:
    """Looks on while a tick is decided again."""

    def __init__(self, state: State, recorded: MoveDecided) -> None:
        self._state = state
        self._recorded = recorded
        self.derived: MoveDecided | None = None
        self.targets: tuple[Weighed, ...] = ()
        self.requests: tuple[Weighed, ...] = ()
        self.refusals: list[RefusedProposal] = []

    def ordered(self, move: MoveDecided, room: Room) -> None:
        if move.migration != self._recorded.migration:
            return
        self.derived = move
        view = self._state.requests[move.request]
        self.targets = _move_targets(self._state, room, view, move)
        others = (self._state.requests[name] for name in self._state.placed.get(view.owner.instance, ()))
        self.requests = _some(_request(room, move, other) for other in others if other.request != view.request)

    def refused(self, proposal: Proposal, policy: str, problem: Problem) -> None:
        if len(self.refusals) < SHOWN_MAX:
            code, reason = problem
            self.refusals.append(
                RefusedProposal(
                    policy=policy, request=proposal.request, target=proposal.target, code=code, reason=reason
                )
            )


def explain_move(state: State, tick: TickElapsed, recorded: MoveDecided) -> MoveExplanation:
    """Decide `tick` again on the state at `recorded.decided_at`. Raises as `decide` does."""
    witness = _Witness(state, recorded)
    decide(state, tick, witness)
    return MoveExplanation(
        migration=recorded.migration,
        request=recorded.request,
        source=recorded.source,
        target=recorded.target,
        policy=recorded.policy,
        policy_version=recorded.policy_version,
        params=recorded.params,
        reason=recorded.reason,
        decided_at=recorded.decided_at,
        candidates=recorded.candidates,
        targets=witness.targets,
        requests=witness.requests,
        refused=tuple(witness.refusals),
        limits=state.policies,
        is_rederived=witness.derived is not None and _as_read(witness.derived) == recorded,
    )


def explain_dispatch(state: State, recorded: RequestDispatched) -> DispatchExplanation:
    """What the log showed of every instance when the request was dispatched: `state` is the fold just before."""
    scores = dict(recorded.scores)
    wanted = _wanted(state, recorded)
    views = sorted(state.instances.values(), key=lambda view: -scores.get(view.owner.instance, float("-inf")))
    return DispatchExplanation(
        policy=recorded.policy,
        reason=recorded.reason,
        cause=recorded.cause,
        owner=recorded.owner,
        epoch=recorded.epoch,
        scores=recorded.scores,
        instances=_some(
            _weighed(
                view.owner.instance, scores.get(view.owner.instance), _dispatch_problem(state, view, wanted, scores)
            )
            for view in views
        ),
    )


def _dispatch_problem(
    state: State, view: InstanceView, wanted: DispatchWanted, scores: dict[str, float]
) -> Problem | None:
    """Why it was no candidate; none if it was weighed, or may have been: a fact names the best few."""
    name = view.owner.instance
    if wanted.model is not None and view.fingerprint.model != wanted.model:
        return "other_model", f"{name} serves {view.fingerprint.model}, not {wanted.model}"
    problem = candidate_problem(state, view, wanted)
    if problem is not None or name in scores:
        return problem
    if not takes(state, name, wanted, {}, QUEUE_MAX):
        return "saturated", f"{name} has no slot or too few blocks free: the request would only have waited there"
    if scores and len(scores) < CANDIDATES_MAX:
        return "left_out", f"{name} had a line, was silent or had refused: only the gateway knew"
    return None


def _wanted(state: State, recorded: RequestDispatched) -> DispatchWanted:
    chosen = state.instances.get(recorded.owner.instance)
    return DispatchWanted(
        request=recorded.request,
        prompt_tokens=recorded.prompt_tokens + recorded.delivered_tokens,
        output_tokens_max=max(0, recorded.output_tokens_max - recorded.delivered_tokens),
        priority=recorded.priority,
        model=None if chosen is None else chosen.fingerprint.model,
    )


def explain_stay(state: State, view: RequestView) -> StayExplanation:
    """What the limits say of a live request at the last tick."""
    room = Room(state, state.last_tick_ms)
    code, reason = room.stay_problem(view) or (None, None)

    def problem(source: InstanceView, target: InstanceView, blocks: int) -> Problem | None:
        return room.target_problem(view, source, target, blocks=blocks, may_return=source.is_draining)

    targets = _targets(state, room, view, problem)
    return StayExplanation(code=code, reason=reason, targets=targets)


def _move_targets(state: State, room: Room, view: RequestView, move: MoveDecided) -> tuple[Weighed, ...]:
    """Every other instance; the chosen one was allowed, even if others wait there who come later."""

    def problem(source: InstanceView, target: InstanceView, blocks: int) -> Problem | None:
        if target.owner.instance == move.target.instance:
            return None
        limit = room.target_problem(view, source, target, blocks=blocks, may_return=may_return(move.policy))
        return limit or target_rule(state, room, move, target)

    return _targets(state, room, view, problem)


def _targets(
    state: State, room: Room, view: RequestView, problem: Callable[[InstanceView, InstanceView, int], Problem | None]
) -> tuple[Weighed, ...]:
    """Every other instance; `problem(source, target, blocks)` says why not."""
    source = state.instances.get(view.owner.instance)
    if source is None:
        return ()
    found = [
        _weighed(
            other.owner.instance,
            finite(freeness_with(room, other, view)),
            problem(source, other, blocks_needed(view, other.fingerprint.block_tokens)),
        )
        for other in state.instances.values()
        if other is not source
    ]
    return _some(sorted(found, key=lambda row: (row.code is not None, -(row.score or 0.0), row.name)))


def _request(room: Room, move: MoveDecided, view: RequestView) -> Weighed:
    return _weighed(view.request, None, room.stay_problem(view) or request_rule(move, view))


def _weighed(name: str, score: float | None, problem: Problem | None) -> Weighed:
    code, reason = problem or (None, None)
    return Weighed(name=name, score=score, code=code, reason=reason)


def _some(rows: Iterable[Weighed]) -> tuple[Weighed, ...]:
    return tuple(islice(rows, SHOWN_MAX))


def _as_read(move: MoveDecided) -> MoveDecided:
    """The fact as a reader of the log gets it."""
    return msgspec.json.decode(msgspec.json.encode(move), type=MoveDecided)
