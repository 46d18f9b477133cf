"""The file that a process keeps fresh while it is well, and its check. Light: container engines run it all the time."""

from __future__ import annotations

import http.client
import os
import time
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from midstream.control.errors import MidstreamError

GOOD_S: Final = 5.0
"""A loop that has not turned for so long is not well."""
ASK_S: Final = 3.0
HEALTH_PATHS: Final = {"gateway": "/health", "admin": "/api/v1/health"}
"""The services that are also asked over HTTP."""


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


def check(path: Path) -> Beat:
    """The last beat of a process that is well. Raises `MidstreamError` with the reason if it is not."""
    try:
        said = msgspec.json.decode(path.read_bytes(), type=Beat)
    except FileNotFoundError:
        raise MidstreamError(f"nothing serves here yet, or any more: there is no {path}") from None
    except (OSError, msgspec.DecodeError) as error:
        raise MidstreamError(f"{path} cannot be read: {error}") from None
    late_s = time.monotonic() - said.good_until_s
    if not is_alive(said.pid):
        raise MidstreamError(f"{said.service} {said.name} is gone: there is no process {said.pid}")
    if late_s > 0:
        raise MidstreamError(f"{said.service} {said.name} should have been heard {late_s:.0f} s ago")
    if said.service in HEALTH_PATHS and said.address is not None:
        _ask(said.address, HEALTH_PATHS[said.service])
    return said


def is_alive(pid: int) -> bool:
    """Whether there is such a process, whoever owns it."""
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
