"""KV that is lengths alone moves in every scenario, in the time that its bytes would need on a link."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from midstream.api.simulation.run import quiet
from midstream.api.simulation.scenarios.cluster import GBIT_PER_S, Client, Cluster
from midstream.api.simulation.scenarios.play import ENGINE, Played, killed
from midstream.control.events import (
    DrainRequested,
    Event,
    InstanceDrained,
    MigrationAborted,
    MigrationCommitted,
    MoveRequested,
    RoundCopied,
)
from midstream.control.replay import verify
from midstream.control.simulate.loop import run_virtual
from midstream.control.state import PolicyChoice, PolicySettings
from midstream.instance.engines.sim.config import SimConfig

quiet()

LENGTHS = replace(
    ENGINE, kv="lengths", prefix_cache=False, steps_at_once_max=64, bytes_per_token=327_680, stream_interval_ms=1_000.0
)
FLOOD = PolicyChoice("flood", {"instance": "i0"})
Disturb = Callable[[Cluster], Awaitable[None]]


def play(
    clients: list[Client], disturb: Disturb, policies: PolicySettings, engine: SimConfig = LENGTHS
) -> tuple[Played, Cluster]:
    async def run() -> tuple[Played, Cluster]:
        cluster = Cluster({"i0": engine, "i1": engine}, policies=policies, seed=1)
        await cluster.start()
        disturbing = asyncio.create_task(disturb(cluster))
        seen = await cluster.play(clients)
        await disturbing
        await asyncio.sleep(2.0)
        accounts = [node.engine.account() for node in cluster.llumlets.values() if node.is_up]
        assert [(account.owned, account.reserved) for account in accounts] == [(0, 0)] * len(accounts)
        await cluster.stop()
        return Played(seen, await cluster.history()), cluster

    return run_virtual(run, seed=1, timeout_s=1_000.0)


def said(run: Played, kind: type[Event]) -> list[Any]:
    return [entry.fact.event for entry in run.entries if isinstance(entry.fact.event, kind)]


async def until_copied(cluster: Cluster) -> None:
    """Wait until a move has begun, and its copy with it."""
    async with asyncio.timeout(30):
        while not cluster.state.migrations:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.03)


def test_P16_a_drain_and_a_balance_move_blocks_without_bytes_at_the_speed_of_the_link() -> None:
    """All requests go to one instance: balancing takes some away; then it is drained of the others."""

    async def drain(cluster: Cluster) -> None:
        await asyncio.sleep(4.0)
        order = DrainRequested(operation="drain", instance="i0", actor="test")
        cluster.admin.publisher.record(order)

    clients = [Client(at_ms=10.0 * index, prompt_tokens=200, output_tokens=200) for index in range(10)]
    policies = PolicySettings(dispatch=FLOOD, moves=(PolicyChoice("drain"), PolicyChoice("balance")))
    run, _ = play(clients, drain, policies)
    assert killed(run.seen) == 0
    assert said(run, MigrationAborted) == []
    assert {event.owner.instance for event in said(run, InstanceDrained)} == {"i0"}
    before = next(entry.fact.at_ms for entry in run.entries if isinstance(entry.fact.event, DrainRequested))
    moved = [entry.fact.at_ms for entry in run.entries if isinstance(entry.fact.event, MigrationCommitted)]
    assert min(moved) < before < max(moved), "both kinds of moves are meant"
    rounds = said(run, RoundCopied)
    for event in rounds:
        assert event.copied_bytes == event.blocks * LENGTHS.block_bytes
        assert event.duration_ms >= event.copied_bytes / (GBIT_PER_S * 1e6 / 8)
    assert verify(run.entries).first_difference is None


def test_P09_a_client_that_leaves_in_mid_copy_frees_both_sides() -> None:
    async def leave(cluster: Cluster) -> None:
        cluster.admin.publisher.record(MoveRequested(operation="o", request="r1", target="i1", actor="test"))
        await until_copied(cluster)
        (live,) = cluster.gateway.gateway.live.values()
        live.cancel()

    run, _ = play([Client(at_ms=0.0, prompt_tokens=2_000, output_tokens=400)], leave, PolicySettings(moves=()))
    assert [event.stage for event in said(run, MigrationAborted)] == ["copying"]
    assert not run.seen[0].is_finished


@pytest.mark.parametrize(("victim", "code"), [("i0", "source_lost"), ("i1", "transfer_failed")])
def test_P10_a_peer_that_dies_in_mid_copy_ends_the_move_and_not_the_request(victim: str, code: str) -> None:
    async def kill(cluster: Cluster) -> None:
        order = MoveRequested(operation="o", request="r1", target="i1", actor="test")
        cluster.admin.publisher.record(order)
        await until_copied(cluster)
        await cluster.llumlets[victim].crash()
        await cluster.llumlets[victim].revive()

    policies = PolicySettings(dispatch=FLOOD, moves=())
    run, _ = play([Client(at_ms=0.0, prompt_tokens=2_000, output_tokens=400)], kill, policies)
    assert killed(run.seen) == 0
    assert [event.code for event in said(run, MigrationAborted)] == [code]
