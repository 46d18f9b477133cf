"""Requests and their stories, moves, facts."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Header, Query, Response

from midstream.api.admin.deps import Deps, Mover, Reader
from midstream.api.admin.events import EventStream, Filters, check_kind, event_body, page_bytes, position_of, read
from midstream.api.admin.explain import ENDS, NOT_SENT, move_explanation, request_explanation
from midstream.api.admin.explain_models import MoveExplanationBody, RequestExplanationBody
from midstream.api.admin.judge import judge_move
from midstream.api.admin.models import (
    Accepted,
    EventBody,
    EventPage,
    MigrationBody,
    MigrationPage,
    MoveOrder,
    RequestBody,
    RequestDetail,
    RequestPage,
)
from midstream.api.admin.orders import IdempotencyKey, operation_id
from midstream.api.admin.paging import LIMIT, Cursor, Limit, page
from midstream.api.admin.parts import OrdersOf, PartsOf
from midstream.api.closing import LiveResponse
from midstream.api.problems import Problem
from midstream.control.events import Entry, MoveRequested
from midstream.control.fold import fold
from midstream.control.ids import START
from midstream.control.state import MigrationView, OperationView, RequestView

router: Final = APIRouter()

MOVE_FACTS_MAX: Final = 500

Only = Annotated[str | None, Query(max_length=256)]


@router.get("/requests")
async def list_requests(
    _: Reader, deps: Deps, instance: Only = None, gateway: Only = None, cursor: Cursor = None, limit: Limit = LIMIT
) -> RequestPage:
    """Live requests, by id."""
    state = deps.follower.state
    names = state.requests if instance is None else state.placed.get(instance, {})
    views = (state.requests[name] for name in names)
    wanted = (view for view in views if gateway in (None, view.gateway))
    shown, following = page("requests", wanted, lambda view: (view.request,), cursor=cursor, limit=limit)
    return RequestPage(items=[RequestBody.of(view) for view in shown], next=following)


@router.get("/requests/{request}")
async def get_request(request: str, _: Reader, deps: Deps, story: bool = False) -> RequestDetail:
    """One request, live or ended; with `story` everything that happened to it."""
    view = deps.follower.state.requests.get(request)
    entries = await deps.archive.story(request) if story or view is None else []
    if view is not None:
        found, status = view, "live"
    else:
        found, status = _ended(request, entries)
    detail = RequestDetail.model_validate(found).model_copy(update={"status": status})
    return detail.model_copy(update={"story": [event_body(entry) for entry in entries]}) if story else detail


@router.get("/requests/{request}/explain")
async def explain_request(request: str, _: Reader, deps: Deps) -> RequestExplanationBody:
    """Why a request is, or was, where it is: every dispatch with its scores, every move, every no."""
    return await request_explanation(deps, request)


@router.get("/migrations")
async def list_migrations(
    _: Reader,
    deps: Deps,
    open: bool | None = None,
    request: Only = None,
    instance: Only = None,
    policy: Only = None,
    cursor: Cursor = None,
    limit: Limit = LIMIT,
) -> MigrationPage:
    """Moves, newest first: all open ones and the last closed ones; the archive has the facts of older ones."""
    wanted = (
        view
        for view in deps.follower.state.migrations.values()
        if open in (None, view.is_open)
        and request in (None, view.request)
        and policy in (None, view.policy)
        and (instance is None or instance in (view.source.instance, view.target.instance))
    )
    shown, following = page("migrations", wanted, _move_key, cursor=cursor, limit=limit, newest_first=True)
    return MigrationPage(items=[MigrationBody.of(view) for view in shown], next=following)


@router.get("/migrations/{migration}")
async def get_migration(migration: str, _: Reader, deps: Deps) -> MigrationBody:
    """One move, however old."""
    view = deps.follower.state.migrations.get(migration)
    if view is None:
        entries = await deps.archive.read(START, MOVE_FACTS_MAX, migration=migration)
        view = fold(entries).migrations.get(migration)
    if view is None:
        raise Problem(404, "unknown_migration", f"there is no migration {migration[:64]!r}")
    return MigrationBody.of(view)


@router.get("/migrations/{migration}/explain")
async def explain_migration(migration: str, _: Reader, deps: Deps) -> MoveExplanationBody:
    """Why a move was ordered: the rule, the candidates, and what was refused and why, by deciding its tick again."""
    return await move_explanation(deps, migration)


@router.post("/migrations", status_code=202)
async def create_migration(
    body: MoveOrder, caller: Mover, deps: Deps, orders: OrdersOf, key: IdempotencyKey
) -> Accepted:
    """Move a request to an instance, or to one that the controller chooses."""
    order = OperationView(
        operation=operation_id(caller, key),
        kind="move",
        actor=caller.name,
        subject=body.request,
        target=body.target,
        mode=body.mode,
        at_ms=deps.clock.now_ms(),
    )
    fact = MoveRequested(
        operation=order.operation, request=body.request, target=body.target, actor=caller.name, mode=body.mode
    )
    return await orders.submit(order, lambda state: judge_move(state, body.request, body.target), lambda: fact)


@router.get("/events", responses={200: {"model": EventPage}})
async def list_events(
    _: Reader,
    deps: Deps,
    after: Annotated[str | None, Query(description="A position; facts behind it.")] = None,
    kind: Only = None,
    request: Only = None,
    migration: Only = None,
    instance: Only = None,
    cursor: Cursor = None,
    limit: Limit = LIMIT,
) -> Response:
    """Archived facts in log order. `next` works as `cursor` and as `after`."""
    filters = _filters(kind, request, migration, instance)
    begin = cursor or after
    entries = await read(deps, START if begin is None else position_of(begin, "after"), limit + 1, filters)
    return Response(page_bytes(entries, limit), media_type="application/json")


@router.get(
    "/events/stream",
    response_class=Response,
    responses={200: {"model": EventBody, "content": {"text/event-stream": {}}}},
)
async def stream_events(
    _: Reader,
    deps: Deps,
    parts: PartsOf,
    after: Annotated[str | None, Query(description="A position; facts behind it. New ones only if absent.")] = None,
    kind: Only = None,
    request: Only = None,
    migration: Only = None,
    instance: Only = None,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", max_length=64)] = None,
) -> Response:
    """Facts as server-sent events, for ever; `Last-Event-ID` resumes right behind that fact."""
    filters = _filters(kind, request, migration, instance)
    begin = last_event_id or after
    position = deps.follower.state.position if begin is None else position_of(begin, "after")
    parts.streams.take()
    return LiveResponse(EventStream(deps, position, filters, parts.streams), parts.closing)


def _filters(kind: str | None, request: str | None, migration: str | None, instance: str | None) -> Filters:
    check_kind(kind)
    return Filters(kind=kind, request=request, migration=migration, instance=instance)


def _move_key(view: MigrationView) -> tuple[str | int, ...]:
    return (*view.decided_at, view.migration)


def _ended(request: str, entries: list[Entry]) -> tuple[RequestView, str]:
    """An ended request as it was just before its end, and how it ended. Raises `Problem` 404."""
    status = next((ENDS[type(e.fact.event)] for e in reversed(entries) if type(e.fact.event) in ENDS), "live")
    view = fold(e for e in entries if type(e.fact.event) not in ENDS).requests.get(request)
    if view is None:
        raise Problem(404, "unknown_request", f"there is no request {request[:64]!r} {NOT_SENT}")
    return view, status
