"""A real vLLM behind the engine port: its core and workers in a process group of their own.

The llumlet speaks to the core through vLLM's own client, without output processor, and to the workers'
copiers through a Unix socket, so that bytes of KV never wait for a step, nor a step for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import structlog

from midstream.control.errors import BadInput, EngineFailed, Refused
from midstream.control.state import Fingerprint, Load
from midstream.instance.engines.base import BlockAccount, Output, Reserved, RoundReport, Route, SlotProgress
from midstream.instance.engines.prefixes import PrefixLog
from midstream.instance.engines.vllm import calls
from midstream.instance.engines.vllm.arriving import Arriving
from midstream.instance.engines.vllm.cache_events import CacheEvents, follow
from midstream.instance.engines.vllm.config import VllmConfig
from midstream.instance.engines.vllm.copier_link import CopierLink
from midstream.instance.engines.vllm.core_link import CORE_MODULE, CoreLink
from midstream.instance.engines.vllm.fingerprint import fingerprint_of, weights_revision
from midstream.instance.engines.vllm.finish import finish_text
from midstream.instance.engines.vllm.leaving import Leaving
from midstream.instance.engines.vllm.reports import Reports
from midstream.instance.engines.vllm.runs import Outbound, Run
from midstream.migration.protocol.messages import RequestSpec, RunState
from midstream.migration.transfers.choice import choose

logger = structlog.get_logger(__name__)


class VllmEngine:
    """`Engine` by vLLM. It lives once: started, stopped, and not started again."""

    core_module = CORE_MODULE
    """What runs as the engine core."""

    def __init__(self, config: VllmConfig) -> None:
        if not config.secret:
            raise BadInput("a vLLM engine needs the cluster's secret: its workers exchange KV with peers")
        self.config = config
        self._runs: dict[str, Run] = {}
        self._out = Outbound()
        self._tasks: set[asyncio.Task[None]] = set()
        self._frozen: dict[str, calls.Frozen] = {}
        self._reports = Reports(lambda slot: self._leaving.disturb(slot, "preempted"))
        self._is_stopping = False
        self.prefixes = PrefixLog()

    # --- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Boot vLLM, which takes a while, without blocking the loop. Raises `EngineFailed`, `BadInput`."""
        args = self.config.all_engine_args()
        self._core = CoreLink(self.config, args, self.core_module)
        self._copiers = CopierLink()
        self._core.on_report = self._reports.take
        try:
            await self._boot(args)
        except BaseException:
            await self.stop()
            raise

    async def _boot(self, args: dict[str, Any]) -> None:
        await self._copiers.listen(self._core.copier_socket)
        vllm_config = await self._core.start()
        self._facts = await self._core.call("mig_facts", None, calls.CoreFacts)
        self._spawn(self._pump())
        attach = calls.Attach(socket=self._core.copier_socket, is_shared="shm" in self.config.transfers)
        await self._core.call("mig_attach", attach, type(None))
        await self._copiers.open(self._facts.workers, self._opening())
        await self._describe_itself(vllm_config, args)
        self._leaving = Leaving(self._core, self._copiers, lambda: self._facts.block_tokens)
        self._arriving = Arriving(self._core, self._copiers)
        self._spawn(self._heartbeat())
        if self._core.cache_events_endpoint is not None:
            events = CacheEvents(self.prefixes, self._facts.block_tokens)
            self._spawn(follow(self._core.cache_events_endpoint, events))
        self._spawn(self._watch())

    def _opening(self) -> calls.Open:
        config, total = self.config, self.config.transfer_bytes_per_s
        return calls.Open(
            transfers=config.transfers,
            bytes_per_s=total / self._facts.workers if total is not None else None,
            host=config.transfer_host,
            port=config.transfer_port,
            advertise_host=config.transfer_advertise_host,
            secret=config.secret,
            stall_s=config.stall_s,
        )

    async def _describe_itself(self, vllm_config: Any, args: dict[str, Any]) -> None:
        from midstream.instance.engines.vllm.states import Requests, logprob_entries

        name = vllm_config.model_config.served_model_name
        revision = await asyncio.to_thread(weights_revision, self.config.model, args)
        self._fingerprint = fingerprint_of(self.config, self._facts, name, revision)
        self._requests = Requests(vllm_config, self._facts.tokens_max, name)
        self._logprob_entries = logprob_entries

    async def stop(self) -> None:
        """End the core, its workers and everything here."""
        self._is_stopping = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._copiers.stop()
        await self._core.stop()

    async def failed(self) -> str:
        """Return, with a reason, only when the engine has died."""
        reason = await asyncio.shield(self._core.died)
        if self._is_stopping:
            await asyncio.Event().wait()
        return reason

    async def _watch(self) -> None:
        await asyncio.shield(self._core.died)
        for slot, run in self._runs.items():
            run.lose(EngineFailed(self._core.died.result()))
            self._leaving.disturb(slot, "gone")
        self._runs.clear()
        self._frozen.clear()
        self._arriving.lose()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended_task)

    def _ended_task(self, task: asyncio.Task[None]) -> None:
        """An engine whose adapter does not work any more is as good as dead."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None or isinstance(error, EngineFailed):
            return  # of a dead engine `failed` speaks
        logger.error("the vLLM adapter failed", error=repr(error), exc_info=error)
        self._core.declare_dead(f"the adapter failed: {error!r}")

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self.config.heartbeat_s)
            await self._core.call("mig_report", None, type(None))

    # --- what it is --------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> Fingerprint:
        """What another engine must have equal before KV may pass."""
        return self._fingerprint

    @property
    def blocks_total(self) -> int:
        """KV blocks."""
        return self._facts.blocks_total

    @property
    def slots_max(self) -> int:
        """Requests that may run at once."""
        return self._facts.slots_max

    @property
    def tokens_max(self) -> int:
        """Longest prompt + output."""
        return self._facts.tokens_max

    @property
    def has_overlapping_steps(self) -> bool:
        """Whether the core begins a step before the last one's output is there (vLLM: async scheduling)."""
        return self._facts.has_overlapping_steps

    @property
    def process_group(self) -> int | None:
        """Of the engine's processes."""
        return self._core.process_group

    def transfers(self) -> tuple[str, ...]:
        """Backends it can send and receive with, best first."""
        return () if self._facts.refusal else self._copiers.offers

    # --- outputs and reports -----------------------------------------------------------------------

    async def _pump(self) -> None:
        while True:
            await self._out.room()
            batch = await self._core.outputs()
            for output in batch:
                if output.request_id == calls.REPORT_ID:
                    report = output.kv_transfer_params[calls.REPORT_KEY]
                    self._reports.take(msgspec.msgpack.decode(report, type=calls.Report))
            for output in batch:
                if output.request_id in self._runs:
                    self._take(self._runs[output.request_id], output)

    def _take(self, run: Run, output: Any) -> None:
        finish = None
        if output.finish_reason is not None:
            finish = finish_text(int(output.finish_reason), output.stop_reason)
            run.is_ended = True
            self._frozen.pop(run.slot, None)
            del self._runs[run.slot]
            self._leaving.disturb(run.slot, "gone")
        self._out.put(run.take(tuple(output.new_token_ids), self._logprob_entries(output), finish))

    async def outputs(self) -> list[Output]:
        """Wait for and take the next outputs, in order per slot. One caller at a time."""
        return await self._out.take()

    def load(self) -> Load:
        """The load, as last reported."""
        return self._reports.load(self._runs)

    def account(self) -> BlockAccount:
        """Where all blocks are, as last counted."""
        return self._reports.account

    def progress(self) -> tuple[SlotProgress, ...]:
        """All runs, in arrival order."""
        return self._reports.progress(self._runs)

    async def faults(self) -> tuple[str, ...]:
        """Broken invariants inside the core, in words (P07)."""
        return await self._core.call("mig_faults", None, tuple[str, ...])

    async def reset_prefix_cache(self) -> None:
        """Let no later request find a prefix that is cached now. Raises `EngineFailed` while there are runs."""
        if not await self._core.utility("reset_prefix_cache"):
            raise EngineFailed("blocks are in use")

    async def pause(self) -> None:
        """Make no step and take no reservation until `resume`; runs stay as they are."""
        await self._core.utility("pause_scheduler", "keep", False)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._core.utility("resume_scheduler")

    async def describe(self, slot: str) -> SlotProgress:
        """Raises `Refused("gone")`."""
        return await self._core.call("mig_describe", calls.OfSlot(slot), SlotProgress)

    # --- requests ----------------------------------------------------------------------------------

    async def submit(self, slot: str, spec: RequestSpec, outputs: tuple[int, ...] = ()) -> None:
        """Queue a run. Raises `Refused`, `EngineFailed`."""
        if slot in self._runs or self._arriving.holds(slot):
            return
        request = self._requests.core_request(slot, spec)
        run = self._runs[slot] = Run(slot, spec, len(outputs))
        try:
            if outputs or self._requests.needs_own_door(request):
                await self._submit_by_ours(run, request, outputs)
            else:
                await self._core.add(request)
        except BaseException:
            self._runs.pop(slot, None)
            raise

    async def _submit_by_ours(self, run: Run, request: Any, outputs: tuple[int, ...]) -> None:
        order = calls.Submit(slot=run.slot, request=self._requests.encoded(request), outputs=outputs)
        submitted = await self._core.call("mig_submit", order, calls.Submitted)
        if submitted.finish is not None and self._runs.pop(run.slot, None) is not None:
            self._out.put(run.take((), (), submitted.finish))

    async def abort(self, slot: str) -> int:
        """End a run or a reservation; return the blocks it held once nothing reads or writes them."""
        if self._core.died.done():
            return 0
        run = self._runs.pop(slot, None)
        if run is None:
            return await self._arriving.cancel(slot)
        run.lose(Refused("gone", f"{slot} was aborted"))
        self._out.drop(slot)
        self._leaving.disturb(slot, "gone")
        if self._frozen.pop(slot, None) is not None:
            await self._leaving.settle(slot)  # nothing pins what these copies read
        freed = await self._core.call("mig_abort", calls.OfSlot(slot), calls.Freed)
        await self._leaving.settle(slot)
        return freed.blocks

    # --- leaving -----------------------------------------------------------------------------------

    async def copy(self, slot: str, first_block: int, route: Route, *, checksum: bool = False) -> RoundReport:
        """Copy what is final from there on. Raises `TransferFailed`, `Refused` (`gone`, `preempted`, `thawed`)."""
        self._run(slot)
        frozen = self._frozen.get(slot)
        return await self._leaving.copy(slot, first_block, route, checksum=checksum, frozen=frozen)

    async def freeze(self, slot: str) -> RunState:
        """Take the run out at a step boundary. Raises `Refused` (`gone`, `finished`), `EngineFailed`."""
        run = self._run(slot)
        try:
            frozen = await self._core.call("mig_freeze", calls.OfSlot(slot), calls.Frozen)
            await run.reaches(len(frozen.outputs))
            self._frozen[slot] = frozen
        except asyncio.CancelledError:
            self._spawn(self.thaw(slot))  # reaches the core before any later call can
            raise
        except Refused as refusal:
            raise self._ended(run, refusal) from None
        return RunState(
            spec=run.spec,
            outputs=frozen.outputs,
            computed=frozen.computed,
            blocks=frozen.blocks,
            logprobs=tuple(run.logprobs[: len(frozen.outputs)]),
            rng=frozen.rng,
            preemptions=frozen.preemptions,
        )

    def _ended(self, run: Run, refusal: Refused) -> Refused:
        """A run that was there when the freeze was asked for and has ended by itself since."""
        if refusal.code == "gone" and (run.is_ended or self._runs.get(run.slot) is run):
            return Refused("finished", f"{run.slot} ended with its last step")
        return refusal

    async def thaw(self, slot: str) -> None:
        """Let a frozen run go on exactly where it was. Not frozen or gone: nothing."""
        if self._frozen.pop(slot, None) is not None:
            self._leaving.disturb(slot, "thawed")
            await self._leaving.settle(slot)
        if slot in self._runs and not self._core.died.done():
            await self._core.call("mig_thaw", calls.OfSlot(slot), type(None))

    # --- arriving ----------------------------------------------------------------------------------

    async def reserve(
        self, slot: str, spec: RequestSpec, outputs: tuple[int, ...], blocks: int, transfers: tuple[str, ...]
    ) -> Reserved:
        """Hold blocks and a run slot. Raises `Refused`, `EngineFailed`; again: the same answer."""
        if slot in self._runs:
            raise Refused("duplicate", f"{slot} already runs here")
        choice = choose(transfers, self.transfers())
        request = self._requests.core_request(slot, spec)
        return await self._arriving.reserve(slot, self._requests.encoded(request), outputs, blocks, choice)

    async def adopt(self, slot: str, state: RunState) -> None:
        """Turn a reservation into a run. Again: nothing. Raises `Refused("gone")`."""
        if slot in self._runs:
            return
        await self._arriving.close(slot)
        self._runs[slot] = Run(slot, state.spec, len(state.outputs), state.logprobs)
        try:
            await self._arriving.adopt(slot, state)
        except BaseException:
            self._runs.pop(slot, None)
            raise

    def _run(self, slot: str) -> Run:
        run = self._runs.get(slot)
        if self._core.died.done():
            raise EngineFailed(self._core.died.result())
        if run is None:
            raise Refused("gone", f"no run {slot} here")
        return run
