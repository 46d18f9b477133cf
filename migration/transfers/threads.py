"""Work in a thread that is never left behind: whoever is cancelled waits until the thread has let go of memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def in_thread(executor: Executor, work: Callable[[], T]) -> T:
    """Run `work`; a cancellation is felt only when it has ended, so it should be short."""
    job = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        await settled({job})
        raise


async def settled(jobs: set[asyncio.Future[T]]) -> None:
    """Return when all are done, whatever their result, even if we are cancelled meanwhile."""
    while pending := {job for job in jobs if not job.done()}:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            continue  # the one who cancels us gets his way as soon as nothing is touched any more
    for job in jobs:
        if not job.cancelled():
            job.exception()
