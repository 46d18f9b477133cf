"""Plays one act: a prompt answered undisturbed, then again with moves while its text appears."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import httpx
import msgspec
from rich.console import Console

from midstream.api.cli.client import AdminClient
from midstream.api.demo.vllm.chat import Answer, Delta, ask
from midstream.api.demo.vllm.moves import Seam, move_only_request, owner_of_only_request
from midstream.api.demo.vllm.prompts import Act
from midstream.api.demo.vllm.screen import Screen
from midstream.control.errors import MidstreamError

POLL_S = 0.01
REFUSALS_MAX = 3
STORY_S = 15.0
"""After an answer's end its last move gets so long to be told."""


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One act: the answer that nothing happened to, the moved one, and the moves."""

    act: Act
    undisturbed: Answer
    moved: Answer
    seams: tuple[Seam, ...]
    refusals: tuple[str, ...]
    """Moves that were given up."""
    killed_after: int | None = None
    """Output tokens that had arrived when the engine was killed."""

    @property
    def is_equal(self) -> bool:
        """Whether the moved answer is, token for token, the undisturbed one."""
        return self.moved.error is None and (self.moved.ids, self.moved.text) == (
            self.undisturbed.ids,
            self.undisturbed.text,
        )

    @property
    def problems(self) -> list[str]:
        """Everything that a client could have noticed, and moves that did not happen."""
        found = []
        if len(self.seams) < len(self.act.moves):
            found.append(f"{len(self.seams)} of {len(self.act.moves)} moves: {'; '.join(self.refusals)}")
        if self.act.kill_at is not None and self.killed_after is None:
            found.append("its engine was not killed")
        for answer in (self.undisturbed, self.moved):
            if answer.error is not None:
                found.append(answer.error)
            elif answer.completion_tokens != len(answer.ids):
                found.append(f"usage says {answer.completion_tokens} of {len(answer.ids)} tokens")
        if self.killed_after is None and not self.is_equal:
            found.append("the moved answer differs from the undisturbed one")
        return [f"{self.act.ask.title}: {text}" for text in found]


class Stage:
    """Where the acts are played, one answer at a time, so that every batch is of one request in both runs."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        admin: AdminClient,
        model: str,
        console: Console,
        say: Callable[[str], None],
        kill: Callable[[str], None],
    ) -> None:
        """`kill` ends the engine core of an instance, hard."""
        self._kill = kill
        self._http = http
        self._admin = admin
        self._model = model
        self._console = console
        self._say = say

    async def play(self, act: Act) -> Played:
        """Both runs of one prompt."""
        self._say(f"[bold]{act.ask.title}[/bold] ({act.ask.sampling}): undisturbed first")
        undisturbed = await ask(self._http, self._model, act.ask, lambda _: None)
        self._say(f"{len(undisturbed.ids)} tokens; now again, {_doing(act)}")
        mover = Mover(self._admin, Screen(self._console), self._kill)
        moving = asyncio.create_task(mover.work(act))
        moved = await ask(self._http, self._model, act.ask, mover.see)
        with contextlib.suppress(TimeoutError, MidstreamError):
            await asyncio.wait_for(moving, STORY_S)
        await mover.screen.finish()
        return Played(
            act=act,
            undisturbed=undisturbed,
            moved=moved,
            seams=tuple(mover.seams),
            refusals=tuple(mover.refusals),
            killed_after=mover.killed_after,
        )


def _doing(act: Act) -> str:
    return f"moved {len(act.moves)} x" if act.kill_at is None else "and its engine gets kill -9"


class Mover:
    """Watches an answer arrive, orders its moves, kills its engine."""

    def __init__(self, admin: AdminClient, screen: Screen, kill: Callable[[str], None]) -> None:
        self.screen = screen
        self.killed_after: int | None = None
        self._kill = kill
        self.seams: list[Seam] = []
        self.refusals: list[str] = []
        self._admin = admin
        self._arrived = 0

    def see(self, delta: Delta) -> None:
        """New tokens."""
        self._arrived += len(delta.ids)
        self.screen.feed(delta)

    async def work(self, act: Act) -> None:
        """Do all that the act wants. A move that is given up (the request stays) is ordered again."""
        for at, mode in act.moves:
            await self._arrival(at)
            while not await self._move(mode) and len(self.refusals) < REFUSALS_MAX:
                await asyncio.sleep(POLL_S)
        if act.kill_at is not None:
            await self._arrival(act.kill_at)
            owner = await asyncio.to_thread(owner_of_only_request, self._admin)
            self._kill(owner)
            self.killed_after = self._arrived
            self.screen.mark(self._arrived, f"kill -9 {owner}")

    async def _move(self, mode: str) -> bool:
        try:
            seam = await asyncio.to_thread(move_only_request, self._admin, mode)
        except MidstreamError as error:
            self.refusals.append(str(error))
            return False
        self.seams.append(seam)
        self.screen.mark(seam.index, f"{seam.source}→{seam.target}")
        return True

    async def _arrival(self, tokens: int) -> None:
        while self._arrived < tokens:
            await asyncio.sleep(POLL_S)
