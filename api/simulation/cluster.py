"""A simulated run: the cluster of a scenario, its clients and operators, its nemesis, and the peace at the end."""

from __future__ import annotations

import asyncio
import random

import msgspec

from midstream.api.gateway.live import Live
from midstream.api.simulation.nodes import (
    AdminNode,
    ArchiverNode,
    ControllerNode,
    GatewayNode,
    LlumletNode,
    SimNode,
    World,
)
from midstream.api.simulation.watch import Moving
from midstream.api.simulation.workload import CONTROLLERS, GATEWAYS, Arrival, LogOutage, Order, Scenario, Strike
from midstream.control.adapters.memory_log import MemoryLogStore
from midstream.control.errors import Refused
from midstream.control.events import DrainCancelled, DrainRequested, MoveRequested
from midstream.control.ids import Position
from midstream.control.simulate.faults import Crash, FaultPlan
from midstream.control.simulate.loop import VirtualClock
from midstream.migration.wires.memory import MemoryNetwork

EPOCH_MS = 1_700_000_000_000
SETTLE_S = 40.0
"""After the last request: longer than every lease, deadline and lost-after bound."""
PATIENCE_S = 300.0
"""How long the last request may take."""
ADMIT_RETRY_S = 0.1


class Outcome(msgspec.Struct, kw_only=True):
    """What one client saw."""

    arrival: Arrival
    ids: list[int] = []
    finish: str | None = None
    error: tuple[str, str] | None = None
    has_left: bool = False
    is_cut_off: bool = False
    """Its gateway crashed: no promise holds beyond that."""
    is_untold: bool = False
    """Its gateway crashed with facts that the log had not got yet, or that only a log had which lost its memory."""


