"""Operations and replays: what was ordered, how far it is, what came out."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter

from midstream.api.admin.deps import Deps, Job, Reader, Replayer
from midstream.api.admin.judge import require_json
from midstream.api.admin.models import Accepted, OperationBody, OperationPage, ReplayOrder
from midstream.api.admin.orders import IdempotencyKey, Orders, accepted, operation_id
from midstream.api.admin.paging import LIMIT, Cursor, Limit, page
from midstream.api.admin.parts import OrdersOf
from midstream.api.problems import Problem
from midstream.control.errors import BadInput, UnknownThing
from midstream.control.replay import check_overrides

router: Final = APIRouter()


@router.get("/operations")
async def list_operations(_: Reader, orders: OrdersOf, cursor: Cursor = None, limit: Limit = LIMIT) -> OperationPage:
    """Orders of moves and drains, newest first."""
    shown, following = page(
        "operations",
        orders.all(),
        lambda view: (view.at_ms, view.operation),
        cursor=cursor,
        limit=limit,
        newest_first=True,
    )
    return OperationPage(items=[OperationBody.of(view) for view in shown], next=following)


@router.get("/operations/{operation}")
async def get_operation(operation: str, _: Reader, deps: Deps, orders: OrdersOf) -> OperationBody:
    """One order: a move, a drain, or a slow job."""
    view = orders.find(operation)
    return OperationBody.of(view) if view is not None else _job_body(await _job(deps, operation))


@router.post("/replays", status_code=202)
async def create_replay(
    body: ReplayOrder, caller: Replayer, deps: Deps, orders: OrdersOf, key: IdempotencyKey
) -> Accepted:
    """Decide every archived tick again and compare, with some parameters of policies changed if asked."""
    operation = operation_id(caller, key)
    _refuse_other_use(orders, operation)
    require_json(body.overrides)
    try:
        check_overrides(body.overrides)
    except BadInput as error:
        raise Problem(422, "bad_override", str(error)) from error
    job = await deps.jobs.enqueue_replay(operation, body.overrides, caller.name)
    if _overrides(job) != body.overrides:
        raise Problem(409, "idempotency_key_reused", "this key was used for a replay with other overrides")
    return accepted(job.id)


@router.get("/replays/{replay}")
async def get_replay(replay: str, _: Reader, deps: Deps) -> OperationBody:
    """How far a replay is, and its result."""
    job = await _job(deps, replay)
    if job.kind != "replay":
        raise Problem(404, "unknown_replay", f"{replay[:64]!r} is no replay")
    return _job_body(job)


def _refuse_other_use(orders: Orders, operation: str) -> None:
    if known := orders.find(operation):
        raise Problem(409, "idempotency_key_reused", f"this key was used for {known.kind} of {known.subject}")


async def _job(deps: Deps, operation: str) -> Job:
    try:
        return await deps.jobs.operation(operation)
    except UnknownThing as error:
        raise Problem(404, "unknown_operation", f"there is no operation {operation[:64]!r}") from error


def _overrides(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = job.params.get("overrides") or {}
    return found


def _job_body(job: Job) -> OperationBody:
    return OperationBody(
        operation=job.id,
        kind=job.kind,
        actor=str(job.params.get("actor", "")),
        subject="archive",
        status=job.status,
        detail=job.error,
        at_ms=job.created_at_ms,
        progress=job.progress,
        result=job.result,
    )
