"""The scaler: acts on what was decided about instances, outside the controllers. Stateless; any number of them.

It looks at the fold, not at single facts, and again before each retry: whoever was decided to come and is not there is
started, whoever was to go and is drained is ended, and so is what a start that failed may have left. What it did before
it was restarted, or what another one does, is done again: by names that derive from the decision, twice is once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final, NamedTuple

import structlog

from midstream.control.errors import ScalerFailed
from midstream.control.events import ScaleFailed
from midstream.control.follower import Follower
from midstream.control.ports import Recorder, Scaler
from midstream.control.state import ScalingView, State

ATTEMPTS_MAX: Final = 5
BACKOFF_FIRST_S: Final = 0.5
ACT_S: Final = 900.0
"""One attempt may take so long: a local scaler waits for a model to be loaded."""
LOOK_S: Final = 1.0
"""It looks at the fold at each change, and at least so often."""
CLEAN_UP_MS: Final = 900_000
"""For so long after a start failed, a scaler that comes back sees to it that nothing is left of it."""

logger = structlog.get_logger(__name__)


class Act(NamedTuple):
    """Something to be done: `add` or `remove`."""

    scaling: str
    action: str
    instance: str


def wanted(state: State) -> Iterator[Act]:
    """What is decided and not done, as far as it can be done now. An instance goes only when it is drained.

    A start that failed may have been done by half: what never registered should go.
    """
    for view in state.scalings.values():
        instance = state.instances.get(view.instance)
        is_drained = instance is not None and instance.is_draining and instance.is_drained
        if view.status == "open" and (view.action == "add" or is_drained):
            yield Act(view.scaling, view.action, view.instance)
        elif instance is None and _has_failed_lately(state, view):
            yield Act(view.scaling, "remove", view.instance)


def _has_failed_lately(state: State, view: ScalingView) -> bool:
    is_failed = view.action == "add" and view.status == "failed"
    return is_failed and state.last_tick_ms - view.ended_at_ms < CLEAN_UP_MS


class ScalerService:
    """`run` acts until cancelled; `follower.run` must be running beside it."""

    def __init__(self, *, follower: Follower, scaler: Scaler, recorder: Recorder) -> None:
        self._follower = follower
        self._scaler = scaler
        self._recorder = recorder
        self._begun: dict[Act, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Begin every act once, one at a time for each instance; what is no longer wanted is forgotten."""
        try:
            while True:
                self._look()
                await self._changed()
        finally:
            for task in self._begun.values():
                task.cancel()
            await asyncio.gather(*self._begun.values(), return_exceptions=True)

    def _look(self) -> None:
        acts = dict.fromkeys(wanted(self._follower.state))
        for act in [act for act, task in self._begun.items() if act not in acts and task.done()]:
            del self._begun[act]
        busy = {act.instance for act, task in self._begun.items() if not task.done()}
        for act in acts:
            if act not in self._begun and act.instance not in busy:
                self._begin(act)

    def _begin(self, act: Act) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                logger.error("scaling broke", action=act.action, instance=act.instance, exc_info=error)
                self._give_up(act, f"{type(error).__name__}: {error}")

        task = asyncio.create_task(self._do(act), name=f"{act.action} {act.instance}")
        task.add_done_callback(ended)
        self._begun[act] = task

    async def _changed(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._follower.changed()
        except TimeoutError:
            return

    async def _do(self, act: Act) -> None:
        """Try until it is done, or no longer wanted, or has failed too often."""
        backoff, reason = BACKOFF_FIRST_S, ""
        for _ in range(ATTEMPTS_MAX):
            try:
                await self._try(act)
            except ScalerFailed as error:
                reason = str(error)
                logger.warning("scaling failed", action=act.action, instance=act.instance, error=reason)
            else:
                return
            await asyncio.sleep(backoff)
            backoff *= 2
            if act not in wanted(self._follower.state):
                self._begun.pop(act, None)
                return
        self._give_up(act, reason)

    def _give_up(self, act: Act, reason: str) -> None:
        self._recorder.record(ScaleFailed(scaling=act.scaling, code="scaler_failed", reason=reason))

    async def _try(self, act: Act) -> None:
        call = self._scaler.add if act.action == "add" else self._scaler.remove
        try:
            async with asyncio.timeout(ACT_S):
                await call(act.instance, act.scaling)
        except TimeoutError:
            raise ScalerFailed(f"no answer within {ACT_S:g} s") from None
