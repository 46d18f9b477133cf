"""The steps of one simulated engine in time: the stride in progress, waiting for its end, and the mean step time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import frexp, ldexp
from typing import Protocol

from midstream.control.state import Load
from midstream.instance.engines.base import SlotProgress
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.core import EngineCore, Stepped
from midstream.instance.engines.sim.run import Run
from midstream.instance.engines.sim.scheduler import Plan
from midstream.instance.engines.sim.steptime import load_model
from midstream.instance.engines.sim.stride import Stride, stride_of

STEP_MS_BITS = 6
"""Binary digits of a reported step time: a load that differs in less is no news."""

STEP_MEAN_WEIGHT = 0.2
"""Weight of the newest decode step in the moving mean."""


class Witness(Protocol):
    """Whoever measures an engine from within: sees every token's time, however late tokens are told."""

    def stepped(self, runs: Sequence[Run], ends: Sequence[float]) -> None:
        """Each of the runs got a token at each of these times, seconds."""
        ...

    def preempted(self, run: Run, at: float) -> None:
        """A run lost its blocks."""
        ...


class Steps:
    """Steps of one engine core. What comes from outside calls `cut` first, what only looks calls `catch_up`."""

    def __init__(self, core: EngineCore, config: SimConfig, witness: Witness | None) -> None:
        self._core = core
        self._config = config
        self._witness = witness
        self._times = load_model(config.step_times)
        self._stride: Stride | None = None
        self._rung: asyncio.Future[None] | None = None
        """Done when the stride ends, or when its end has come nearer."""
        self._mean_ms = 0.0

    async def make(self, plan: Plan, began: float, until: float) -> tuple[Stepped, float]:
        """Carry out a plan, again and again while nothing else can happen, not far beyond `until`.

        Returns the last step, and when it ended.
        """
        stride = self._stride = stride_of(
            plan,
            self._times,
            began=began,
            repeats=self._core.repeats(plan),
            time_scale=self._config.time_scale,
            until=until,
        )
        await self._over(stride)
        return self._finish(stride)

    def preempted(self, run: Run, at: float) -> None:
        """Tell the witness, if there is one."""
        if self._witness is not None:
            self._witness.preempted(run, at)

    def catch_up(self) -> None:
        """Carry out the steps that are over by now."""
        if self._stride is not None:
            self._carry_out(self._stride, self._stride.over(_now()))

    def cut(self) -> None:
        """Let the step in progress be the last of its stride."""
        self.catch_up()
        if self._stride is not None and self._stride.cut() and self._rung is not None:
            _ring(self._rung)

    def load(self) -> Load:
        """The load right now; looking at it carries nothing out."""
        stride = self._stride
        if stride is None:
            return self._core.load(coarse(self._mean_ms))
        ahead = stride.over(_now())
        self._note(stride, stride.done + ahead)
        return self._core.load(coarse(self._mean_ms), stride.plan, ahead)

    def progress(self, runs: Sequence[Run]) -> tuple[SlotProgress, ...]:
        """How far runs have come by now; looking at them carries nothing out."""
        stride, size = self._stride, self._config.block_tokens
        ahead = stride.over(_now()) if stride is not None else 0
        strode = frozenset(stride.runs) if stride is not None and ahead else frozenset()
        return tuple([run.progress(ahead if run in strode else 0, size) for run in runs])

    async def _over(self, stride: Stride) -> None:
        """Wait for the end of a stride, which may come nearer meanwhile."""
        loop = asyncio.get_running_loop()
        if stride.ends_at <= loop.time():
            await asyncio.sleep(0)
        while stride.ends_at > loop.time():
            self._rung = loop.create_future()
            alarm = loop.call_at(stride.ends_at, _ring, self._rung)
            try:
                await self._rung
            finally:
                alarm.cancel()

    def _finish(self, stride: Stride) -> tuple[Stepped, float]:
        self._carry_out(stride, len(stride.ends) - 1 - stride.done)
        self._stride = None
        now, began, end = _now(), stride.step_began(), stride.ends_at
        ended = now if now > began + 2 * (end - began) else end
        if stride.is_decode:
            self._mean_ms = _mean(self._mean_ms, ended - began)
        stepped = self._core.apply(stride.plan)
        if self._witness is not None:
            self._witness.stepped([run for run, _ in stepped.sampled], (ended,))
        return stepped, ended

    def _carry_out(self, stride: Stride, steps: int) -> None:
        if steps == 0:
            return
        self._note(stride, stride.done + steps)
        ends = stride.take(steps)
        self._core.advance(stride.plan, steps)
        if self._witness is not None:
            self._witness.stepped(stride.runs, ends)

    def _note(self, stride: Stride, steps: int) -> None:
        """Let the first `steps` steps of a stride be part of the mean step time."""
        if steps <= stride.noted:
            return
        if stride.is_decode:
            before = stride.ends[stride.noted - 1] if stride.noted else stride.began
            mean_ms = self._mean_ms
            for end in stride.ends[stride.noted : steps]:
                mean_ms = _mean(mean_ms, end - before)
                before = end
            self._mean_ms = mean_ms
        stride.noted = steps


def _mean(mean_ms: float, seconds: float) -> float:
    """The moving mean with one more step in it; the first step is the mean."""
    step_ms = seconds * 1000
    return mean_ms + STEP_MEAN_WEIGHT * (step_ms - mean_ms) if mean_ms else step_ms


def coarse(step_ms: float) -> float:
    """A step time with `STEP_MS_BITS` binary digits, that is to 1 or 2 percent."""
    mantissa, exponent = frexp(step_ms)
    return ldexp(round(mantissa * (1 << STEP_MS_BITS)), exponent - STEP_MS_BITS)


def _ring(rung: asyncio.Future[None]) -> None:
    if not rung.done():
        rung.set_result(None)


def _now() -> float:
    return asyncio.get_running_loop().time()
