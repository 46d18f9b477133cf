"""How every process lives: logging, readiness, signals, and its tie to the process that started it.

A service is an async context manager that yields `Running`. Entered, it serves; left, it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from midstream.api import event_loop
from midstream.api.heartbeat import beating
from midstream.control.errors import MidstreamError

STOP_LIMIT_S = 12.0
"""A service that has not ended so long after the first signal is ended hard."""
PR_SET_PDEATHSIG = 1
TASK_CHARS_MAX = 200
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

logger = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Running:
    """A service that serves. `failed` returns a reason only if the service can no longer do so."""

    address: str | None = None
    failed: Callable[[], Awaitable[str]] | None = None


Service = Callable[[], AbstractAsyncContextManager[Running]]


def run_service(kind: str, name: str, service: Service, health_file: Path | None = None) -> int:
    """Run a service until SIGTERM, SIGINT or its failure; return the exit code.

    Prints one JSON line on stdout when it serves. The first signal stops it in good order, a second one, or
    `STOP_LIMIT_S` after the first, at once. Errors of the start are raised to the caller. While it serves,
    `health_file` is kept fresh.
    """
    try:
        return event_loop.run(_serve(kind, name, service, health_file))
    except asyncio.CancelledError:
        return 0


async def _serve(kind: str, name: str, service: Service, health_file: Path | None) -> int:
    stop = asyncio.Event()
    with _signals(stop):
        opened = service()
        running = await _unless(stop, opened.__aenter__())
        _keep_out_of_collections()
        async with beating(health_file, kind, name, running.address):
            announce(kind, name, running.address)
            failure = await _wait(stop, running)
            await opened.__aexit__(None, None, None)
    if failure is not None:
        logger.error("service failed", service=kind, name=name, reason=failure)
        return 1
    return 0


def _keep_out_of_collections() -> None:
    """What the start made lives as long as the process: a later full collection would look through it for tens of
    milliseconds, in the middle of a stream or a move (P15).
    """
    gc.collect()
    gc.freeze()


def announce(kind: str, name: str, address: str | None) -> None:
    """The one line on stdout that says that a process serves."""
    print(json.dumps({"ready": True, "service": kind, "name": name, "address": address}), flush=True)  # noqa: T201


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()
        loop.call_later(STOP_LIMIT_S, _give_up)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _give_up() -> None:
    """Say what did not end, then end hard."""
    tasks = sorted(f"{task.get_name()}: {task.get_coro()!r}"[:TASK_CHARS_MAX] for task in asyncio.all_tasks())
    logger.error("did not stop in time", limit_s=STOP_LIMIT_S, tasks=tasks)
    os._exit(1)


async def _unless(stop: asyncio.Event, starting: Awaitable[Running]) -> Running:
    """Wait for a start, or give it up when asked to stop."""
    start = asyncio.ensure_future(starting)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({start, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not start.done():
        start.cancel()
    return await start


async def _wait(stop: asyncio.Event, running: Running) -> str | None:
    stopping = asyncio.ensure_future(stop.wait())
    if running.failed is None:
        await stopping
        return None
    failing = asyncio.ensure_future(running.failed())
    await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    if failing.done():
        stopping.cancel()
        return await failing
    failing.cancel()
    return None


def configure_logging(level: str, style: str) -> None:
    """Send structlog and the standard library's logging to stderr, one line each."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    tail: list[Any] = [
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
    ]
    if style == "json":
        transform = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        tail = [structlog.processors.ExceptionRenderer(transform), structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, *tail],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[strip, *tail]))
    logging.basicConfig(handlers=[handler], level=max(_LEVELS[level], logging.WARNING), force=True)


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the process that started this one dies (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            raise MidstreamError("the process that started this one is gone")
