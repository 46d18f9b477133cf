"""The archive in SQL for asyncio: one writer thread and a few readers, each behind a bounded queue.

Synchronous SQLAlchemy in threads of our own, because aiosqlite hangs under cancelled tasks (rules R7).
A cancelled call may still take effect (R8); every write here may be repeated.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from midstream.control.adapters.sql_operations import Operation, OperationStore
from midstream.control.adapters.sql_store import ArchiveStore
from midstream.control.errors import ArchiveUnavailable
from midstream.control.events import Entry
from midstream.control.ids import Position
from midstream.control.ports import Hole
from midstream.control.state import SourceMark, State

QUEUE_MAX: Final = 256
"""Calls that may wait for a thread; more are refused."""

READERS: Final = 2

T = TypeVar("T")
Work = tuple[Callable[[], Any], "Future[Any]"]


class SqlArchive:
    """Implements `Archive` on SQLite or PostgreSQL, and gives access to operations."""

    def __init__(self, url: str) -> None:
        """Connects at the first call. Raises `BadInput` for a bad URL."""
        self._store = ArchiveStore(url)
        self.operation_store = OperationStore(url)
        """The same operations, for synchronous callers."""
        self._writer = Lane("archive-writer", 1)
        self._readers = Lane("archive-reader", READERS)

    async def store(self, entries: Sequence[Entry]) -> None:
        """See `Archive.store`."""
        await self._writer.call(lambda: self._store.store(entries))

    async def position(self) -> Position:
        """See `Archive.position`."""
        return await self._readers.call(self._store.position)

    async def read(
        self,
        after: Position,
        count: int = 500,
        *,
        kind: str | None = None,
        request: str | None = None,
        migration: str | None = None,
        instance: str | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
    ) -> list[Entry]:
        """See `Archive.read`."""
        return await self._readers.call(
            lambda: self._store.read(
                after, count, kind=kind, request=request, migration=migration, instance=instance,
                since_ms=since_ms, until_ms=until_ms,
            )
        )  # fmt: skip

    async def history(self, after: Position, count: int = 500, *, upto: Position | None = None) -> list[Entry]:
        """See `Archive.history`."""
        return await self._readers.call(lambda: self._store.history(after, count, upto=upto))

    async def holes(self) -> list[Hole]:
        """See `Archive.holes`."""
        return await self._readers.call(self._store.holes)

    async def marks(self) -> dict[str, SourceMark]:
        """See `Archive.marks`."""
        return await self._readers.call(self._store.marks)

    async def counts(self) -> dict[str, int]:
        """See `Archive.counts`."""
        return await self._readers.call(self._store.counts)

    async def story(self, request: str) -> list[Entry]:
        """See `Archive.story`."""
        return await self._readers.call(lambda: self._store.story(request))

    async def state_at(self, position: Position) -> State:
        """See `Archive.state_at`."""
        return await self._readers.call(lambda: self._store.state_at(position))

    async def position_at(self, at_ms: int) -> Position:
        """See `Archive.position_at`."""
        return await self._readers.call(lambda: self._store.position_at(at_ms))

    async def save_snapshot(self, position: Position, state: bytes) -> None:
        """See `Archive.save_snapshot`."""
        await self._writer.call(lambda: self._store.save_snapshot(position, state))

    async def open_operation(self, id: str, kind: str, params: Mapping[str, Any], now_ms: int) -> Operation:
        """Accept a slow job; a known id gives the operation that has it."""
        return await self._writer.call(lambda: self.operation_store.open(id, kind, params, now_ms))

    async def operation(self, id: str) -> Operation:
        """Raises `UnknownThing`."""
        return await self._readers.call(lambda: self.operation_store.get(id))

    async def operations(self, count: int = 100, *, after: str | None = None) -> list[Operation]:
        """Slow jobs, newest first."""
        return await self._readers.call(lambda: self.operation_store.list(count, after=after))

    async def close(self) -> None:
        """See `Archive.close`."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._writer.close()
        self._readers.close()
        self._store.close()
        self.operation_store.close()


class Lane:
    """A bounded queue and the threads that serve it."""

    def __init__(self, name: str, threads: int) -> None:
        self._queue: queue.Queue[Work | None] = queue.Queue(QUEUE_MAX)
        self._is_closed = False
        self._threads = [threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread. Raises `ArchiveUnavailable` when too much waits already, or when it was closed."""
        if self._is_closed:
            raise ArchiveUnavailable("the archive was closed")
        future: Future[T] = Future()
        try:
            self._queue.put_nowait((work, future))
        except queue.Full:
            raise ArchiveUnavailable(f"{QUEUE_MAX} calls wait for the database") from None
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Finish what is queued and end the threads. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            work, future = item
            if future.set_running_or_notify_cancel():
                _settle(work, future)


def _settle(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - it is raised again where the call is awaited
        future.set_exception(error)
