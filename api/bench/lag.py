"""How late an event loop is: the time past which a short sleep returns."""

from __future__ import annotations

import asyncio

TICK_S = 0.001


class LagMeter:
    """Collects lags in milliseconds while it is started."""

    def __init__(self) -> None:
        self.lags_ms: list[float] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin afresh."""
        self.lags_ms = []
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> list[float]:
        """End and say what was seen."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        return self.lags_ms

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self.lags_ms.append(1e3 * max(0.0, loop.time() - due))
