"""How many bytes a second leave one instance, over all its moves: copies share memory and network with decoding."""

from __future__ import annotations

import asyncio


class Budget:
    """Frames pass one after the other, in the order of asking, so moves share what there is evenly."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        """None: as many as can."""
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    async def take(self, count: int) -> None:
        """Wait until `count` more bytes may leave."""
        if self._bytes_per_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        start_s = max(now_s, self._free_at_s)
        self._free_at_s = start_s + count / self._bytes_per_s
        if start_s > now_s:
            await asyncio.sleep(start_s - now_s)
