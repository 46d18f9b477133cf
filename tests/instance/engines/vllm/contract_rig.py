"""Two real engines under the engine contract, booted once for all of it, with as little KV as the simulated ones."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midstream.instance.engines.base import Engine, Output
from midstream.migration.protocol.messages import RequestSpec, Sampling
from tests.instance.engines.vllm.pair import LinkedEngine, VllmPair, config_of, running

if TYPE_CHECKING:
    from tests.contracts.engine_rigs import AnyLink

PACE_MS = 8.0
"""Fast enough for hundreds of runs, slow enough that a test sees a run in the middle."""


ASIDE = "aside "


class ContractEngine(LinkedEngine):
    """Keeps the outputs of some runs from the test's reader."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._aside: dict[str, list[int]] = {}
        self._finishes: dict[str, str] = {}

    async def outputs(self) -> list[Output]:
        while True:
            outputs = await super().outputs()
            for output in outputs:
                if output.slot.startswith(ASIDE):
                    self._aside.setdefault(output.slot, []).extend(output.ids)
                    if output.finish is not None:
                        self._finishes[output.slot] = output.finish
            seen = [output for output in outputs if not output.slot.startswith(ASIDE)]
            if seen:
                return seen

    async def aside(self, slot: str) -> tuple[tuple[int, ...], str]:
        """Wait for the end of a run that the test does not see."""
        while slot not in self._finishes:
            await asyncio.sleep(0.002)
        return tuple(self._aside[slot]), self._finishes[slot]


async def warm_up(engine: ContractEngine) -> None:
    """The first log probabilities of a process take many seconds: torch compiles a function for them."""
    sampling = Sampling(max_tokens=2, logprobs=1)
    await engine.submit("warm up", RequestSpec(request="warm up", prompt=(5, 6, 7), sampling=sampling))
    while not any(output.finish for output in await engine.outputs()):
        pass


class VllmRig:
    """Both engines over the rpc transfer, past a link each."""

    slots, blocks, block_tokens, prompt = 4, 8, 32, 40
    ended_codes = ("finished", "gone")
    """Calls come between steps: a run of one step is seen waiting or not at all."""
    steps_meanwhile = 100

    def __init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._known: dict[Any, tuple[tuple[int, ...], str]] = {}
        self._numbers = itertools.count()

    async def open(self) -> None:
        """Boot."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch and vLLM warn of themselves while they are imported
            import midstream.instance.engines.vllm.seams.host  # noqa: F401, PLC0415
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        config = config_of(
            Path(folder),
            pace_ms=PACE_MS,
            max_model_len=200,
            max_num_batched_tokens=8,
            max_num_seqs=self.slots,
            num_gpu_blocks_override=self.blocks + 1,
        )
        self._pair: VllmPair[ContractEngine] = await self._stack.enter_async_context(running(config, ContractEngine))
        self.links: dict[str, AnyLink] = dict(self._pair.links)
        await asyncio.gather(*(warm_up(engine) for engine in self._pair.engines.values()))

    async def close(self) -> None:
        """End the processes."""
        await self._stack.aclose()

    async def begin(self) -> dict[str, Engine]:
        """The same two engines every time."""
        await self._pair.settle()
        return dict(self._pair.engines)

    async def end(self) -> None:
        """No prefix, corrupted ones least of all, stays for the next test."""
        await self._pair.settle()

    async def undisturbed(self, spec: RequestSpec) -> tuple[tuple[int, ...], str]:
        """Run once, alone if the test has left nothing, and remembered."""
        key = (spec.prompt, spec.sampling)
        if key not in self._known:
            engine = min(self._pair.engines.values(), key=lambda engine: len(engine.progress()))
            slot = f"{ASIDE}{next(self._numbers)}"
            await engine.submit(slot, spec)
            self._known[key] = await engine.aside(slot)
        return self._known[key]

    def is_repeatable(self, spec: RequestSpec) -> bool:
        """Without a seed tokens come from a generator that all requests share."""
        return spec.sampling.temperature == 0 or spec.sampling.seed is not None

    async def faults(self, engine: Engine) -> tuple[str, ...]:
        """What the core finds when it counts references."""
        assert isinstance(engine, ContractEngine)
        return await engine.faults()
