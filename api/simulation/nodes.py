"""The processes of a simulated cluster: each is started, crashed without a word, and started again as a newcomer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Literal

from midstream.api.gateway.settings import GatewaySettings
from midstream.api.simulation.watch import Moving, WatchedGateway, WatchedLlumlet
from midstream.api.simulation.workload import LOG
from midstream.control.adapters.memory_archive import MemoryArchive
from midstream.control.adapters.memory_log import MemoryLog, MemoryLogStore
from midstream.control.archive import Archiver
from midstream.control.follower import Follower
from midstream.control.ids import Node
from midstream.control.ports import Clock
from midstream.control.publisher import Publisher
from midstream.control.service import Controller
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.engine import SimEngine
from midstream.instance.settings import LlumletSettings
from midstream.migration.transfers.base import Transfer
from midstream.migration.transfers.memory import MemoryTransfer
from midstream.migration.transfers.paced import Links, PacedTransfer
from midstream.migration.wires.memory import MemoryNetwork, MemoryWire

LLUMLET = LlumletSettings(checksum=True)
GATEWAY = GatewaySettings()
RETIRE_S = 1.0
LATENCY_S = 0.0002


class World:
    """What all nodes share: the network with its faults, the log's server, the archive's disk, time."""

    def __init__(
        self, network: MemoryNetwork, store: MemoryLogStore, clock: Clock, rng: random.Random, bytes_per_ms: float
    ) -> None:
        self.network = network
        self.bytes_per_ms = bytes_per_ms
        self.links = Links(bytes_per_ms * 1000, LATENCY_S, self._is_open)
        self.store = store
        self.archive = MemoryArchive()
        self.clock = clock
        self.rng = rng
        self.breaches: list[str] = []
        """What was seen to go wrong while it happened."""
        self.on_phase: Callable[[Moving], None] = lambda moving: None
        """Told whenever a move enters a phase at its source."""

    def log(self, node: str) -> MemoryLog:
        """A node's own handle on the log, with its share of lost replies."""

        def fault(method: str) -> Literal["", "before", "after"]:
            if self.network.link(node, LOG).is_cut:
                return "before"
            lost = self.network.faults.lost_reply(node, self.network.now_ms())
            if not lost or self.rng.random() >= lost:
                return ""
            return self.rng.choice(("before", "after", "after"))

        return MemoryLog(self.store, opened_by=node, fault=fault)

    def transfers(self, node: Node, config: SimConfig) -> dict[str, Transfer]:
        """What moves an engine's KV, best first: its bytes, or only the time that they would need."""
        if config.kv == "lengths":
            return {PacedTransfer.name: PacedTransfer(self.links, node)}
        return {MemoryTransfer.name: MemoryTransfer(self.network, node, bytes_per_ms=self.bytes_per_ms)}

    def _is_open(self, source: Node, target: Node) -> bool:
        network = self.network
        is_dead = network.is_crashed(source) or network.is_crashed(target)
        return not is_dead and not network.link(source.name, target.name).is_cut


class SimNode:
    """One process. Subclasses build their parts in `_begin` from nothing: that is what a crash leaves."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.incarnation = 0
        self.is_up = False
        self._tasks: list[asyncio.Task[None]] = []
        self._turn = asyncio.Lock()

    async def revive(self) -> None:
        """Start a new incarnation unless one is up."""
        async with self._turn:
            if not self.is_up:
                await self.start()

    async def start(self) -> None:
        """Start a new incarnation."""
        self.incarnation = max(self.incarnation + 1, self.world.clock.now_ms())
        self.log = self.world.log(self.name)
        self.publisher = Publisher(
            self.log, self.name, self.incarnation, self.world.clock, rng=random.Random(f"{self.name} retries")
        )
        await self._begin()
        self._run("publisher", self.publisher.run)
        self.is_up = True

    async def crash(self) -> None:
        """Die without a word: all tasks end, all memory is gone."""
        if not self.is_up:
            return
        self.is_up = False
        self.world.network.crash(self.name)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self._lose()

    async def _begin(self) -> None:
        """Build and start the node's parts."""

    async def _lose(self) -> None:
        """End what does not run in the node's own tasks."""

    def _run(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        async def work() -> None:
            await run()

        self._tasks.append(asyncio.get_running_loop().create_task(work(), name=f"{self.name} {name}"))

    def _wire(self) -> MemoryWire:
        return MemoryWire(self.world.network, self.name, self.incarnation)


class LlumletNode(SimNode):
    """One instance: engine, transfer and llumlet."""

    def __init__(self, world: World, instance: str, config: SimConfig, settings: LlumletSettings = LLUMLET) -> None:
        super().__init__(world, f"llumlet/{instance}")
        self.instance = instance
        self._settings = settings
        self._config = config

    async def _begin(self) -> None:
        wire = self._wire()
        self.engine = SimEngine(self._config, self.world.transfers(wire.node, self._config))
        self.llumlet = WatchedLlumlet(
            on_phase=self.world.on_phase,
            instance=self.instance,
            engine=self.engine,
            wire=wire,
            log=self.log,
            recorder=self.publisher,
            clock=self.world.clock,
            settings=self._settings,
        )
        await self.llumlet.start()

    async def retire(self) -> None:
        """End in good order, as after SIGTERM: the last fact is that it stopped."""
        await self.llumlet.stop()
        await self.publisher.flush(RETIRE_S)
        await self.crash()

    async def _lose(self) -> None:
        await self.llumlet.tasks.stop()
        self.engine.crash()
        await self.engine.stop()


class GatewayNode(SimNode):
    """One gateway with its own fold of the log."""

    def __init__(self, world: World, gateway: str, settings: GatewaySettings = GATEWAY) -> None:
        super().__init__(world, f"gateway/{gateway}")
        self.gateway_name = gateway
        self._settings = settings

    async def _begin(self) -> None:
        self.follower = Follower(self.log)
        self.gateway = WatchedGateway(
            breaches=self.world.breaches,
            name=self.gateway_name,
            wire=self._wire(),
            follower=self.follower,
            recorder=self.publisher,
            clock=self.world.clock,
            settings=self._settings,
            models=("sim",),
        )
        await self.gateway.start()
        self._run("follower", self.follower.run)

    async def _lose(self) -> None:
        await self.gateway.tasks.stop()


class ControllerNode(SimNode):
    """One controller replica."""

    def __init__(self, world: World, controller: str) -> None:
        super().__init__(world, f"controller/{controller}")
        self._seeds = random.Random(self.name)

    async def _begin(self) -> None:
        self.follower = Follower(self.log)
        self.controller = Controller(
            log=self.log,
            follower=self.follower,
            clock=self.world.clock,
            name=self.name,
            seed_source=lambda: self._seeds.getrandbits(32),
        )
        self._run("follower", self.follower.run)
        self._run("controller", self.controller.run)


class ArchiverNode(SimNode):
    """The archiver; the archive itself survives its crashes."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "archiver")

    async def _begin(self) -> None:
        self.archiver = Archiver(self.log, self.world.archive, self.world.clock, self.publisher)
        self._run("archiver", self.archiver.run)


class AdminNode(SimNode):
    """Where operators' orders enter the log."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "admin")
