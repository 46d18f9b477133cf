"""What the engine contract needs: two engines of one model, a reader of outputs, and a plain way to move a run."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections.abc import Callable
from typing import Protocol

from midstream.control.errors import Refused
from midstream.control.ids import Node
from midstream.instance.engines.base import Engine, Reserved, Route, SlotProgress
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.engine import SimEngine
from midstream.instance.engines.sim.reference import reference_output
from midstream.migration.plan import LIVE, RECOMPUTE, blocks_for
from midstream.migration.protocol.messages import RequestSpec, RunState, Sampling
from midstream.migration.protocol.source import handed_over
from midstream.migration.transfers.base import Transfer, Where
from midstream.migration.transfers.memory import MemoryTransfer
from midstream.migration.transfers.rpc import RpcTransfer
from midstream.migration.transfers.shm import ShmTransfer
from midstream.migration.transfers.shm_memory import Region
from midstream.migration.wires.memory import MemoryNetwork
from tests.contracts.engine_links import Link

PATIENCE_S = 60.0
HERE = Where(bind_host="127.0.0.1", secret=b"a secret of the cluster", stall_s=10.0)


def sim_memory() -> SimRig:
    network = MemoryNetwork(random.Random(1))
    return SimRig(lambda name: MemoryTransfer(network, Node(f"llumlet/{name}", 1, name)))


def sim_rpc() -> SimRig:
    return SimRig(lambda _: RpcTransfer(HERE))


def sim_shm() -> SimRig:
    return SimRig(None)


def vllm_rpc() -> Rig:
    from tests.instance.engines.vllm.contract_rig import VllmRig

    return VllmRig()


RIGS: dict[str, Callable[[], Rig]] = {"sim-memory": sim_memory, "sim-rpc": sim_rpc, "sim-shm": sim_shm}
"""A new engine is held to the contract by one line here."""
if importlib.util.find_spec("vllm") is not None:
    RIGS["vllm"] = vllm_rpc


class AnyLink(Protocol):
    """What stands in the way of an engine's copies: `Link`, or something like it."""

    channels_open: int
    gate: asyncio.Event
    sending: asyncio.Event
    flip: tuple[int, int] | None
    swaps: bool
    is_broken: bool


class Rig(Protocol):
    """One kind of engine under the contract, for a whole module. Sizes are small: tests fill them."""

    slots: int
    blocks: int
    block_tokens: int
    prompt: int
    """Tokens of a prompt that fills a block, with room for 100 more."""
    links: dict[str, AnyLink]
    """What engines `a` and `b` send through, which can be told to wait, fail or alter bytes."""
    ended_codes: tuple[str, ...]
    """What a freeze may say of a run that just ended."""
    steps_meanwhile: int
    """Steps that an engine may make between two calls of a test."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def begin(self) -> dict[str, Engine]:
        """Two started engines, `a` and `b`, with nothing in them."""

    async def end(self) -> None:
        """The test is over; its runs have been aborted."""

    async def undisturbed(self, spec: RequestSpec) -> tuple[tuple[int, ...], str]:
        """Output ids and finish reason of a run that nothing happens to. Asked for when the test is over."""

    def is_repeatable(self, spec: RequestSpec) -> bool:
        """Whether two runs of it make the same tokens."""

    async def faults(self, engine: Engine) -> tuple[str, ...]:
        """Broken invariants inside the engine."""


class SimRig:
    """Simulated engines with steps of about 1.5 ms, over one of the transfers."""

    slots, blocks, block_tokens, prompt = 4, 64, 4, 21
    ended_codes = ("finished",)
    steps_meanwhile = 0

    def __init__(self, transfer: Callable[[str], Transfer] | None) -> None:
        """None: `shm`, and the engines' KV in memory that can be shared."""
        self._transfer = transfer
        self.links: dict[str, AnyLink] = {}
        self._engines: dict[str, SimEngine] = {}
        self._config = SimConfig(
            blocks_total=self.blocks,
            block_tokens=self.block_tokens,
            slots_max=self.slots,
            step_tokens_max=8,
            tokens_max=200,
            time_scale=0.05,
        )

    async def open(self) -> None:
        pass  # each test has engines of its own

    async def close(self) -> None:
        pass

    async def begin(self) -> dict[str, Engine]:
        if self._transfer is None:
            regions = {name: Region(self._config.kv_bytes) for name in ("a", "b")}
            memories = {name: region.view for name, region in regions.items()}
            links = {n: Link(ShmTransfer(HERE, [region])) for n, region in regions.items()}
        else:
            memories = {}
            links = {name: Link(self._transfer(name)) for name in ("a", "b")}
        self.links = dict(links)
        self._engines = {
            name: SimEngine(self._config, {link.name: link}, memory=memories.get(name)) for name, link in links.items()
        }
        for engine in self._engines.values():
            await engine.start()
        return dict(self._engines)

    async def end(self) -> None:
        for engine in self._engines.values():
            await engine.stop()

    async def undisturbed(self, spec: RequestSpec) -> tuple[tuple[int, ...], str]:
        return reference_output(spec, self._config)

    def is_repeatable(self, spec: RequestSpec) -> bool:
        return True

    async def faults(self, engine: Engine) -> tuple[str, ...]:
        assert isinstance(engine, SimEngine)
        return engine.faults()


