"""Shows text as it appears, with a mark exactly where a request changed its engine.

The facts that say where that was come a moment after the tokens. So the text is shown a moment late.
"""

from __future__ import annotations

import asyncio
from collections import deque

from rich.console import Console
from rich.text import Text

from midstream.api.demo.vllm.chat import Delta
from midstream.api.demo.vllm.moves import Seam

LAG_S = 1.5
POLL_S = 0.02
COLOURS = ("cyan", "magenta")


class Screen:
    """One answer on the terminal. `feed` and `mark` at any time; `finish` shows the rest."""

    def __init__(self, console: Console, lag_s: float = LAG_S) -> None:
        self._console = console
        self._lag_s = lag_s
        self._waiting: deque[Delta] = deque()
        self._seams: deque[Seam] = deque()
        self._shown = 0
        self._colour = 0
        self._task = asyncio.get_running_loop().create_task(self._run())

    def feed(self, delta: Delta) -> None:
        """New text."""
        self._waiting.append(delta)

    def mark(self, seam: Seam) -> None:
        """A move has happened."""
        self._seams.append(seam)

    async def finish(self) -> None:
        """Show what is left and end the paragraph."""
        self._task.cancel()
        while self._waiting:
            self._show(self._waiting.popleft())
        self._console.print()

    async def _run(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            while self._waiting and self._waiting[0].at + self._lag_s <= now():
                self._show(self._waiting.popleft())
            await asyncio.sleep(POLL_S)

    def _show(self, delta: Delta) -> None:
        if self._seams and self._shown >= self._seams[0].index:
            seam = self._seams.popleft()
            self._colour += 1
            mark = f" ⟦{seam.source}→{seam.target}⟧ "
            self._console.print(Text(mark, style="bold black on yellow"), end="")
        colour = COLOURS[self._colour % len(COLOURS)]
        self._console.print(Text(delta.text, style=colour), end="", soft_wrap=True)
        self._shown += len(delta.ids)
