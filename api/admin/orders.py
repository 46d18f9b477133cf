"""Orders that become facts: the same caller with the same `Idempotency-Key` gives one fact and one operation."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Final

from fastapi import Header

from midstream.api.admin.deps import AdminDeps
from midstream.api.admin.models import Accepted
from midstream.api.auth import Caller
from midstream.api.problems import Problem
from midstream.control.events import Event
from midstream.control.state import OperationView, State

ORDERS_MAX: Final = 10_000
"""Orders this process remembers besides those in the state."""

SEEN_S: Final = 0.5
"""An answer waits so long for its own fact to come back with the log, so that callers read what they wrote."""

API: Final = "/api/v1"

IdempotencyKey = Annotated[
    str,
    Header(alias="Idempotency-Key", min_length=1, max_length=128, description="The same key again is the same order."),
]

CONFLICTS: Final = {"move": "already_moving", "drain": "already_draining", "undrain": "not_draining"}


class Orders:
    """Accepts orders on one process; what it has accepted and the fold does not show yet is remembered here."""

    def __init__(self, deps: AdminDeps) -> None:
        self._deps = deps
        self._accepted: OrderedDict[str, OperationView] = OrderedDict()

    def find(self, operation: str) -> OperationView | None:
        """An order, whether the fold shows it already or not."""
        return self._state.operations.get(operation) or self._accepted.get(operation)

    def all(self) -> list[OperationView]:
        """Every order in the state, and those on their way into it."""
        waiting = [view for name, view in self._accepted.items() if name not in self._state.operations]
        return [*self._state.operations.values(), *waiting]

    async def submit(
        self, order: OperationView, judge: Callable[[State], None], event: Callable[[], Event]
    ) -> Accepted:
        """Take an order or raise `Problem`: judged and recorded in one step of the event loop."""
        known = self.find(order.operation)
        if known is not None:
            refuse_other(known, order)
        else:
            judge(self._state)
            self._refuse_pending(order)
            self._remember(order)
            self._deps.recorder.record(event())
            await self._seen(order.operation)
        return accepted(order.operation)

    @property
    def _state(self) -> State:
        return self._deps.follower.state

    def _refuse_pending(self, order: OperationView) -> None:
        """The same order under another key, which the fold does not show yet."""
        for name in reversed(self._accepted):
            other = self._accepted[name]
            if name in self._state.operations:
                continue
            if (other.kind, other.subject) == (order.kind, order.subject):
                raise Problem(409, CONFLICTS[order.kind], f"{order.kind} of {order.subject} was just ordered")

    def _remember(self, order: OperationView) -> None:
        self._accepted[order.operation] = order
        if len(self._accepted) > ORDERS_MAX:
            self._accepted.popitem(last=False)

    async def _seen(self, operation: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SEEN_S):
                while operation not in self._state.operations:
                    await self._deps.follower.changed()


def operation_id(caller: Caller, key: str) -> str:
    """Derived, so that every replica of the API gives an order the same id."""
    return "op-" + hashlib.blake2b(f"{caller.name}\0{key}".encode(), digest_size=10).hexdigest()


def accepted(operation: str) -> Accepted:
    """The answer to an order."""
    return Accepted(operation=operation, href=f"{API}/operations/{operation}")


def refuse_other(known: OperationView, order: OperationView) -> None:
    """Raises `Problem` 409 if a key is used again for something else."""
    if (known.kind, known.subject, known.target, known.mode) != (order.kind, order.subject, order.target, order.mode):
        raise Problem(409, "idempotency_key_reused", f"this key was used for {known.kind} of {known.subject}")
