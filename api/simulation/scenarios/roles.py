"""Long prompts disturb those who are decoding; with prompts on instances of their own they do not."""

from __future__ import annotations

import random

from msgspec.structs import replace

from midstream.api.bench.report import rank
from midstream.api.simulation.scenarios.cluster import Client, Role
from midstream.api.simulation.scenarios.play import ENGINE, Played, arrivals, first_ms, killed, play
from midstream.control.events import FirstTokenDelivered, MigrationCommitted, MoveDecided
from midstream.control.state import PolicySettings

ROLES: dict[str, Role] = {"i0": "prefill", "i1": "decode", "i2": "decode"}
WIDE = replace(ENGINE, blocks_total=1_024, step_tokens_max=2_048)
"""Prompts of a thousand tokens fit, in its blocks and in one step."""


def clients(seed: int, *, rate_s: float, seconds: float) -> list[Client]:
    """Poisson arrivals with prompts of 500 to 1,500 tokens and 50 to 150 of output."""
    rng = random.Random(f"roles {seed}")
    return [
        Client(at_ms=at_ms, prompt_tokens=rng.randint(500, 1_500), output_tokens=rng.randint(50, 150))
        for at_ms in arrivals(rng, rate_s, seconds * 1e3)
    ]


def run_arms(seed: int, *, rate_s: float, seconds: float) -> dict[str, Played]:
    """`mixed`: three instances for everything. `roles`: one of the three for prompts, two for tokens."""
    who = clients(seed, rate_s=rate_s, seconds=seconds)
    return {
        "mixed": play(who, instances=len(ROLES), policies=PolicySettings(), seed=seed, engine=WIDE),
        "roles": play(who, instances=len(ROLES), policies=PolicySettings(), seed=seed, engine=WIDE, roles=ROLES),
    }


def figures(runs: list[dict[str, Played]]) -> dict[str, float | int | None]:
    """What the hand-over takes from the first token on, and what it does to both latencies."""
    found: dict[str, float | int | None] = {}
    for arm in ("mixed", "roles"):
        seen = [one for run in runs for one in run[arm].seen]
        found[f"first_p99_ms_{arm}"] = rank(first_ms(seen), 0.99)
        found[f"decode_p99_ms_{arm}"] = rank([one.decode_ms for one in seen], 0.99)
    delays = [delay for run in runs for delay in hand_over_ms(run["roles"])]
    return found | {
        "hand_overs": len(delays),
        "hand_over_p50_ms": rank(delays, 0.5),
        "hand_over_max_ms": max(delays, default=None),
        "killed": sum(killed(run["roles"].seen) for run in runs),
    }


def hand_over_ms(run: Played) -> list[float]:
    """From each first token to the flip of its hand-over, as the gateway's clock saw both."""
    first: dict[str, int] = {}
    of_policy: set[str] = set()
    found: list[float] = []
    for entry in run.entries:
        match entry.fact.event:
            case FirstTokenDelivered() as event:
                first[event.request] = entry.fact.at_ms
            case MoveDecided() as event if event.policy == "prefill_decode":
                of_policy.add(event.migration)
            case MigrationCommitted() as event if event.migration in of_policy and event.request in first:
                found.append(float(entry.fact.at_ms - first.pop(event.request)))
    return found
