"""Slow jobs for the admin API: an operation in the archive, run by whichever worker takes it from the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from midstream.control.adapters.sql import SqlArchive
from midstream.control.adapters.sql_operations import Operation
from midstream.control.jobs import REPLAY, JobQueue
from midstream.control.ports import Clock


class QueuedJobs:
    """`api.admin.deps.Jobs` on the archive's operations and the rq queue."""

    def __init__(self, archive: SqlArchive, queue: JobQueue, clock: Clock) -> None:
        self._archive = archive
        self._queue = queue
        self._clock = clock

    async def enqueue_replay(self, operation: str, overrides: Mapping[str, Any], actor: str) -> Operation:
        """See `Jobs.enqueue_replay`. The operation is there before the job: a worker finds it whenever it looks."""
        params = {"overrides": dict(overrides), "actor": actor}
        accepted = await self._archive.open_operation(operation, REPLAY, params, self._clock.now_ms())
        if accepted.status == "accepted":
            known = accepted.params["overrides"]
            await asyncio.to_thread(lambda: self._queue.enqueue_replay(operation, overrides=known))
        return accepted

    async def operation(self, id: str) -> Operation:
        """See `Jobs.operation`."""
        return await self._archive.operation(id)
