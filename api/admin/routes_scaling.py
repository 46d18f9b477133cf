"""What was decided about the number of instances: what, when, why, and what came of it."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query

from midstream.api.admin.deps import Deps, Reader
from midstream.api.admin.models import ScalingBody, ScalingPage
from midstream.api.admin.paging import LIMIT, Cursor, Limit, page
from midstream.api.problems import Problem
from midstream.control.state import ScalingView

router: Final = APIRouter()

Only = Annotated[str | None, Query(max_length=256)]


@router.get("/scalings")
async def list_scalings(
    _: Reader,
    deps: Deps,
    status: Only = None,
    action: Only = None,
    instance: Only = None,
    cursor: Cursor = None,
    limit: Limit = LIMIT,
) -> ScalingPage:
    """Decisions that an instance should come, go or stay, newest first: all open ones and the last closed ones."""
    wanted = (
        view
        for view in deps.follower.state.scalings.values()
        if status in (None, view.status) and action in (None, view.action) and instance in (None, view.instance)
    )
    shown, following = page("scalings", wanted, _key, cursor=cursor, limit=limit, newest_first=True)
    return ScalingPage(items=[ScalingBody.of(view) for view in shown], next=following)


@router.get("/scalings/{scaling}")
async def get_scaling(scaling: str, _: Reader, deps: Deps) -> ScalingBody:
    """One of them."""
    view = deps.follower.state.scalings.get(scaling)
    if view is None:
        raise Problem(404, "unknown_scaling", f"there is no scaling {scaling[:64]!r}")
    return ScalingBody.of(view)


def _key(view: ScalingView) -> tuple[str | int, ...]:
    return (*view.decided_at, view.scaling)
