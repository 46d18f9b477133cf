"""Instances, drains, state, policies, health."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Header, Query, Response

from midstream.api.admin.deps import Admin, AdminDeps, Deps, Mover, Reader
from midstream.api.admin.events import position_of
from midstream.api.admin.judge import find_instance, judge_drain, judge_undrain
from midstream.api.admin.models import (
    Accepted,
    HealthBody,
    InstanceBody,
    InstancePage,
    PolicySettingsBody,
    StateBody,
)
from midstream.api.admin.orders import IdempotencyKey, operation_id
from midstream.api.admin.paging import LIMIT, Cursor, Limit, page
from midstream.api.admin.parts import OrdersOf, PoliciesOf
from midstream.api.admin.policies import etag_of
from midstream.api.auth import Caller
from midstream.control.codec import digest, encode_state
from midstream.control.events import DrainCancelled, DrainRequested
from midstream.control.state import InstanceView, OperationView, State

router: Final = APIRouter()
open_router: Final = APIRouter()


def _body(state: State, view: InstanceView) -> InstanceBody:
    return InstanceBody.of(view, len(state.placed.get(view.owner.instance, {})))


@router.get("/instances")
async def list_instances(_: Reader, deps: Deps, cursor: Cursor = None, limit: Limit = LIMIT) -> InstancePage:
    """All instances, by name."""
    state = deps.follower.state
    shown, following = page(
        "instances", state.instances.values(), lambda view: (view.owner.instance,), cursor=cursor, limit=limit
    )
    return InstancePage(items=[_body(state, view) for view in shown], next=following)


@router.get("/instances/{instance}")
async def get_instance(instance: str, _: Reader, deps: Deps) -> InstanceBody:
    """One instance."""
    return _body(deps.follower.state, find_instance(deps.follower.state, instance))


@router.post("/instances/{instance}/drain", status_code=202)
async def drain(instance: str, caller: Mover, deps: Deps, orders: OrdersOf, key: IdempotencyKey) -> Accepted:
    """Move everything off an instance; it takes nothing new from now on."""
    order = _order("drain", instance, caller, key, deps)
    fact = DrainRequested(operation=order.operation, instance=instance, actor=caller.name)
    return await orders.submit(order, lambda state: judge_drain(state, instance), lambda: fact)


@router.post("/instances/{instance}/undrain", status_code=202)
async def undrain(instance: str, caller: Mover, deps: Deps, orders: OrdersOf, key: IdempotencyKey) -> Accepted:
    """Let a draining or drained instance take requests again."""
    order = _order("undrain", instance, caller, key, deps)
    fact = DrainCancelled(operation=order.operation, instance=instance, actor=caller.name)
    return await orders.submit(order, lambda state: judge_undrain(state, instance), lambda: fact)


@router.get("/state", responses={200: {"model": StateBody}})
async def get_state(
    _: Reader,
    deps: Deps,
    at: Annotated[str | None, Query(description="A position, `1764579000123-17`; now if absent.")] = None,
) -> Response:
    """The fold of the log, now or as it was at a position (at the archive's end, if that comes first)."""
    state = deps.follower.state if at is None else await deps.archive.state_at(position_of(at, "at"))
    encoded = encode_state(state)
    head = msgspec.json.encode({"position": str(state.position), "digest": digest(encoded)})
    return Response(head[:-1] + b',"state":' + encoded + b"}", media_type="application/json")


@router.get("/policies")
async def get_policies(_: Reader, deps: Deps, response: Response) -> PolicySettingsBody:
    """The policies in force; the ETag names this version of them."""
    response.headers["ETag"] = etag_of(deps.follower.state.policies)
    return PolicySettingsBody.model_validate(deps.follower.state.policies)


@router.put("/policies")
async def put_policies(
    body: PolicySettingsBody,
    caller: Admin,
    policies: PoliciesOf,
    response: Response,
    if_match: Annotated[str | None, Header(alias="If-Match", description="The ETag that is to be replaced.")] = None,
) -> PolicySettingsBody:
    """Put other policies in force; with `If-Match` only if nobody else did meanwhile."""
    settings = await policies.configure(body, caller, if_match)
    response.headers["ETag"] = etag_of(settings)
    return PolicySettingsBody.model_validate(settings)


@open_router.get("/health")
async def health(deps: Deps) -> HealthBody:
    """Whether the API serves. Needs no key."""
    return HealthBody.model_validate({"status": "ok", "position": deps.follower.state.position})


def _order(kind: str, instance: str, caller: Caller, key: str, deps: AdminDeps) -> OperationView:
    return OperationView(
        operation=operation_id(caller, key),
        kind=kind,
        actor=caller.name,
        subject=instance,
        at_ms=deps.clock.now_ms(),
    )
