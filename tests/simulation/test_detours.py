"""Two instances whose best transfer does not connect them: the first move fails, the next goes another way."""

from __future__ import annotations

import asyncio
import random

from midstream.api.simulation.run import quiet
from midstream.api.simulation.scenarios.cluster import Cluster
from midstream.api.simulation.scenarios.play import ENGINE
from midstream.control.events import Entry, MigrationAborted, MigrationPrepared, MoveRequested
from midstream.control.ids import Node
from midstream.control.simulate.loop import run_virtual
from midstream.control.state import PolicySettings
from midstream.instance.engines.sim.config import SimConfig
from midstream.migration.protocol.messages import RequestSpec, Sampling
from midstream.migration.transfers.base import Transfer
from midstream.migration.transfers.memory import MemoryTransfer

quiet()

SPEC = RequestSpec(
    request="r",
    prompt=tuple(random.Random(1).choices(range(3, 127), k=320)),
    sampling=Sampling(max_tokens=1_000, temperature=0.0, ignore_eos=True),
)


class Unreachable(MemoryTransfer):
    """Offered by both ends, and no peer ever gets through."""

    name = offer = "unreachable"

    async def start(self) -> str:
        return "nowhere"


async def moved_by_hand(cluster: Cluster, operation: str) -> None:
    (target,) = set(cluster.llumlets) - {cluster.state.requests["r"].owner.instance}
    cluster.admin.publisher.record(MoveRequested(operation=operation, request="r", target=target, actor="test"))
    while operation not in cluster.state.operations or cluster.state.operations[operation].status == "accepted":
        await asyncio.sleep(0.05)
    while any(move.is_open for move in cluster.state.migrations.values()):
        await asyncio.sleep(0.05)


async def play() -> list[Entry]:
    cluster = Cluster({"a": ENGINE, "b": ENGINE}, policies=PolicySettings(moves=()))
    usual = cluster.world.transfers

    def transfers(node: Node, config: SimConfig) -> dict[str, Transfer]:
        return {Unreachable.name: Unreachable(cluster.world.network, node), **usual(node, config)}

    cluster.world.transfers = transfers
    await cluster.start()
    live = cluster.gateway.gateway.admit(SPEC)
    await asyncio.sleep(1.0)
    await moved_by_hand(cluster, "first")
    await moved_by_hand(cluster, "second")
    async for _ in live:
        pass
    await cluster.stop()
    return await cluster.history()


def test_P26_what_could_not_connect_is_not_asked_for_again() -> None:
    said = [entry.fact.event for entry in run_virtual(play, seed=1, timeout_s=1_000.0)]
    prepared = [event for event in said if isinstance(event, MigrationPrepared)]
    assert [event.transfer for event in prepared] == ["unreachable", "memory"]
    assert "unreachable!no connection to " in prepared[1].transfer_why
    assert [event.code for event in said if isinstance(event, MigrationAborted)] == ["no_connection"]
