"""Supervised tasks: an unexpected end is a fact and a log line, then a restart with backoff; never silence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from midstream.control.events import TaskFailed
from midstream.control.ports import Recorder

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
CANCEL_AGAIN_S = 0.5

logger = structlog.get_logger(__name__)


class Supervisor:
    """Owns the tasks of one process part.

    `loop` keeps a service coroutine alive until `stop`; `spawn` runs one piece of work whose failure is
    reported but not repeated.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._tasks: set[asyncio.Task[None]] = set()

    def loop(self, name: str, run: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run `run()` again and again: at once when it returns, after a backoff when it raises."""
        return self._start(name, self._keep(name, run))

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run one coroutine to its end."""
        task = self._start(name, self._once(name, work))
        task.add_done_callback(lambda _: work.close())  # a task that was cancelled before it began never awaited it
        return task

    async def stop(self) -> None:
        """Cancel everything and wait until it is gone.

        Until it is, cancel again: Python 3.11's `wait_for`, which redis-py sends commands with, loses a cancellation
        that comes just when what it waits for is done.
        """
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            gone, _ = await asyncio.wait(tasks, timeout=CANCEL_AGAIN_S)
            self._tasks.difference_update(gone)

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        backoff = BACKOFF_FIRST_S
        while True:
            started = asyncio.get_running_loop().time()
            try:
                await run()
                await asyncio.sleep(0)
                continue
            except Exception as error:  # noqa: BLE001 - the one place where any failure becomes a fact
                self._report(name, error)
            if asyncio.get_running_loop().time() - started > 10 * BACKOFF_MAX_S:
                backoff = BACKOFF_FIRST_S
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, BACKOFF_MAX_S)

    async def _once(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - as above
            self._report(name, error)

    def _report(self, name: str, error: Exception) -> None:
        self._recorder.record(TaskFailed(task=name, error=f"{type(error).__name__}: {error}"[:300]))
        logger.error("task failed", task=name, error=repr(error), exc_info=error)
