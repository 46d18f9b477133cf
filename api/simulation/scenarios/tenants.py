"""Ten tenants want the same of a cluster that is too small for them; one of them floods it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from midstream.api.bench.report import rank
from midstream.api.simulation.scenarios.cluster import Client, Seen
from midstream.api.simulation.scenarios.play import Played, arrivals, first_ms, killed, play
from midstream.control.state import PolicySettings

TENANTS = 10
FLOOD = "t0"
FLOOD_FACTOR = 10
INSTANCES = 2


def clients(seed: int, *, rate_s: float, seconds: float) -> list[Client]:
    """Each tenant asks `rate_s` times a second, the flood ten times as often."""
    rng = random.Random(f"tenants {seed}")
    return [
        Client(at_ms=at_ms, prompt_tokens=rng.randint(50, 200), output_tokens=rng.randint(20, 120), tenant=name)
        for name in (f"t{index}" for index in range(TENANTS))
        for at_ms in arrivals(rng, rate_s * (FLOOD_FACTOR if name == FLOOD else 1), seconds * 1e3)
    ]


def run_arms(seed: int, *, rate_s: float, seconds: float) -> dict[str, Played]:
    """`shares`: each tenant is known by its name. `fifo`: all are one to the gateway, first come first served."""
    by_name = clients(seed, rate_s=rate_s, seconds=seconds)
    return {
        "shares": play(by_name, instances=INSTANCES, policies=PolicySettings(), seed=seed),
        "fifo": play(by_name, instances=INSTANCES, policies=PolicySettings(), seed=seed, are_tenants_known=False),
    }


def figures(runs: list[dict[str, Played]], *, seconds: float) -> dict[str, float | int | None]:
    """Jain's index over the tokens that each tenant got while all of them asked, and what waiting cost the others."""
    found: dict[str, float | int | None] = {}
    for arm in ("shares", "fifo"):
        seen = [one for run in runs for one in run[arm].seen]
        found[f"jain_{arm}"] = jain(service(seen, seconds))
        found[f"others_first_p99_ms_{arm}"] = rank(first_ms(one for one in seen if one.client.tenant != FLOOD), 0.99)
    return found | {"killed": sum(killed(run["shares"].seen) for run in runs)}


def service(seen: Sequence[Seen], seconds: float) -> list[float]:
    """Tokens, prompts included, of each tenant's requests that ended while all tenants still asked."""
    got = dict.fromkeys((f"t{index}" for index in range(TENANTS)), 0.0)
    for one in seen:
        if one.last_ms is not None and one.client.at_ms + one.last_ms <= seconds * 1e3:
            got[one.client.tenant] += one.client.prompt_tokens + one.tokens
    return list(got.values())


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index: 1 when all are equal, 1/n when one has everything (Jain, Chiu, Hawe, DEC-TR-301)."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0