class Bench:
    """One engine with a reader that takes its outputs and holds them to their order."""

    def __init__(self, engine: Engine, link: AnyLink) -> None:
        self.engine = engine
        self.link = link
        self.outputs: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[bytes]] = {}
        self.finishes: dict[str, str] = {}
        self.news = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while True:
            for output in await self.engine.outputs():
                assert output.slot not in self.finishes, "output after the finish"
                ids = self.outputs.setdefault(output.slot, [])
                if not ids:
                    ids += [-1] * output.first
                assert output.first == len(ids), "a hole or a repeat"
                ids += output.ids
                self.logprobs.setdefault(output.slot, []).extend(output.logprobs)
                if output.finish is not None:
                    self.finishes[output.slot] = output.finish
            self.news.set()

    async def close(self) -> None:
        failed = self._task.done()
        self._task.cancel()
        await asyncio.wait({self._task})
        if failed:
            self._task.result()

    def made(self, slot: str) -> tuple[int, ...]:
        """Ids that the slot has put out here."""
        return tuple(token for token in self.outputs.get(slot, ()) if token >= 0)

    async def finish(self, slot: str) -> str:
        """Wait for the end of a run."""
        async with asyncio.timeout(PATIENCE_S):
            while slot not in self.finishes:
                if self._task.done():
                    self._task.result()
                self.news.clear()
                await self.news.wait()
        return self.finishes[slot]

    async def until(self, slot: str, reached: Callable[[SlotProgress], bool]) -> SlotProgress:
        """Wait until a run's progress satisfies a condition."""
        async with asyncio.timeout(PATIENCE_S):
            while not reached(progress := await self.engine.describe(slot)):
                await asyncio.sleep(0.0002)
        return progress

    async def is_gone(self, slot: str) -> bool:
        try:
            await self.engine.describe(slot)
        except Refused as refusal:
            return refusal.code == "gone"
        return False


def request(name: str, prompt_tokens: int = 21, **sampling: object) -> RequestSpec:
    """A request whose prompt follows from its name."""
    first = sum(name.encode()) * 37
    prompt = tuple(3 + (first + 11 * i) % 900 for i in range(prompt_tokens))
    settings = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True} | sampling
    return RequestSpec(request=name, prompt=prompt, sampling=Sampling(**settings))


async def reserve(
    source: Bench, target: Bench, slot: str, spec: RequestSpec, block_tokens: int, mode: str = LIVE
) -> Reserved:
    """Room at the target for all the run can become; none for one that takes no blocks along."""
    progress = await source.engine.describe(slot)
    has_kv = progress.blocks and mode != RECOMPUTE
    blocks = blocks_for(len(spec.prompt) + spec.sampling.max_tokens, block_tokens) if has_kv else 0
    outputs = source.made(slot)
    return await target.engine.reserve(f"{slot}'", spec, outputs, blocks, source.engine.transfers())


def route(reserved: Reserved) -> Route:
    return Route(transfer=reserved.transfer, address=reserved.address, handle=reserved.handle)


async def move(
    source: Bench, target: Bench, slot: str, spec: RequestSpec, block_tokens: int, mode: str = LIVE
) -> RunState:
    """Move a run, a live one in two rounds and a final one; it goes on at the target as `slot` with a prime."""
    reserved = await reserve(source, target, slot, spec, block_tokens, mode)
    first = reserved.cached
    if reserved.blocks and mode == LIVE:
        for _ in range(2):
            report = await source.engine.copy(slot, first, route(reserved))
            first = report.next_block
    state = handed_over(await source.engine.freeze(slot), mode)
    if state.computed:
        report = await source.engine.copy(slot, first, route(reserved))
        assert report.blocks_left == 0
    await target.engine.adopt(f"{slot}'", state)
    await source.engine.abort(slot)
    return state
