"""How many bytes a second leave one instance, over all its moves: copies share memory and network with decoding."""

from __future__ import annotations

import asyncio
from typing import Final

SHARED_FRAME_BYTES: Final = 4 * 1024 * 1024
"""Moves that share a budget take turns of so many bytes."""


class Budget:
    """Frames pass one after the other, in the order of asking, so moves share what there is evenly."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        """None: as many as can."""
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._turn = asyncio.Lock()

    def frame_bytes_max(self, most: int) -> int:
        """How long frames may be, which otherwise have at most `most` bytes."""
        return most if self._bytes_per_s is None else min(most, SHARED_FRAME_BYTES)

    async def take(self, count: int) -> None:
        """Wait until `count` more bytes may leave. Cancelled: they do not count."""
        if self._bytes_per_s is None:
            return
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(max(0.0, self._free_at_s - loop.time()))
            self._free_at_s = max(self._free_at_s, loop.time()) + count / self._bytes_per_s
