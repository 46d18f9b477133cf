"""How a process shows that it is well: a file that its own loop keeps fresh, and the check that reads it.

Container health checks run `check` (as `midstream health`) beside the process. No port and no Redis is needed for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
import structlog

from midstream.control.errors import BadInput, MidstreamError

BEAT_S: Final = 1.0
GOOD_S: Final = 5.0
"""A loop that has not turned for so long is not well."""
ASK_S: Final = 3.0
HEALTH_PATHS: Final = {"gateway": "/health", "admin": "/api/v1/health"}
"""The services that are also asked over HTTP."""

logger = structlog.get_logger(__name__)


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says."""

    service: str
    name: str
    pid: int
    address: str | None
    good_until_s: float
    """By the machine's monotonic clock, which all its processes share."""


def beat(path: Path, service: str, name: str, address: str | None = None, *, good_s: float = GOOD_S) -> None:
    """Say that all is well for the next `good_s` seconds. Raises `OSError`."""
    until_s = time.monotonic() + good_s
    said = Beat(service=service, name=name, pid=os.getpid(), address=address, good_until_s=until_s)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_bytes(msgspec.json.encode(said))
    fresh.replace(path)


def end(path: Path) -> None:
    """Nothing serves here any more."""
    path.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def beating(path: Path | None, service: str, name: str, address: str | None) -> AsyncIterator[None]:
    """Beat while inside, from this event loop. Raises `BadInput` if the file cannot be written."""
    if path is None:
        yield
        return
    try:
        beat(path, service, name, address)
    except OSError as error:
        raise BadInput(f"cannot write health_file {path}: {error.strerror}") from None
    task = asyncio.create_task(_keep_beating(path, service, name, address), name="heartbeat")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        end(path)


async def _keep_beating(path: Path, service: str, name: str, address: str | None) -> None:
    while True:
        await asyncio.sleep(BEAT_S)
        try:
            beat(path, service, name, address)
        except OSError as error:
            logger.warning("cannot write health_file", path=str(path), error=str(error))


def check(path: Path) -> Beat:
    """The last beat of a process that is well. Raises `MidstreamError` with the reason if it is not."""
    try:
        said = msgspec.json.decode(path.read_bytes(), type=Beat)
    except FileNotFoundError:
        raise MidstreamError(f"nothing serves here yet, or any more: there is no {path}") from None
    except (OSError, msgspec.DecodeError) as error:
        raise MidstreamError(f"{path} cannot be read: {error}") from None
    late_s = time.monotonic() - said.good_until_s
    if not _is_alive(said.pid):
        raise MidstreamError(f"{said.service} {said.name} is gone: there is no process {said.pid}")
    if late_s > 0:
        raise MidstreamError(f"{said.service} {said.name} should have been heard {late_s:.0f} s ago")
    if said.service in HEALTH_PATHS and said.address is not None:
        _ask(said.address, HEALTH_PATHS[said.service])
    return said


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _ask(url: str, path: str) -> None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ASK_S)
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise MidstreamError(f"{url}{path} does not answer: {error}") from None
    finally:
        connection.close()
    if status != http.client.OK:
        raise MidstreamError(f"{url}{path} answers {status}")
