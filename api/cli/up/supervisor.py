"""Keeps parts alive: starts them stage by stage, restarts what dies, stops all in the reverse order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from midstream.api.cli.up.parts import Part
from midstream.control.errors import MidstreamError

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
STABLE_S = 10.0
"""A part that lived so long starts again with the first backoff."""


class Supervisor:
    """Owns the parts of one cluster.

    `say` gets a line for people whenever something dies or comes back; `changed` is called after each change of
    a pid or an address.
    """

    def __init__(self, say: Callable[[str], None], changed: Callable[[], None]) -> None:
        self._say = say
        self._changed = changed
        self._stages: list[list[Part]] = []
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self.restarts: dict[str, int] = {}

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in start order."""
        return tuple(part for stage in self._stages for part in stage)

    async def start(self, *stages: Sequence[Part]) -> None:
        """Start all parts of some stages at once and keep them alive. Raises the first `MidstreamError`."""
        parts = [part for stage in stages for part in stage]
        self._stages.extend(list(stage) for stage in stages)
        results = await asyncio.gather(*(part.start() for part in parts), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self._keepers |= {part.name: asyncio.create_task(self._keep(part), name=part.name) for part in parts}
        self._changed()

    async def add(self, part: Part) -> None:
        """Start one more part and keep it alive. Raises `MidstreamError` with nothing left.

        It is of the stage of its kind, so that it stops with them; the first of a kind is a stage of its own.
        """
        stage = next((stage for stage in self._stages if any(part.kind == other.kind for other in stage)), None)
        if stage is None:
            stage = []
            self._stages.append(stage)
        stage.append(part)
        try:
            await part.start()
        except BaseException:
            self._forget(part)
            raise
        self._keepers[part.name] = asyncio.create_task(self._keep(part), name=part.name)
        self._changed()

    async def remove(self, part: Part) -> None:
        """Stop one part for good."""
        keeper = self._keepers.pop(part.name, None)
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        await part.stop()
        self._forget(part)
        self._changed()

    async def stop(self) -> None:
        """Stop everything, last stage first."""
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        self._keepers.clear()
        for stage in reversed(self._stages):
            await asyncio.gather(*(part.stop() for part in stage))
        self._stages.clear()

    def kill(self) -> None:
        """End everything now."""
        for part in self.parts:
            part.kill()

    def _forget(self, part: Part) -> None:
        self._stages = [[other for other in stage if other is not part] for stage in self._stages]

    async def _keep(self, part: Part) -> None:
        clock = asyncio.get_running_loop().time
        backoff = BACKOFF_FIRST_S
        while True:
            started = clock()
            how = await part.wait()
            if clock() - started > STABLE_S:
                backoff = BACKOFF_FIRST_S
            self._say(f"{part.name} ended ({how}); starting it again")
            backoff = await self._revive(part, backoff)

    async def _revive(self, part: Part, backoff: float) -> float:
        """Start a dead part again, however often it takes; return the next backoff."""
        while True:
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, BACKOFF_MAX_S)
            self.restarts[part.name] = self.restarts.get(part.name, 0) + 1
            try:
                await part.start()
            except MidstreamError as error:
                self._say(f"{error}; trying again in {backoff:g} s")
                continue
            self._changed()
            self._say(f"{part.name} is back (pid {part.pid})")
            return backoff
