"""Explanations: the recorded decision from the archive, and what it was weighed against by deciding again."""

from __future__ import annotations

from typing import Final

from midstream.api.admin.deps import AdminDeps
from midstream.api.admin.explain_models import (
    DispatchExplanationBody,
    Happened,
    MoveExplanationBody,
    RequestExplanationBody,
    StayExplanationBody,
)
from midstream.api.problems import Problem
from midstream.control.decide.explain import MoveExplanation, explain_dispatch, explain_move, explain_stay
from midstream.control.errors import BadInput
from midstream.control.events import (
    CommandRefused,
    Entry,
    Event,
    MigrationAborted,
    MigrationCommitted,
    MigrationReclaimed,
    MoveDecided,
    MoveRejected,
    RequestCancelled,
    RequestDispatched,
    RequestFailed,
    RequestFinished,
    TickElapsed,
)
from midstream.control.ids import START, Position

TICKS_LOOKED_AT: Final = 8
"""Ticks behind a position among which the one decided there must be: normally the first."""

DISPATCHES_MAX: Final = 16
"""Dispatches of one request that are explained, the last ones."""

MOVES_MAX: Final = 200
"""Steps of its moves that are named, the last ones."""

NOT_SENT: Final = "in the log; one that still waits at its gateway has no fact yet"
"""What it may be that nobody knows."""

ENDS: Final = {RequestFinished: "finished", RequestCancelled: "cancelled", RequestFailed: "failed"}
OUTCOMES: Final[dict[type[Event], str]] = {
    MoveDecided: "decided",
    MigrationCommitted: "committed",
    MigrationAborted: "aborted",
    MigrationReclaimed: "reclaimed",
    CommandRefused: "refused",
    MoveRejected: "rejected",
}


async def move_explanation(deps: AdminDeps, migration: str) -> MoveExplanationBody:
    """Why a move was ordered, and what else could have been. Raises `Problem` 404, 409 or 503."""
    recorded = await _recorded(deps, migration)
    tick = await _tick_decided_at(deps, recorded.decided_at)
    state = await deps.archive.state_at(recorded.decided_at)
    try:
        explained: MoveExplanation = explain_move(state, tick, recorded)
    except BadInput as error:
        raise Problem(409, "unknown_policy", f"this build cannot decide it again: {error}") from error
    return MoveExplanationBody.model_validate(explained)


async def _recorded(deps: AdminDeps, migration: str) -> MoveDecided:
    for entry in await deps.archive.read(START, 1, kind="MoveDecided", migration=migration):
        if isinstance(entry.fact.event, MoveDecided):
            return entry.fact.event
    if migration in deps.follower.state.migrations:
        raise Problem(503, "not_archived_yet", f"{migration} has not reached the archive yet", {"Retry-After": "1"})
    raise Problem(404, "unknown_migration", f"there is no migration {migration[:64]!r}")


async def _tick_decided_at(deps: AdminDeps, position: Position) -> TickElapsed:
    for entry in await deps.archive.read(position, TICKS_LOOKED_AT, kind="TickElapsed"):
        event = entry.fact.event
        if isinstance(event, TickElapsed) and event.decided_at == position:
            return event
    raise Problem(409, "unknown_tick", f"the archive has no tick that was decided at {position}")


async def request_explanation(deps: AdminDeps, request: str) -> RequestExplanationBody:
    """Why a request is where it is: each dispatch, each move, each no. Raises `Problem` 404."""
    story = await deps.archive.story(request)
    view = deps.follower.state.requests.get(request)
    if view is None and not story:
        raise Problem(404, "unknown_request", f"there is no request {request[:64]!r} {NOT_SENT}")
    dispatched = [entry for entry in story if _is_choice(entry)][-DISPATCHES_MAX:]
    ended = next((ENDS[type(e.fact.event)] for e in reversed(story) if type(e.fact.event) in ENDS), "unknown")
    stay = None if view is None else StayExplanationBody.model_validate(explain_stay(deps.follower.state, view))
    return RequestExplanationBody(
        request=request,
        status=ended if view is None else "live",
        dispatches=[await _dispatch(deps, entry) for entry in dispatched],
        moves=[found for entry in story if (found := _happened(entry)) is not None][-MOVES_MAX:],
        now=stay,
    )


def _is_choice(entry: Entry) -> bool:
    """A dispatch that an instance was chosen for, not the repetition of an old one."""
    event = entry.fact.event
    return isinstance(event, RequestDispatched) and event.cause != "again"


async def _dispatch(deps: AdminDeps, entry: Entry) -> DispatchExplanationBody:
    event = entry.fact.event
    assert isinstance(event, RequestDispatched)
    generation, seq = entry.position
    state = await deps.archive.state_at(Position(generation, max(seq - 1, 0)))
    explained = DispatchExplanationBody.model_validate(explain_dispatch(state, event))
    return explained.model_copy(update={"position": str(entry.position), "at_ms": entry.fact.at_ms})


def _happened(entry: Entry) -> Happened | None:
    """A step of a move, or a no, as far as it says why."""
    event = entry.fact.event
    what = OUTCOMES.get(type(event))
    if what is None:
        return None
    return Happened(
        position=str(entry.position),
        at_ms=entry.fact.at_ms,
        what=what,
        migration=getattr(event, "migration", None),
        code=event.policy if isinstance(event, MoveDecided) else getattr(event, "code", None),
        reason=getattr(event, "reason", None),
    )
