"""The stateful parts of one admin API, made by its factory and handed to its routes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import Depends
from starlette.requests import Request

from midstream.api.admin.deps import AdminDeps
from midstream.api.admin.events import StreamCount
from midstream.api.admin.orders import Orders
from midstream.api.admin.policies import Policies
from midstream.api.closing import Closing


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What lives as long as the app."""

    orders: Orders
    policies: Policies
    streams: StreamCount
    closing: Closing


def make_parts(deps: AdminDeps, closing: Closing) -> Parts:
    """Fresh parts."""
    return Parts(
        orders=Orders(deps), policies=Policies(deps), streams=StreamCount(deps.settings.streams_max), closing=closing
    )


async def _parts(request: Request) -> Parts:
    parts: Parts = request.app.state.parts
    return parts


async def _orders(request: Request) -> Orders:
    return (await _parts(request)).orders


async def _policies(request: Request) -> Policies:
    return (await _parts(request)).policies


PartsOf = Annotated[Parts, Depends(_parts)]
OrdersOf = Annotated[Orders, Depends(_orders)]
PoliciesOf = Annotated[Policies, Depends(_policies)]
