"""Two classes share a cluster that is nearly full; the high class must hardly notice the other."""

from __future__ import annotations

import random

from msgspec.structs import replace

from midstream.api.bench.report import rank
from midstream.api.simulation.scenarios.cluster import Client, Seen
from midstream.api.simulation.scenarios.play import Played, arrivals, first_ms, killed, mean, play
from midstream.control.state import PolicySettings

HIGH, LOW = -1, 1
HIGH_SHARE = 0.1
INSTANCES = 4


def clients(seed: int, *, rate_s: float, seconds: float) -> list[Client]:
    """Poisson arrivals; one in ten is of the high class. The tenant keeps the class for arms that have none."""
    rng = random.Random(f"classes {seed}")
    return [_client(rng, at_ms) for at_ms in arrivals(rng, rate_s, seconds * 1e3)]


def _client(rng: random.Random, at_ms: float) -> Client:
    is_high = rng.random() < HIGH_SHARE
    return Client(
        at_ms=at_ms,
        prompt_tokens=rng.randint(50, 300),
        output_tokens=rng.randint(20, 300),
        priority=HIGH if is_high else LOW,
        tenant="high" if is_high else "low",
    )


def run_arms(seed: int, *, rate_s: float, seconds: float) -> dict[str, Played]:
    """`idle`: the high class alone. `flat`: everybody in one class. `classes`: as it should be."""
    both = clients(seed, rate_s=rate_s, seconds=seconds)
    arms = {
        "idle": [client for client in both if client.priority == HIGH],
        "flat": [replace(client, priority=LOW) for client in both],
        "classes": both,
    }
    return {arm: play(who, instances=INSTANCES, policies=PolicySettings(), seed=seed) for arm, who in arms.items()}


def figures(runs: list[dict[str, Played]]) -> dict[str, float | int | None]:
    """The promise in numbers, all seeds together: high against an idle cluster, low against `flat`."""
    idle, with_classes = _high_p99(runs, "idle"), _high_p99(runs, "classes")
    ratio = None if not idle or with_classes is None else with_classes / idle
    return {
        "high_first_p99_ratio": ratio,
        "low_end_to_end_ratio": _low_mean(runs, "classes") / _low_mean(runs, "flat"),
        "killed": sum(killed(run["classes"].seen) for run in runs),
    }


def _of(runs: list[dict[str, Played]], arm: str, tenant: str) -> list[Seen]:
    return [one for run in runs for one in run[arm].seen if one.client.tenant == tenant]


def _high_p99(runs: list[dict[str, Played]], arm: str) -> float | None:
    return rank(first_ms(_of(runs, arm, "high")), 0.99)


def _low_mean(runs: list[dict[str, Played]], arm: str) -> float:
    return mean(one.last_ms for one in _of(runs, arm, "low") if one.last_ms is not None)
