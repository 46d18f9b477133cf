"""Runs a cluster until somebody ends it: the first signal in good order, the second at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager

from midstream.api.cli.output import say
from midstream.api.cli.up.cluster import LocalCluster


async def until_signal(opened: AbstractAsyncContextManager[LocalCluster], ready: Callable[[LocalCluster], None]) -> int:
    """Enter, call `ready`, leave on SIGINT or SIGTERM; return the exit code.

    While it still starts, a second signal changes nothing: each start ends within its own deadline.
    """
    task = asyncio.current_task()
    assert task is not None
    clusters: list[LocalCluster] = []
    with _signals(task, clusters):
        try:
            async with opened as cluster:
                clusters.append(cluster)
                ready(cluster)
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            say("all processes have ended")
    return 0


@contextlib.contextmanager
def _signals(task: asyncio.Task[int], clusters: list[LocalCluster]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if not asked:
            asked = True
            say("stopping ...")
            task.cancel()
        elif clusters:
            for cluster in clusters:
                cluster.kill()
            os._exit(1)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
