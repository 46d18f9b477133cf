"""Shows text as it appears, with a mark exactly where a request changed its engine.

The facts that say where that was come a moment after the tokens. So the text is shown a moment late.
"""

from __future__ import annotations

import asyncio
from collections import deque

from rich.console import Console
from rich.text import Text

from midstream.api.demo.vllm.chat import Delta

LAG_S = 1.5
POLL_S = 0.02
COLOURS = ("cyan", "magenta")


class Screen:
    """One answer on the terminal. `feed` and `mark` at any time; `finish` shows the rest."""

    def __init__(self, console: Console, lag_s: float = LAG_S) -> None:
        self._console = console
        self._lag_s = lag_s
        self._waiting: deque[Delta] = deque()
        self._marks: deque[tuple[int, str]] = deque()
        self._shown = 0
        self._colour = 0
        self._task = asyncio.get_running_loop().create_task(self._run())

    def feed(self, delta: Delta) -> None:
        """New text."""
        self._waiting.append(delta)

    def mark(self, index: int, text: str) -> None:
        """Something happened right before output token `index`."""
        self._marks.append((index, text))

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
        if self._marks and self._shown >= self._marks[0][0]:
            self._colour += 1
            mark = f" ⟦{self._marks.popleft()[1]}⟧"
            self._console.print(Text(mark, style="bold black on yellow"), end="", soft_wrap=True)
        colour = COLOURS[self._colour % len(COLOURS)]
        self._console.print(Text(delta.text, style=colour), end="", soft_wrap=True)
        self._shown += len(delta.ids)
