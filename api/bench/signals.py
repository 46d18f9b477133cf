"""A benchmark that is told to end takes what it booted along."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

from midstream.control.errors import MidstreamError


@contextlib.contextmanager
def ended_by_signal() -> Iterator[None]:
    """SIGTERM cancels the task within, as Ctrl-C does. Raises `MidstreamError` once it has ended."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    except asyncio.CancelledError:
        raise MidstreamError("ended by a signal before everything was measured") from None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
