"""A day in minutes: load rises and falls; a fixed fleet for its peak against one that grows and shrinks."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

from msgspec import structs

from midstream.api.bench.report import rank
from midstream.api.simulation.fleet import GATEWAY, LLUMLET
from midstream.api.simulation.nodes import LlumletNode
from midstream.api.simulation.scenarios.cluster import Client, Cluster
from midstream.api.simulation.scenarios.play import ENGINE, VIRTUAL_MAX_S, Played, first_ms, killed
from midstream.control.events import (
    ClusterSampled,
    Entry,
    InstanceLost,
    InstanceRegistered,
    InstanceStopped,
    ScaleDecided,
)
from midstream.control.scaler import ScalerService
from midstream.control.simulate.loop import run_virtual
from midstream.control.state import PolicyChoice, PolicySettings

BOOT_S: Final = 20.0
"""Virtual time that a new instance takes until it serves: 1 % of the benchmark's day, 15 minutes of a real one."""
NIGHT_INSTANCES: Final = 2
"""What a scaled fleet begins its day with: the night's 2.25 requests a second are too many for one (1.1 at most)."""
FLAP_MS: Final = 60_000
"""An instance that is removed and another added within so long is flapping."""
HOUR_MS: Final = 3_600_000
GBIT_PER_S: Final = 25.0
DAY_ENGINE: Final = structs.replace(
    ENGINE,
    kv="lengths",
    prefix_cache=False,
    steps_at_once_max=256,
    stream_interval_ms=30_000.0,
    bytes_per_token=327_680,
)
"""The engine of all scenarios, its blocks counted instead of filled; they move as large as those of a 70B model."""
ORACLE_MS: Final = 30_000
"""The oracle knows the load for so long, and knew it."""
ORACLE_ROOM: Final = 22
"""Blocks that one request holds: an instance with less room is full."""
TOLD: Final = (ClusterSampled, InstanceLost, InstanceRegistered, InstanceStopped, ScaleDecided)
ARMS: Final = ("fixed", "one_less", "scaled")


class SimScaler:
    """Starts and ends simulated instances; a start takes its time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def add(self, instance: str, scaling: str) -> None:
        """See `Scaler`."""
        if instance not in self._cluster.llumlets:
            node = LlumletNode(self._cluster.world, instance, DAY_ENGINE, LLUMLET)
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


def run_arm(arm: str, seed: int, day: Sequence[Client], *, fixed: int) -> Played:
    """`fixed`: as many instances all day. `one_less`: that. `scaled`: as many as the policy wants."""
    match arm:
        case "scaled":
            return run_scaled(seed, day, instances_max=fixed)
        case "one_less":
            return run_fixed(seed, day, instances=fixed - 1)
        case _:
            return run_fixed(seed, day, instances=fixed)


def run_fixed(seed: int, day: Sequence[Client], *, instances: int) -> Played:
    """As many instances all day."""
    return _run(seed, day, instances, PolicySettings())


def run_scaled(seed: int, day: Sequence[Client], *, instances_max: int, **params: Any) -> Played:
    """What serves the night at first, then as many as the policy wants; `params` are its own, besides the bounds."""
    bounds = {"instances_min": 1, "instances_max": instances_max, "boot_ms": int(BOOT_S * 1e3)}
    return _run(seed, day, NIGHT_INSTANCES, PolicySettings(scale=PolicyChoice("scale_freeness", bounds | params)))


def _run(seed: int, day: Sequence[Client], instances: int, policies: PolicySettings) -> Played:
    async def run() -> Played:
        cluster = Cluster(
            {f"i{index}": DAY_ENGINE for index in range(instances)},
            policies=policies,
            gateway=GATEWAY,
            seed=seed,
            llumlet=LLUMLET,
            gbit_per_s=GBIT_PER_S,
        )
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
    """What scaling saves, what it costs, whether it flaps, and whether the fixed fleet is as small as it can be."""
    seen = {arm: [one for run in runs for one in run[arm].seen] for arm in ARMS}
    saved = [instance_hours(run["scaled"].entries) / instance_hours(run["fixed"].entries) for run in runs]
    p99 = {arm: rank(first_ms(seen[arm]), 0.99) or math.inf for arm in ARMS}
    by_seed = [_p99(run["scaled"]) / _p99(run["fixed"]) for run in runs]
    return {
        "instance_hours_ratio": _hours(runs, "scaled") / _hours(runs, "fixed"),
        "instance_hours_ratio_max": max(saved),
        "oracle_hours_ratio": sum(oracle_hours(run["scaled"].entries) for run in runs) / _hours(runs, "fixed"),
        "first_p99_ratio": p99["scaled"] / p99["fixed"],
        "first_p99_ratio_max": max(by_seed),
        "first_p99_ratio_one_less": p99["one_less"] / p99["fixed"],
        "flaps": sum(flaps(run["scaled"].entries) for run in runs),
        "decisions": sum(len(decisions(run["scaled"].entries)) for run in runs),
        "lost": killed(seen["scaled"]),
    }


def told(played: Played) -> Played:
    """With those facts alone from which the figures are taken: it is to travel between processes."""
    entries = [entry for entry in played.entries[:-1] if isinstance(entry.fact.event, TOLD)]
    return Played(played.seen, [*entries, played.entries[-1]])


def _hours(runs: Iterable[dict[str, Played]], arm: str) -> float:
    return sum(instance_hours(run[arm].entries) for run in runs)


def _p99(run: Played) -> float:
    return rank(first_ms(run.seen), 0.99) or math.inf


def sizes(entries: Iterable[Entry]) -> Iterator[tuple[int, int, int]]:
    """(when, instances there, instances that could serve the load of the time around it), sample by sample."""
    samples = [entry.fact.event for entry in entries if isinstance(entry.fact.event, ClusterSampled)]
    each = next((sample.blocks_total / sample.instances for sample in samples if sample.instances), math.inf)
    first = last = 0
    for sample in samples:
        while samples[first].now_ms < sample.now_ms - ORACLE_MS:
            first += 1
        while last < len(samples) and samples[last].now_ms <= sample.now_ms + ORACLE_MS:
            last += 1
        busiest = max(other.blocks_used for other in samples[first:last])
        yield sample.now_ms, sample.instances, max(1, math.ceil(busiest / (each - ORACLE_ROOM)))


def oracle_hours(entries: Iterable[Entry]) -> float:
    """Instance hours of the fewest instances that could have served, known beforehand and there at once."""
    found = list(sizes(entries))
    steps = pairwise(found)
    return sum((after - at_ms) * needed for (at_ms, _, needed), (after, _, _) in steps) / HOUR_MS


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
