"""A cluster under load on virtual time, without faults: what clients saw, and what was in the log.

Scenarios of scheduling (classes, tenants, scaling, roles) are functions that make clients and read outcomes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
from msgspec import structs

from midstream.api.gateway.settings import GatewaySettings
from midstream.api.simulation.nodes import (
    LLUMLET,
    AdminNode,
    ArchiverNode,
    ControllerNode,
    GatewayNode,
    LlumletNode,
    World,
)
from midstream.control.adapters.memory_log import MemoryLogStore
from midstream.control.errors import Refused
from midstream.control.events import Entry, PolicyConfigured
from midstream.control.ids import START
from midstream.control.simulate.faults import FaultPlan
from midstream.control.simulate.loop import VirtualClock
from midstream.control.state import PolicySettings, State
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.settings import LlumletSettings
from midstream.migration.protocol.messages import RequestSpec, Sampling
from midstream.migration.wires.memory import MemoryNetwork

Role = Literal["mixed", "prefill", "decode"]
EPOCH_MS = 1_700_000_000_000
WARM_S = 1.5
"""Until every instance is known and the policies are in force."""
ADMIT_RETRY_S = 0.1
SETTLE_S = 3.0
GBIT_PER_S = 8.0
"""What one instance sends, and receives, at most."""
HISTORY_PAGE = 10_000


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """One request: when it comes, how long it is, of which class and tenant."""

    at_ms: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    tenant: str = ""


class Seen(msgspec.Struct, kw_only=True):
    """What one client saw, milliseconds from its arrival; retries after a refusal included."""

    client: Client
    first_ms: float | None = None
    last_ms: float | None = None
    tokens: int = 0
    refusals: int = 0
    error: str | None = None
    is_finished: bool = False

    @property
    def decode_ms(self) -> float:
        """Mean time of one output token after the first."""
        if self.first_ms is None or self.last_ms is None or self.tokens < 2:
            return 0.0
        return (self.last_ms - self.first_ms) / (self.tokens - 1)


class Cluster:
    """One gateway, one controller, any number of instances; instances may come and go while it runs."""

    def __init__(
        self,
        engines: Mapping[str, SimConfig],
        *,
        policies: PolicySettings,
        gateway: GatewaySettings | None = None,
        seed: int = 0,
        are_tenants_known: bool = True,
        roles: Mapping[str, Role] = {},
        llumlet: LlumletSettings = LLUMLET,
        gbit_per_s: float = GBIT_PER_S,
    ) -> None:
        rng = random.Random(f"cluster {seed}")
        clock = VirtualClock(asyncio.get_running_loop(), EPOCH_MS)
        network = MemoryNetwork(rng, FaultPlan(()))
        self.world = World(network, MemoryLogStore(clock=clock), clock, rng, gbit_per_s * 1e6 / 8)
        self.llumlets = {
            name: LlumletNode(self.world, name, config, structs.replace(llumlet, role=roles.get(name, "mixed")))
            for name, config in engines.items()
        }
        self.gateway = GatewayNode(self.world, "g", gateway or GatewaySettings())
        self.controller = ControllerNode(self.world, "c")
        self.archiver = ArchiverNode(self.world)
        self.admin = AdminNode(self.world)
        self.policies = policies
        self._are_tenants_known = are_tenants_known
        self._rng = rng
        self._count = 0

    @property
    def state(self) -> State:
        """The gateway's fold."""
        return self.gateway.follower.state

    async def start(self) -> None:
        """Start every node and put the policies in force."""
        for node in (self.controller, self.archiver, self.admin, *self.llumlets.values(), self.gateway):
            await node.start()
        self.admin.publisher.record(PolicyConfigured(policies=self.policies, actor="scenario"))
        await asyncio.sleep(WARM_S)

    async def play(self, clients: Iterable[Client]) -> list[Seen]:
        """Let all clients come, in order of their times, and wait for the last to end."""
        began = asyncio.get_running_loop().time()
        seen: list[Seen] = []
        async with asyncio.TaskGroup() as group:
            for client in sorted(clients, key=lambda client: client.at_ms):
                wait_s = began + client.at_ms / 1e3 - asyncio.get_running_loop().time()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                seen.append(Seen(client=client))
                group.create_task(self._ask(seen[-1]))
        return seen

    async def stop(self) -> None:
        """Let the last facts be said and archived, then end every node."""
        await asyncio.sleep(SETTLE_S)
        for node in (self.gateway, *self.llumlets.values(), self.controller, self.archiver, self.admin):
            await node.crash()

    async def history(self) -> list[Entry]:
        """The whole archived log."""
        entries: list[Entry] = []
        after = START
        while page := await self.world.archive.history(after, HISTORY_PAGE):
            entries += page
            after = page[-1].position
        return entries

    async def _ask(self, seen: Seen) -> None:
        loop, client = asyncio.get_running_loop(), seen.client
        began = loop.time()
        self._count += 1
        spec = self._spec(client, f"r{self._count}")
        while True:
            try:
                stream = self.gateway.gateway.admit(spec)
                break
            except Refused:
                seen.refusals += 1
                await asyncio.sleep(ADMIT_RETRY_S)
        async for chunk in stream:
            seen.last_ms = (loop.time() - began) * 1e3
            if seen.first_ms is None and chunk.ids:
                seen.first_ms = seen.last_ms
            seen.tokens += len(chunk.ids)
            seen.error = None if chunk.error is None else chunk.error[0]
            seen.is_finished = chunk.finish is not None

    def _spec(self, client: Client, request: str) -> RequestSpec:
        sampling = Sampling(max_tokens=client.output_tokens, temperature=0.0, ignore_eos=True)
        prompt = tuple(self._rng.randint(3, 127) for _ in range(client.prompt_tokens))
        return RequestSpec(
            request=request, prompt=prompt, sampling=sampling, priority=client.priority,
            arrival_ms=self.world.clock.now_ms(), tenant=client.tenant if self._are_tenants_known else "",
        )  # fmt: skip
