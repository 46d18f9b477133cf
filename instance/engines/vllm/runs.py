"""What the llumlet keeps of each run in its engine, and the outputs on their way out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from midstream.instance.engines.base import Output, SlotProgress
from midstream.migration.protocol.messages import RequestSpec

OUTPUTS_MAX = 8_192
"""Outputs that may wait for the llumlet; no more are read from the core while there are."""


class Run:
    """One run: its request, how many output tokens it has, and their log probabilities if asked for."""

    __slots__ = ("count", "fate", "is_ended", "logprobs", "news", "slot", "spec")

    def __init__(self, slot: str, spec: RequestSpec, count: int, logprobs: Iterable[bytes] = ()) -> None:
        self.slot = slot
        self.spec = spec
        self.count = count
        self.logprobs = list(logprobs)
        if spec.sampling.logprobs is not None:
            self.logprobs += [b""] * (count - len(self.logprobs))
        self.news = asyncio.Event()
        self.is_ended = False
        """By itself, not by an abort."""
        self.fate: Exception | None = None

    def take(self, ids: tuple[int, ...], logprobs: tuple[bytes, ...], finish: str | None) -> Output:
        """Number new tokens."""
        output = Output(slot=self.slot, first=self.count, ids=ids, logprobs=logprobs, finish=finish)
        self.count += len(ids)
        self.logprobs += logprobs
        self.news.set()
        return output

    def lose(self, fate: Exception) -> None:
        """No output of it comes any more; whoever waits for one gets `fate`."""
        self.fate = fate
        self.news.set()

    async def reaches(self, count: int) -> None:
        """Wait until that many output tokens were put out. Raises what `lose` was given."""
        while self.count < count:
            if self.fate is not None:
                raise self.fate
            self.news.clear()
            await self.news.wait()

    def unseen(self) -> SlotProgress:
        """What can be said before the core has reported on it."""
        tokens = len(self.spec.prompt) + self.count
        return SlotProgress(
            slot=self.slot, phase="waiting", tokens=tokens, outputs=self.count, computed=0, blocks=0, preemptions=0
        )


class Outbound:
    """Outputs that wait to be taken. One taker."""

    def __init__(self) -> None:
        self._outputs: list[Output] = []
        self._ready = asyncio.Event()
        self._taken = asyncio.Event()

    def put(self, output: Output) -> None:
        """Add one."""
        self._outputs.append(output)
        self._ready.set()

    def drop(self, slot: str) -> None:
        """Nothing of this slot is delivered any more."""
        self._outputs = [output for output in self._outputs if output.slot != slot]

    async def take(self) -> list[Output]:
        """Wait for and take what there is."""
        while not self._outputs:
            self._ready.clear()
            await self._ready.wait()
        taken, self._outputs = self._outputs, []
        self._taken.set()
        return taken

    async def room(self) -> None:
        """Wait until there is room for more."""
        while len(self._outputs) >= OUTPUTS_MAX:
            self._taken.clear()
            await self._taken.wait()
