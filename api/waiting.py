"""Waiting for Redis and SQL at the start, however long they take: parts of a cluster come up in any order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from midstream.control.errors import ArchiveUnavailable, LogUnavailable

POLL_FIRST_S: Final = 0.1
POLL_MAX_S: Final = 1.0

T = TypeVar("T")


async def until_there(ask: Callable[[], Awaitable[T]], limit_s: float, tell: Callable[[str], None]) -> T:
    """Ask until there is an answer, and return it; `tell` hears each new reason for waiting once.

    `limit_s` of 0 is no limit; else raises `LogUnavailable` or `ArchiveUnavailable` after so long.
    """
    now = asyncio.get_running_loop().time
    deadline = now() + limit_s
    told, poll_s = "", POLL_FIRST_S
    while True:
        try:
            return await ask()
        except (LogUnavailable, ArchiveUnavailable) as error:
            if limit_s and now() > deadline:
                raise
            if str(error) != told:
                told = str(error)
                tell(told)
        await asyncio.sleep(poll_s)
        poll_s = min(2 * poll_s, POLL_MAX_S)
