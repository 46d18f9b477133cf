"""Parts of a local cluster stop stage by stage, and one that came later with those of its kind."""

from __future__ import annotations

import asyncio

import pytest

from midstream.api.cli.up.supervisor import Supervisor
from midstream.control.errors import MidstreamError


class Fake:
    """A part that does nothing, and notes when it was stopped."""

    pid = None
    address = None

    def __init__(self, kind: str, name: str, stopped: list[str], *, starts: bool = True) -> None:
        self.kind = kind
        self.name = name
        self._stopped = stopped
        self._starts = starts

    async def start(self) -> None:
        if not self._starts:
            raise MidstreamError(f"{self.name} did not start")

    async def wait(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def stop(self) -> None:
        self._stopped.append(self.name)

    def kill(self) -> None:
        raise AssertionError("nobody is killed here")


def nothing(*_: object) -> None:
    """Nobody listens."""


async def test_an_instance_that_came_later_stops_with_the_others_behind_who_decides() -> None:
    stopped: list[str] = []
    supervisor = Supervisor(nothing, nothing)
    await supervisor.start(
        [Fake("archiver", "archiver", stopped)], [Fake("llumlet", "i0", stopped)], [Fake("controller", "c", stopped)]
    )
    await supervisor.add(Fake("llumlet", "auto", stopped))
    with pytest.raises(MidstreamError):
        await supervisor.add(Fake("llumlet", "late", stopped, starts=False))
    assert [part.name for part in supervisor.parts] == ["archiver", "i0", "auto", "c"]
    await supervisor.stop()
    assert stopped == ["c", "i0", "auto", "archiver"]