class Cluster:
    """One run. `play` returns when everything is quiet again."""

    def __init__(self, scenario: Scenario) -> None:
        loop = asyncio.get_running_loop()
        self.scenario = scenario
        rng = random.Random(f"world {scenario.seed}")
        clock = VirtualClock(loop, EPOCH_MS)
        network = MemoryNetwork(rng, FaultPlan(scenario.faults))
        self.world = World(network, MemoryLogStore(clock=clock), clock, rng, scenario.bytes_per_ms)
        self.world.on_phase = self._on_phase
        self.llumlets = {name: LlumletNode(self.world, name, config) for name, config in scenario.engines.items()}
        self.gateways = {name: GatewayNode(self.world, name) for name in GATEWAYS}
        self.controllers = [ControllerNode(self.world, name) for name in CONTROLLERS]
        self.archiver = ArchiverNode(self.world)
        self.admin = AdminNode(self.world)
        self.outcomes = [Outcome(arrival=arrival) for arrival in scenario.arrivals]
        self._began_at = 0.0
        self._waiting: list[tuple[str, asyncio.Future[Moving]]] = []
        """Strikes that lie in wait, with the phase they wait for."""

    @property
    def nodes(self) -> dict[str, SimNode]:
        """Every process by its name."""
        every = (*self.llumlets.values(), *self.gateways.values(), *self.controllers, self.archiver, self.admin)
        return {node.name: node for node in every}

    async def play(self) -> None:
        """Run the scenario to its end and let it settle."""
        for node in self.nodes.values():
            await node.start()
        await asyncio.sleep(0.3)
        self._began_at = asyncio.get_running_loop().time()
        nemesis = [
            *map(self._crash, self.world.network.faults.crashes()),
            *map(self._outage, self.scenario.outages),
            *map(self._strike, self.scenario.strikes),
        ]
        orders = [self._order(index, order) for index, order in enumerate(self.scenario.orders)]
        clients = [self._client(outcome) for outcome in self.outcomes]
        watcher = asyncio.create_task(self._watch_blocks())
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*nemesis, *orders, *clients)
        await asyncio.sleep(SETTLE_S)
        watcher.cancel()

    async def stop(self) -> None:
        """End every process."""
        for node in self.nodes.values():
            await node.crash()

    async def _until(self, at_ms: int) -> None:
        await asyncio.sleep(max(0.0, self._began_at + at_ms / 1e3 - asyncio.get_running_loop().time()))

    # --- the nemesis -------------------------------------------------------------------------

    async def _crash(self, fault: Crash) -> None:
        node = self.nodes[fault.node]
        await self._until(fault.at_ms)
        await self._kill(node)
        await self._until(fault.until_ms)
        await node.revive()

    async def _kill(self, node: SimNode) -> None:
        await node.crash()
        if isinstance(node, GatewayNode):
            self._mark_victims(node, await self.world.archive.position())

    async def _strike(self, strike: Strike) -> None:
        """Lie in wait for a move, hit it, and let go."""
        await self._until(strike.at_ms)
        moving = await self._next_moving(strike)
        if moving is None:
            return
        hit = [getattr(moving, role) for role in strike.hit]
        if len(hit) == 1:
            await self._kill(self.nodes[hit[0]])
            await asyncio.sleep(strike.for_ms / 1e3)
            await self.nodes[hit[0]].revive()
        else:
            self.world.network.cut(*hit)
            await asyncio.sleep(strike.for_ms / 1e3)
            self.world.network.heal(*hit)

    async def _next_moving(self, strike: Strike) -> Moving | None:
        waiting: asyncio.Future[Moving] = asyncio.get_running_loop().create_future()
        self._waiting.append((strike.phase, waiting))
        left_s = self._began_at + strike.until_ms / 1e3 - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                return await waiting
        except TimeoutError:
            return None

    def _on_phase(self, moving: Moving) -> None:
        for phase, waiting in self._waiting:
            if phase == moving.phase and not waiting.done():
                waiting.set_result(moving)
        self._waiting = [(phase, waiting) for phase, waiting in self._waiting if not waiting.done()]

    def _mark_victims(self, node: GatewayNode, archived: Position) -> None:
        may_be_lost = bool(self.scenario.outages) and node.publisher.confirmed > archived
        for outcome in self.outcomes:
            if outcome.arrival.gateway == node.gateway_name:
                outcome.is_cut_off |= outcome.arrival.spec.request in node.gateway.live
                outcome.is_untold |= node.publisher.unsent > 0 or may_be_lost

    async def _outage(self, outage: LogOutage) -> None:
        store = self.world.store
        await self._until(outage.at_ms)
        store.is_down = True
        await self._until(outage.until_ms)
        if outage.is_flush:
            store.flush()
        else:
            store.restart(lose=outage.lose)
        store.is_down = False

    async def _watch_blocks(self) -> None:
        """P05 and P07 at many moments: owned + free + reserved == total, and every block in the life it was given."""
        while True:
            await asyncio.sleep(0.05)
            for node in self.llumlets.values():
                if node.is_up:
                    account = node.engine.account()
                    if account.owned + account.free + account.reserved != account.total:
                        self.world.breaches.append(f"P07 {node.name}: {account}")
                    self.world.breaches += (f"P05 {node.name}: {fault}" for fault in node.engine.faults())

    # --- operators ---------------------------------------------------------------------------

    async def _order(self, index: int, order: Order) -> None:
        await self._until(order.at_ms)
        publisher, operation = self.admin.publisher, f"op-{index}"
        if order.kind == "move":
            live = sorted(name for gateway in self.gateways.values() for name in gateway.gateway.live)
            if live:
                request = live[int(len(live) * order.choice)]
                publisher.record(
                    MoveRequested(operation=operation, request=request, target=order.instance, actor="nemesis")
                )
            return
        kind = DrainRequested if order.kind == "drain" else DrainCancelled
        assert order.instance is not None
        publisher.record(kind(operation=operation, instance=order.instance, actor="nemesis"))

    # --- clients -----------------------------------------------------------------------------

    async def _client(self, outcome: Outcome) -> None:
        arrival = outcome.arrival
        await self._until(arrival.at_ms)
        live = await self._admitted(arrival)
        leaving = asyncio.create_task(self._leave_at(outcome, live))
        reading = asyncio.create_task(self._read(outcome, live))
        cut_off = asyncio.create_task(self._wait_cut_off(outcome))
        await asyncio.wait({reading, cut_off}, return_when=asyncio.FIRST_COMPLETED)
        for task in (leaving, reading, cut_off):
            task.cancel()

    async def _admitted(self, arrival: Arrival) -> Live:
        """Knock until a gateway takes the request: clients retry a 503."""
        while True:
            node = self.gateways[arrival.gateway]
            if node.is_up:
                try:
                    return node.gateway.admit(arrival.spec)
                except Refused as refusal:
                    if refusal.code not in ("no_capacity", "draining"):
                        raise
            await asyncio.sleep(ADMIT_RETRY_S)

    async def _read(self, outcome: Outcome, live: Live) -> None:
        leaves_after = outcome.arrival.leaves_after_tokens
        async for chunk in live:
            if outcome.has_left:
                return
            outcome.ids += chunk.ids
            outcome.finish, outcome.error = chunk.finish, chunk.error
            if leaves_after is not None and len(outcome.ids) >= leaves_after and outcome.finish is None:
                outcome.has_left = True
                live.cancel()
                return

    async def _leave_at(self, outcome: Outcome, live: Live) -> None:
        if outcome.arrival.leaves_at_ms is None:
            return
        await self._until(outcome.arrival.leaves_at_ms)
        if outcome.finish is None and not live.is_over:
            outcome.has_left = True
            live.cancel()

    async def _wait_cut_off(self, outcome: Outcome) -> None:
        while not outcome.is_cut_off:
            await asyncio.sleep(0.5)
