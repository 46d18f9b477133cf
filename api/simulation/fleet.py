"""A fleet on virtual time: one gateway, one controller and any number of instances, made of the production classes.

Nothing fails here; what is asked is how well a fleet serves a workload. `api.simulation.cluster` is the place for
faults. Timers that only failures need are slow, tokens between a request's first and last travel in bulk.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import msgspec

from midstream.api.gateway.gateway import Gateway
from midstream.api.gateway.settings import GatewaySettings
from midstream.api.simulation.record import FleetRecord
from midstream.api.simulation.requests import spec_of
from midstream.api.traces.load import TraceRow
from midstream.control.adapters.memory_feed import FedFollower, FeedRecorder, FeedStore
from midstream.control.adapters.memory_log import MemoryLog
from midstream.control.errors import Refused
from midstream.control.events import DrainRequested, Entry, PolicyConfigured, RequestFailed, RequestFinished
from midstream.control.service import Controller
from midstream.control.simulate.loop import VirtualClock, run_virtual
from midstream.control.state import PolicySettings
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.engine import SimEngine
from midstream.instance.llumlet import Llumlet
from midstream.instance.settings import LlumletSettings
from midstream.migration.transfers.paced import Links, PacedTransfer
from midstream.migration.wires.memory import MemoryNetwork, MemoryWire

EPOCH_MS = 1_700_000_000_000
WARM_UP_S = 1.0
"""Until every instance is registered and the first decision is made."""
START_GAP_S = (0.001, 0.02)
"""Between the starts of two instances: reports of different ones never fall on the same instant."""
ENDS = (RequestFinished, RequestFailed)
REQUEST_MAX_S = 1e6
VIRTUAL_MAX_S = 1e7

STREAM_INTERVAL_MS = 30_000.0
LLUMLET = LlumletSettings(
    housekeeping_ms=2_000, command_wait_ms=600_000, gateway_lease_ms=60_000, repeat_ms=1_000, resend_ms=1_000
)
GATEWAY = GatewaySettings(
    requests_max=10_000_000, tenant_waiting_max=10_000_000, request_ms=REQUEST_MAX_S * 1e3, ping_ms=5_000,
    silent_ms=20_000, alone_ms=60_000, housekeeping_ms=1_000, quiet_ms=4 * STREAM_INTERVAL_MS,
)  # fmt: skip


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Who serves, and by which policies."""

    instances: int
    engine: SimConfig
    policies: PolicySettings = PolicySettings()
    seed: int = 0
    gbit_per_s: float = 25.0
    """What one instance sends, and receives, at most."""
    latency_ms: float = 0.2
    digests: bool = False
    """Digest the log, to compare runs byte for byte."""
    queue_depth: int = GATEWAY.queue_depth
    """Requests that wait at an engine; more wait at the gateway. 0: all are sent on at once."""
    drain_at_s: float | None = None
    """When the first instance is asked to drain."""


