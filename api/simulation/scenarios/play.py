"""What all scenarios share: an engine of theirs, one run on virtual time, means and ranks of what clients saw."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from midstream.api.gateway.settings import GatewaySettings
from midstream.api.simulation.scenarios.cluster import Client, Cluster, Role, Seen
from midstream.control.events import Entry
from midstream.control.simulate.loop import run_virtual
from midstream.control.state import PolicySettings
from midstream.instance.engines.sim.config import SimConfig

VIRTUAL_MAX_S = 100_000.0

ENGINE = SimConfig(
    vocab_size=512,
    block_tokens=16,
    blocks_total=256,
    slots_max=32,
    tokens_max=4_096,
    step_tokens_max=512,
    eos_probability=0.0,
)
"""Small, so that a few requests fill it; its step times are those of a real one."""


class Played(msgspec.Struct, frozen=True):
    """One run: what clients saw, and the archived log."""

    seen: list[Seen]
    entries: list[Entry]


def play(
    clients: Sequence[Client],
    *,
    instances: int,
    policies: PolicySettings,
    gateway: GatewaySettings | None = None,
    seed: int = 0,
    engine: SimConfig = ENGINE,
    are_tenants_known: bool = True,
    roles: Mapping[str, Role] = {},
) -> Played:
    """Play one run to its end, in this process."""

    async def run() -> Played:
        engines = {f"i{index}": engine for index in range(instances)}
        cluster = Cluster(
            engines,
            policies=policies,
            gateway=gateway,
            seed=seed,
            are_tenants_known=are_tenants_known,
            roles=roles,
        )
        await cluster.start()
        seen = await cluster.play(clients)
        await cluster.stop()
        return Played(seen, await cluster.history())

    return run_virtual(run, seed=seed, timeout_s=VIRTUAL_MAX_S)


def arrivals(rng: random.Random, rate_s: float, until_ms: float) -> Iterator[float]:
    """Times of a Poisson process, milliseconds."""
    at_ms = rng.expovariate(rate_s) * 1e3
    while at_ms < until_ms:
        yield at_ms
        at_ms += rng.expovariate(rate_s) * 1e3


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean, 0 of nothing."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def first_ms(seen: Iterable[Seen]) -> list[float]:
    """Admission to first token of each that got one."""
    return [one.first_ms for one in seen if one.first_ms is not None]


def killed(seen: Iterable[Seen]) -> int:
    """Requests that did not end well."""
    return sum(not one.is_finished or one.tokens != one.client.output_tokens for one in seen)
