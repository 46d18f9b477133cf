"""Slow jobs as rows: what was asked, how far it is, what came out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from sqlalchemy import Executable, select, update
from sqlalchemy.dialects import postgresql, sqlite

from midstream.control.adapters.archive_rows import check_count
from midstream.control.adapters.sql_engine import make_engine, transaction
from midstream.control.adapters.sql_schema import operations
from midstream.control.errors import UnknownThing

ENDED: Final = ("succeeded", "failed")
ERROR_CHARS_MAX: Final = 1_000


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One slow job. `status` is `accepted running succeeded failed`, `progress` 0 to 1."""

    id: str
    kind: str
    params: dict[str, Any]
    status: str
    progress: float
    result: dict[str, Any] | None
    error: str | None
    created_at_ms: int
    updated_at_ms: int


class OperationStore:
    """Operations in SQL. An operation ends once: what is written after its end changes nothing."""

    def __init__(self, url: str) -> None:
        """Connects at the first call. Raises `BadInput` for a bad URL."""
        self.engine = make_engine(url)

    def close(self) -> None:
        """Give up connections."""
        self.engine.dispose()

    def open(self, id: str, kind: str, params: Mapping[str, Any], now_ms: int) -> Operation:
        """Accept an operation; a known id gives the operation that has it."""
        insert = postgresql.insert if self.engine.dialect.name == "postgresql" else sqlite.insert
        row = {"id": id, "kind": kind, "params": json.dumps(dict(params)), "status": "accepted", "progress": 0.0}
        times = {"created_at_ms": now_ms, "updated_at_ms": now_ms}
        self._write(insert(operations).values(row | times).on_conflict_do_nothing())
        return self.get(id)

    def get(self, id: str) -> Operation:
        """Raises `UnknownThing`."""
        with transaction(self.engine) as connection:
            row = connection.execute(select(operations).where(operations.c.id == id)).first()
        if row is None:
            raise UnknownThing(f"no operation {id!r}")
        return _operation(row._asdict())

    def list(self, count: int = 100, *, after: str | None = None) -> list[Operation]:
        """Newest first; `after` is the id of the last one of the page before. Raises `UnknownThing` for a bad one."""
        check_count(count)
        query = select(operations).order_by(operations.c.created_at_ms.desc(), operations.c.id.desc()).limit(count)
        if after is not None:
            last = self.get(after)
            at = operations.c.created_at_ms
            query = query.where((at < last.created_at_ms) | ((at == last.created_at_ms) & (operations.c.id < last.id)))
        with transaction(self.engine) as connection:
            return [_operation(row._asdict()) for row in connection.execute(query)]

    def report(self, id: str, progress: float, now_ms: int) -> None:
        """It runs, and is so far."""
        self._change(id, now_ms, status="running", progress=progress)

    def succeed(self, id: str, result: Mapping[str, Any], now_ms: int) -> None:
        """It ended well."""
        self._change(id, now_ms, status="succeeded", progress=1.0, result=json.dumps(dict(result)))

    def fail(self, id: str, error: str, now_ms: int) -> None:
        """It ended badly."""
        self._change(id, now_ms, status="failed", error=error[:ERROR_CHARS_MAX])

    def _change(self, id: str, now_ms: int, **values: Any) -> None:
        is_open = operations.c.status.not_in(ENDED)
        self._write(update(operations).where(operations.c.id == id, is_open).values(updated_at_ms=now_ms, **values))

    def _write(self, statement: Executable) -> None:
        with transaction(self.engine, writes=True) as connection:
            connection.execute(statement)


def _operation(row: Mapping[str, Any]) -> Operation:
    values = dict(row)
    values["params"] = json.loads(values["params"])
    values["result"] = None if values["result"] is None else json.loads(values["result"])
    return Operation(**values)
