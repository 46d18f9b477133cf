"""The scheduler that vLLM is told to use: its own, and beside it what moving requests needs.

`make_scheduler` is the value of vLLM's `scheduler_cls`. Importing this module in the engine-core process
also adds our methods, under names of their own, to the class `EngineCore`.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from midstream.control.errors import Refused
from midstream.instance.engines.vllm import calls
from midstream.instance.engines.vllm.core_methods import CoreMethods, frozen_state, reply
from midstream.instance.engines.vllm.seams import core as seam
from midstream.instance.engines.vllm.seams.blocks import check_blocks
from midstream.instance.engines.vllm.seams.version import check_version
from midstream.instance.engines.vllm.tenancy import Tenancy


class Moving:
    """Mixed into vLLM's scheduler class: reports, freezes that drain, grammars of runs that began elsewhere."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        scheduler: Any = self
        seam.check_core(scheduler)
        check_blocks(scheduler)
        ours = settings["vllm_config"].additional_config["midstream"]
        check_version(seam.VERSION, is_untested_allowed=ours["is_untested_vllm_allowed"])
        if seam.overlapping_steps(settings["vllm_config"]):
            seam.fence_block_frees(scheduler)
        self.tenancy = Tenancy(scheduler)
        self.core: Any = None
        """Set by the first call: vLLM makes the scheduler before the core is whole."""
        self._report_s = ours["report_ms"] / 1000
        self._reported_at = 0.0
        self._preemptions: dict[str, int] = {}

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """vLLM's own, then: freezes that waited for this step, and a report."""
        scheduled, fenced = scheduler_output.num_scheduled_tokens, seam.frees_fenced(self)
        outputs: dict[int, Any] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        self.tenancy.steps.step(tokens=scheduler_output.total_num_scheduled_tokens, requests=len(scheduled))
        self.tenancy.forget_missing()
        self._answer_freezes()
        is_news = not scheduled or _any_finished(outputs) or seam.frees_fenced(self) < fenced
        is_news |= self._note_preemptions()
        if is_news or time.monotonic() - self._reported_at >= self._report_s:
            self._reported_at = time.monotonic()
            report = msgspec.msgpack.encode(self.tenancy.report())
            seam.add_output(outputs, calls.REPORT_ID, {calls.REPORT_KEY: report})
        return outputs

    def _answer_freezes(self) -> None:
        for slot, futures in self.tenancy.drained():
            answer = reply(self.core, partial(self._frozen, slot))
            for future in futures:
                future.set_result(answer)

    def _frozen(self, slot: str) -> calls.Frozen:
        if slot not in self.tenancy.frozen:
            raise Refused("finished", f"{slot} ended with its last step, or was thawed")
        return frozen_state(self.core, slot)

    def _note_preemptions(self) -> bool:
        now = {slot: request.num_preemptions for slot, request in self.requests.items()}  # type: ignore[attr-defined]
        new = sum(max(0, count - self._preemptions.get(slot, count)) for slot, count in now.items())
        self._preemptions = now
        self.tenancy.steps.preemptions += new
        return bool(new)

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """vLLM's own; a run that goes on after outputs has its grammar advanced over them first."""
        waited = seam.waits_for_grammar(request)
        is_ready: bool = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]
        if waited and is_ready and request.request_id in self.tenancy.resumed:
            self.tenancy.resumed.discard(request.request_id)
            if not seam.advance_grammar(self, request):
                seam.give_up_for_grammar(self, request)
                return False
            seam.grammar_ready(request, is_resumed=True)
        return is_ready


def _any_finished(outputs: dict[int, Any]) -> bool:
    return any(output.finish_reason is not None for batch in outputs.values() for output in batch.outputs)


class MovingScheduler(Moving, Scheduler):
    """For engines that finish one step before they begin the next."""


class MovingAsyncScheduler(Moving, AsyncScheduler):
    """For engines whose steps overlap."""


def make_scheduler(**settings: Any) -> Moving:
    """The scheduler for this configuration."""
    kind = MovingAsyncScheduler if settings["vllm_config"].scheduler_config.async_scheduling else MovingScheduler
    return kind(**settings)


CoreMethods.add_to(seam.EngineCore)
