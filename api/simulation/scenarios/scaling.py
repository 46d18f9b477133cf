"""A day in minutes: load rises and falls; a fixed fleet for its peak against one that grows and shrinks."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

from midstream.api.bench.report import rank
from midstream.api.simulation.nodes import LlumletNode
from midstream.api.simulation.scenarios.cluster import Client, Cluster
from midstream.api.simulation.scenarios.play import ENGINE, VIRTUAL_MAX_S, Played, first_ms, killed, play
from midstream.control.events import (
    Entry,
    InstanceLost,
    InstanceRegistered,
    InstanceStopped,
    ScaleDecided,
)
from midstream.control.scaler import ScalerService
from midstream.control.simulate.loop import run_virtual
from midstream.control.state import PolicyChoice, PolicySettings

BOOT_S = 10.0
"""Virtual time that a new instance takes until it serves."""
FLAP_MS = 60_000
"""An instance that is removed and another added within so long is flapping."""
HOUR_MS = 3_600_000

PARAMS = {
    "instances_min": 1,
    "instances_max": 4,
    "low": 10.0,
    "high": 24.0,
    "margin": 1.6,
    "out_after_ms": 2_000,
    "in_after_ms": 40_000,
    "boot_ms": int(BOOT_S * 1e3),
    "trend_ms": 20_000,
}


class SimScaler:
    """Starts and ends simulated instances; a start takes its time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def add(self, instance: str, scaling: str) -> None:
        """See `Scaler`."""
        if instance not in self._cluster.llumlets:
            node = LlumletNode(self._cluster.world, instance, ENGINE)
            self._cluster.llumlets[instance] = node
            await asyncio.sleep(BOOT_S)
            await node.start()

    async def remove(self, instance: str, scaling: str) -> None:
        """See `Scaler`."""
        node = self._cluster.llumlets[instance]
        if node.is_up:
            await node.retire()


def clients(seed: int, *, peak_s: float, trough: float, seconds: float) -> list[Client]:
    """One day: from `trough` x the peak rate up to the peak at noon and down again (thinned Poisson process)."""
    rng = random.Random(f"day {seed}")
    found, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(peak_s)) < seconds:
        level = trough + (1 - trough) * (1 - math.cos(2 * math.pi * at_s / seconds)) / 2
        size = (rng.randint(50, 300), rng.randint(20, 300))
        if rng.random() < level:
            found.append(Client(at_ms=at_s * 1e3, prompt_tokens=size[0], output_tokens=size[1]))
    return found


def run_arms(seed: int, day: Sequence[Client], *, fixed: int) -> dict[str, Played]:
    """`fixed`: as many instances all day. `scaled`: as many as the policy wants, one at first."""
    return {
        "fixed": play(day, instances=fixed, policies=PolicySettings(), seed=seed),
        "scaled": run_scaled(seed, day, instances_max=fixed),
    }


def run_scaled(seed: int, day: Sequence[Client], *, instances_max: int) -> Played:
    """One instance at first, then as many as the policy wants."""
    params = {**PARAMS, "instances_max": instances_max}

    async def run() -> Played:
        policies = PolicySettings(scale=PolicyChoice("scale_freeness", params))
        cluster = Cluster({"i0": ENGINE}, policies=policies, seed=seed)
        await cluster.start()
        service = ScalerService(
            follower=cluster.gateway.follower, scaler=SimScaler(cluster), recorder=cluster.admin.publisher
        )
        scaler = asyncio.create_task(service.run())
        seen = await cluster.play(day)
        scaler.cancel()
        await cluster.stop()
        return Played(seen, await cluster.history())

    return run_virtual(run, seed=seed, timeout_s=VIRTUAL_MAX_S)


def figures(runs: list[dict[str, Played]]) -> dict[str, float | int | None]:
    """What scaling saves, what it costs, and whether it flaps."""
    hours = {arm: sum(instance_hours(run[arm].entries) for run in runs) for arm in ("fixed", "scaled")}
    p99 = {arm: rank(first_ms(one for run in runs for one in run[arm].seen), 0.99) for arm in ("fixed", "scaled")}
    ratio = p99["scaled"] / p99["fixed"] if p99["scaled"] and p99["fixed"] else None
    return {
        "instance_hours_ratio": hours["scaled"] / hours["fixed"],
        "first_p99_ratio": ratio,
        "flaps": sum(flaps(run["scaled"].entries) for run in runs),
        "decisions": sum(len(decisions(run["scaled"].entries)) for run in runs),
        "lost": sum(killed(run["scaled"].seen) for run in runs),
    }


def decisions(entries: Iterable[Entry]) -> list[tuple[int, str, str]]:
    """(when, action, reason) of each decision."""
    return [
        (entry.fact.at_ms, entry.fact.event.action, entry.fact.event.reason)
        for entry in entries
        if isinstance(entry.fact.event, ScaleDecided)
    ]


def flaps(entries: Iterable[Entry]) -> int:
    """Times that the direction changed from down to up within a minute."""
    made = decisions(entries)
    return sum(
        before == "remove" and after != "remove" and at_ms - before_ms < FLAP_MS
        for (before_ms, before, _), (at_ms, after, _) in pairwise(made)
    )


def instance_hours(entries: Sequence[Entry]) -> float:
    """Time that instances were there, from the decision to start them (else their registration) to their end."""
    asked = {
        entry.fact.event.instance: entry.fact.at_ms
        for entry in entries
        if isinstance(entry.fact.event, ScaleDecided) and entry.fact.event.action == "add"
    }
    since: dict[str, int] = {}
    total = 0
    for entry in entries:
        match entry.fact.event:
            case InstanceRegistered() as event:
                since[event.owner.instance] = asked.get(event.owner.instance, entry.fact.at_ms)
            case InstanceStopped() | InstanceLost() as event:
                total += entry.fact.at_ms - since.pop(event.owner.instance, entry.fact.at_ms)
    end_ms = entries[-1].fact.at_ms
    return (total + sum(end_ms - at_ms for at_ms in since.values())) / HOUR_MS
