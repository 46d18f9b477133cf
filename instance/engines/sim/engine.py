"""The simulated engine on asyncio: the step loop, and the engine port around the pure core.

Time is the event loop's own, and nothing here starts a thread or a socket, so it runs unchanged on a
seeded virtual-time loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from midstream.control.errors import EngineFailed, Refused
from midstream.control.state import Fingerprint, Load
from midstream.instance.engines.base import BlockAccount, Output, Reserved, RoundReport, Route, SlotProgress
from midstream.instance.engines.prefixes import PrefixLog
from midstream.instance.engines.sim.arrivals import Arrivals
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.copies import Copies
from midstream.instance.engines.sim.core import EngineCore, Stepped
from midstream.instance.engines.sim.run import Run
from midstream.instance.engines.sim.steps import Steps, Witness
from midstream.migration.protocol.messages import RequestSpec, RunState
from midstream.migration.transfers.base import Transfer

OUTPUTS_MAX = 8_192
"""Outputs that may wait for the llumlet; the engine makes no step while there are more."""

ENGINE_VERSION = "1"
"""Changes when the arithmetic of model or KV changes: engines of different versions exchange no KV."""


class SimEngine:
    """`Engine` by simulation. `transfers` are its own: it starts and stops them. It lives once.

    `memory` is where its KV lies, `config.kv_bytes` bytes; None: memory that only this process sees.
    """

    def __init__(
        self,
        config: SimConfig,
        transfers: Mapping[str, Transfer],
        *,
        memory: memoryview | None = None,
        witness: Witness | None = None,
    ) -> None:
        self._config = config
        self._memory = memory
        self._witness = witness
        self._transfers = transfers
        self._begin_empty()
        self._outputs: list[Output] = []
        self._outputs_ready = asyncio.Event()
        self._outputs_taken = asyncio.Event()
        self._wake = asyncio.Event()
        self._freezers: dict[Run, list[asyncio.Future[RunState]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._last_words: asyncio.Task[None] | None = None
        """Ends the copies that were in progress when it died."""
        self._failure: str | None = None
        self._died = asyncio.Event()
        self._told_at = 0.0

    def _begin_empty(self) -> None:
        self._core = EngineCore(self._config, self._memory)
        self._steps = Steps(self._core, self._config, self._witness)
        self._copies = Copies(self._core, self._transfers)
        self._arrivals = Arrivals(self._core, self._transfers, self._config.secret)

    # --- what it is ------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> Fingerprint:
        """What another engine must have equal before KV may pass."""
        config = self._config
        return Fingerprint(
            engine="sim",
            engine_version=ENGINE_VERSION,
            model=config.model,
            weights_revision=config.weights_revision,
            dtype="uint64",
            block_tokens=config.block_tokens,
            block_bytes=config.block_bytes,
            layout=f"planes-{config.planes}" if config.kv == "bytes" else config.kv,
        )

    @property
    def blocks_total(self) -> int:
        """KV blocks."""
        return self._config.blocks_total

    @property
    def slots_max(self) -> int:
        """Requests that may run at once."""
        return self._config.slots_max

    @property
    def tokens_max(self) -> int:
        """Longest prompt + output."""
        return self._config.length_max

    @property
    def prefixes(self) -> PrefixLog:
        """What its prefix cache holds."""
        return self._core.prefixes

    def transfers(self) -> tuple[str, ...]:
        """Backends it can send and receive with, best first."""
        return tuple(transfer.offer for transfer in self._transfers.values())

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the transfers and the step loop."""
        await self._arrivals.start()
        self._task = asyncio.get_running_loop().create_task(self._run_steps())
        self._task.add_done_callback(self._loop_ended)

    async def stop(self) -> None:
        """End the loop, all copies and the transfers."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        for run in list(self._freezers):
            self._answer_freezers(run, EngineFailed("stopped"))
        if self._last_words is not None:
            await asyncio.wait({self._last_words})
        await self._copies.stop()
        await self._arrivals.stop()

    def crash(self, reason: str = "crashed") -> None:
        """Die at once with all runs, reservations and KV, as a killed process does. For tests."""
        if self._failure is None:
            self._failure = reason
            self._lose_everything()

    async def failed(self) -> str:
        """Return, with a reason, only when the engine has died."""
        await self._died.wait()
        assert self._failure is not None
        return self._failure

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = f"{type(error).__name__}: {error}"
            self._lose_everything()

    def _lose_everything(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for run in list(self._core.runs.values()):
            self._copies.disturb(run, "gone")
            self._answer_freezers(run, EngineFailed(self._failure))
        self._arrivals.lose()
        self._outputs.clear()
        self._last_words = asyncio.get_running_loop().create_task(self._copies.stop())
        self._begin_empty()
        self._died.set()

    # --- steps -----------------------------------------------------------------------------------

    async def _run_steps(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            self._wake.clear()
            plan = self._core.plan()
            for run in plan.preempted:
                self._copies.disturb(run, "preempted")
                self._steps.preempted(run, began)
            if not plan.chunks:
                await self._wake.wait()
                began = loop.time()
                continue
            stepped, began = await self._steps.make(plan, began, self._tell_at)
            self._after_step(stepped, began)
            while len(self._outputs) >= OUTPUTS_MAX:
                self._outputs_taken.clear()
                await self._outputs_taken.wait()

    def _after_step(self, stepped: Stepped, ended: float) -> None:
        self._tell(stepped, ended)
        for run, finish in stepped.sampled:
            if finish is not None:
                self._copies.disturb(run, "gone")
                self._answer_freezers(run, Refused("finished", f"{run.slot} ended with its last step"))
        for run in list(self._freezers):
            self._answer_freezers(run, None)

    @property
    def _tell_at(self) -> float:
        return self._told_at + self._config.stream_interval_ms / 1000

    def _tell(self, stepped: Stepped, now: float) -> None:
        """First and last tokens at once, those between when it is time."""
        is_time = now >= self._tell_at
        if is_time:
            self._told_at = now
        self._emit(
            *(run.tell(finish) for run, finish in stepped.sampled if is_time or finish is not None or run.is_silent)
        )

    def _emit(self, *outputs: Output) -> None:
        if outputs:
            self._outputs += outputs
            self._outputs_ready.set()

    # --- requests --------------------------------------------------------------------------------

    async def submit(self, slot: str, spec: RequestSpec, outputs: tuple[int, ...] = ()) -> None:
        """Queue a run. Raises `Refused` (`too_long`, `bad_request`, `queue_full`), `EngineFailed`."""
        self._must_live()
        if slot in self._core.runs or slot in self._core.reservations:
            return
        self._steps.cut()
        output = self._core.submit(slot, spec, outputs)
        if output is not None:
            self._emit(output)
        self._wake.set()

    async def abort(self, slot: str) -> int:
        """End a run or a reservation; return the blocks it held once nothing reads or writes them."""
        self._steps.cut()
        run = self._core.runs.get(slot)
        if run is None:
            freed = await self._arrivals.cancel(slot)
        else:
            freed = self._core.drop(run)
            self._outputs = [output for output in self._outputs if output.slot != slot]
            self._copies.disturb(run, "gone")
            self._answer_freezers(run, Refused("gone", f"{slot} was aborted"))
            await self._copies.settle(run)
        self._steps.cut()
        self._wake.set()
        return freed

    async def outputs(self) -> list[Output]:
        """Wait for and take the next outputs, in order per slot. One caller at a time."""
        while not self._outputs:
            self._outputs_ready.clear()
            await self._outputs_ready.wait()
        taken, self._outputs = self._outputs, []
        self._outputs_taken.set()
        return taken

    def load(self) -> Load:
        """The load right now."""
        return self._steps.load()

    def account(self) -> BlockAccount:
        """Where all blocks are."""
        self._steps.catch_up()
        return self._core.account()

    def faults(self) -> tuple[str, ...]:
        """Broken invariants in words (P05, P07); for tests and the simulation's oracle."""
        return self._core.faults()

    def progress(self) -> tuple[SlotProgress, ...]:
        """All runs, in arrival order."""
        return self._steps.progress(sorted(self._core.runs.values(), key=lambda run: run.rank[1:]))

    async def describe(self, slot: str) -> SlotProgress:
        """Raises `Refused("gone")`."""
        return self._steps.progress((self._run(slot),))[0]

    # --- leaving ---------------------------------------------------------------------------------

    async def copy(self, slot: str, first_block: int, route: Route, *, checksum: bool = False) -> RoundReport:
        """Copy what is final from there on. Raises `TransferFailed`, `Refused` (`gone`, `preempted`, `thawed`)."""
        self._steps.cut()
        core, run = self._core, self._run(slot)
        pinned = core.pin(run, first_block)
        try:
            report = await self._copies.copy(pinned, route, checksum=checksum)
        finally:
            self._steps.cut()
            self._wake.set()
        next_block = first_block + len(pinned.blocks)
        return RoundReport(
            blocks=report.blocks,
            copied_bytes=report.copied_bytes,
            duration_ms=report.duration_ms,
            next_block=next_block,
            blocks_left=max(0, self._config.blocks_for(run.computed) - next_block),
            tokens=len(run.tokens),
        )

    async def freeze(self, slot: str) -> RunState:
        """Take the run out at the next step boundary. Raises `Refused` (`gone`, `finished`), `EngineFailed`."""
        self._steps.cut()
        run = self._run(slot)
        if not run.in_flight:
            return self._freeze(run)
        answer: asyncio.Future[RunState] = asyncio.get_running_loop().create_future()
        self._freezers.setdefault(run, []).append(answer)
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                await self.thaw(slot)  # frozen for a caller who is gone
            raise

    async def thaw(self, slot: str) -> None:
        """Let a frozen run go on exactly where it was. Not frozen or gone: nothing."""
        self._steps.cut()
        run = self._core.runs.get(slot)
        if run is not None and run.is_frozen:
            self._copies.disturb(run, "thawed")
            self._core.thaw(run)
            self._wake.set()

    def _freeze(self, run: Run) -> RunState:
        state = self._core.freeze(run)
        if run.told < run.outputs:
            self._emit(run.tell())
        return state

    def _answer_freezers(self, run: Run, no: Exception | None) -> None:
        waiting = [answer for answer in self._freezers.pop(run, ()) if not answer.done()]
        for answer in waiting:
            if no is None:
                answer.set_result(self._freeze(run))
            else:
                answer.set_exception(no)

    # --- arriving --------------------------------------------------------------------------------

    async def reserve(
        self, slot: str, spec: RequestSpec, outputs: tuple[int, ...], blocks: int, transfers: tuple[str, ...]
    ) -> Reserved:
        """Hold blocks and a run slot. Raises `Refused`, `EngineFailed`; again: the same answer."""
        self._must_live()
        if slot in self._core.runs:
            raise Refused("duplicate", f"{slot} already runs here")
        self._steps.cut()
        return self._arrivals.reserve(slot, spec, outputs, blocks, transfers)

    async def adopt(self, slot: str, state: RunState) -> None:
        """Turn a reservation into a run that takes part in the next step. Again: nothing. Raises `Refused("gone")`."""
        self._must_live()
        if slot not in self._core.runs:
            self._steps.cut()
            await self._arrivals.adopt(slot, state)
            self._steps.cut()
            self._wake.set()

    def _run(self, slot: str) -> Run:
        run = self._core.runs.get(slot)
        if run is None:
            raise Refused("gone", f"no run {slot} here")
        return run

    def _must_live(self) -> None:
        if self._failure is not None:
            raise EngineFailed(self._failure)


def _ring(rung: asyncio.Future[None]) -> None:
    if not rung.done():
        rung.set_result(None)