class Fleet:
    """One run. `play` returns when every request has ended."""

    def __init__(self, plan: FleetPlan) -> None:
        self.plan = plan
        self.record = FleetRecord(digests=plan.digests)
        self._clock = VirtualClock(asyncio.get_running_loop(), EPOCH_MS)
        self.store = FeedStore(self._clock)
        self._network = MemoryNetwork(random.Random(f"network {plan.seed}"))
        self._links = Links(plan.gbit_per_s * 1e9 / 8, plan.latency_ms / 1e3)
        log = MemoryLog(self.store, opened_by="fleet")
        follower = FedFollower(log, self.store)
        seeds = random.Random(f"controller {plan.seed}")
        self._controller = Controller(
            log=log, follower=follower, clock=self._clock, name="controller",
            seed_source=lambda: seeds.getrandbits(32), snapshot_entries=1 << 60, snapshot_s=float("inf"),
        )  # fmt: skip
        self._gateway = Gateway(
            name="g", wire=self._wire("gateway/g"), follower=follower, recorder=self._recorder("gateway/g"),
            clock=self._clock,
            settings=msgspec.structs.replace(GATEWAY, queue_depth=plan.queue_depth), models=("sim",),
        )  # fmt: skip
        self.store.readers.append(self._read)
        self.llumlets = [self._llumlet(f"i{index:02}", log) for index in range(plan.instances)]
        self._ended = asyncio.Event()
        self._wanted: int | None = None
        self.refused = 0
        self.began = 0.0

    async def play(self, rows: Sequence[TraceRow]) -> None:
        """Send every request at its time, and wait for the last to end."""
        await self._start()
        began = self.began = asyncio.get_running_loop().time()
        if self.plan.drain_at_s is not None:
            asyncio.get_running_loop().call_at(began + self.plan.drain_at_s, self._drain)
        for index, row in enumerate(rows):
            wait_s = began + row.arrival_s - asyncio.get_running_loop().time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._admit(index, row)
        self._wanted = len(rows) - self.refused
        self._look_for_the_end()
        await self._ended.wait()

    async def _start(self) -> None:
        admin = self._recorder("admin")
        admin.record(PolicyConfigured(policies=self.plan.policies, actor="fleet"))
        starts = random.Random(f"starts {self.plan.seed}")
        for llumlet in self.llumlets:
            await llumlet.start()
            await asyncio.sleep(starts.uniform(*START_GAP_S))
        await self._gateway.start()
        self._deciding = asyncio.get_running_loop().create_task(self._controller.run())
        await asyncio.sleep(WARM_UP_S)

    def _admit(self, index: int, row: TraceRow) -> None:
        try:
            self._gateway.admit(spec_of(index, row))
        except Refused:
            self.refused += 1

    def _drain(self) -> None:
        order = DrainRequested(operation="drain", instance=self.llumlets[0].me.instance, actor="fleet")
        self._recorder("operator").record(order)

    def _read(self, entry: Entry) -> None:
        self.record.read(entry)
        if type(entry.fact.event) in ENDS:
            self._look_for_the_end()

    def _look_for_the_end(self) -> None:
        record = self.record
        if self._wanted is not None and len(record.finished) + len(record.failed) >= self._wanted:
            self._ended.set()

    def _llumlet(self, instance: str, log: MemoryLog) -> Llumlet:
        wire = self._wire(f"llumlet/{instance}")
        transfer = PacedTransfer(self._links, wire.node)
        return Llumlet(
            instance=instance,
            engine=SimEngine(self.plan.engine, {transfer.name: transfer}, witness=self.record),
            wire=wire,
            log=log,
            recorder=self._recorder(wire.node.name),
            clock=self._clock,
            settings=LLUMLET,
        )

    def _wire(self, name: str) -> MemoryWire:
        return MemoryWire(self._network, name, 1)

    def _recorder(self, source: str) -> FeedRecorder:
        return FeedRecorder(self.store, source, 1, self._clock)


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has ended."""

    record: FleetRecord
    refused: int
    """Requests that were never admitted."""
    simulated_s: float
    busy_s: float
    """From the first arrival to the last end."""
    began_ms: int
    """The log's time at the start of the workload."""


def play(plan: FleetPlan, rows: Sequence[TraceRow], look: Callable[[Fleet], None] = lambda fleet: None) -> Played:
    """Play rows on a fresh fleet and a fresh virtual loop; `look` may keep the fleet before it begins."""

    async def main() -> Played:
        fleet = Fleet(plan)
        look(fleet)
        await fleet.play(rows)
        now = asyncio.get_running_loop().time()
        return Played(
            record=fleet.record,
            refused=fleet.refused,
            simulated_s=now,
            busy_s=now - fleet.began,
            began_ms=EPOCH_MS + round(fleet.began * 1e3),
        )

    return run_virtual(main, seed=plan.seed, timeout_s=VIRTUAL_MAX_S, is_shuffled=False)
