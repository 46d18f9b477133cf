"""Orders of people and programs, as rows of the state: accepted, running, then an outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from midstream.control.events import Fact
from midstream.control.state import CLOSED_MAX, OperationView, State
from midstream.migration.plan import LIVE


def accept(
    state: State,
    fact: Fact,
    operation: str,
    *,
    kind: str,
    actor: str,
    subject: str,
    target: str | None = None,
    mode: str = LIVE,
) -> None:
    """Open an operation; one that exists already is left as it is."""
    if operation in state.operations:
        return
    state.operations[operation] = OperationView(
        operation=operation, kind=kind, actor=actor, subject=subject, target=target, mode=mode, at_ms=fact.at_ms
    )
    forget_closed(state.operations, is_operation_open)


def run(state: State, operation: str | None, migration: str) -> None:
    """The operation's move has been ordered."""
    view = state.operations.get(operation or "")
    if view is not None and is_operation_open(view):
        state.operations[view.operation] = replace(view, status="running", migration=migration)


def succeed(state: State, operation: str | None, detail: str | None = None) -> None:
    """The operation did what was asked. Overrules a failure that had been presumed."""
    view = state.operations.get(operation or "")
    if view is not None:
        state.operations[view.operation] = replace(view, status="succeeded", code=None, detail=detail)


def fail(state: State, operation: str | None, code: str | None, detail: str | None) -> None:
    """The operation, if still open, did not do what was asked."""
    view = state.operations.get(operation or "")
    if view is not None and is_operation_open(view):
        state.operations[view.operation] = replace(view, status="failed", code=code, detail=detail)


def open_drains(state: State, instance: str) -> list[str]:
    """Ids of the drain operations of an instance that have no outcome yet."""
    return [
        view.operation
        for view in state.operations.values()
        if view.kind == "drain" and view.subject == instance and is_operation_open(view)
    ]


def is_operation_open(view: OperationView) -> bool:
    """Has no outcome yet."""
    return view.status in ("accepted", "running")


def forget_closed(table: dict[str, Any], is_open: Callable[[Any], bool]) -> None:
    """Drop the oldest closed rows of a table that has outgrown `CLOSED_MAX`."""
    excess = len(table) - CLOSED_MAX
    if excess > 0:
        closed = (key for key, view in table.items() if not is_open(view))
        for key in [key for key, _ in zip(closed, range(excess), strict=False)]:
            del table[key]
