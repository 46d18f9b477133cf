"""How a process shows that it is well: its own event loop keeps a file fresh, which `midstream health` reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import structlog

from midstream.api.health import beat, end
from midstream.control.errors import BadInput

BEAT_S: Final = 1.0

logger = structlog.get_logger(__name__)


@contextlib.asynccontextmanager
async def beating(path: Path | None, service: str, name: str, address: str | None) -> AsyncIterator[None]:
    """Beat while inside. Raises `BadInput` if the file cannot be written."""
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
