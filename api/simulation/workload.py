"""What happens in one simulated run, drawn from its seed: engines, requests, orders by hand, faults."""

from __future__ import annotations

import random

import msgspec

from midstream.control.simulate.faults import Fault, plan_faults
from midstream.instance.engines.sim.config import SimConfig
from midstream.migration.protocol.messages import RequestSpec, Sampling

INSTANCES = ("a", "b", "c")
GATEWAYS = ("g1", "g2")
CONTROLLERS = ("c1", "c2")
HORIZON_MS = 8_000
"""Requests arrive and faults happen before this; afterwards everything heals."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One client: when it comes, what it wants, and after how many tokens or when it leaves."""

    at_ms: int
    gateway: str
    spec: RequestSpec
    leaves_after_tokens: int | None = None
    leaves_at_ms: int | None = None


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Something an operator asks for. `kind`: `move drain undrain`."""

    at_ms: int
    kind: str
    instance: str


class LogOutage(msgspec.Struct, frozen=True, kw_only=True):
    """The log's server is away, and comes back without its last `lose` entries."""

    at_ms: int
    until_ms: int
    lose: int


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a seed decides before the run begins."""

    seed: int
    engines: dict[str, SimConfig]
    arrivals: tuple[Arrival, ...]
    orders: tuple[Order, ...]
    faults: tuple[Fault, ...]
    outages: tuple[LogOutage, ...]


def draw_scenario(seed: int, *, intensity: float = 1.0) -> Scenario:
    """A scenario from a seed. `intensity` 0 leaves out every fault; 1 gives a node about one in ten seconds."""
    rng = random.Random(f"scenario {seed}")
    return Scenario(
        seed=seed,
        engines={name: _engine(rng) for name in INSTANCES},
        arrivals=tuple(_arrival(rng, index) for index in range(rng.randint(4, 9))),
        orders=tuple(_orders(rng)),
        faults=_faults(rng, intensity),
        outages=tuple(_outages(rng)) if intensity else (),
    )


def _engine(rng: random.Random) -> SimConfig:
    return SimConfig(
        vocab_size=512,
        eos_probability=0.002,
        block_tokens=4,
        blocks_total=rng.choice([32, 48, 64, 96]),
        slots_max=rng.choice([3, 4, 8]),
        tokens_max=256,
        step_tokens_max=rng.choice([16, 64]),
        time_scale=rng.choice([0.5, 1.0]),
    )


def _arrival(rng: random.Random, index: int) -> Arrival:
    prompt = tuple(rng.randint(3, 511) for _ in range(rng.randint(1, 40)))
    max_tokens = rng.randint(1, 80)
    sampling = Sampling(
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, max_tokens // 2]),
        temperature=rng.choice([0.0, 0.7, 1.0]),
        seed=rng.choice([None, index]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        logprobs=rng.choice([None, None, 1]),
    )
    leaves = rng.random()
    return Arrival(
        at_ms=rng.randint(0, HORIZON_MS // 2),
        gateway=rng.choice(GATEWAYS),
        spec=RequestSpec(request=f"r{index}", prompt=prompt, sampling=sampling, priority=rng.choice([0, 0, 1])),
        leaves_after_tokens=rng.randint(0, 40) if leaves < 0.15 else None,
        leaves_at_ms=rng.randint(0, HORIZON_MS) if 0.15 <= leaves < 0.25 else None,
    )


def _orders(rng: random.Random) -> list[Order]:
    moves = [
        Order(at_ms=rng.randint(200, HORIZON_MS), kind="move", instance=rng.choice(INSTANCES))
        for _ in range(rng.randint(4, 16))
    ]
    if rng.random() < 0.4:
        instance, at_ms = rng.choice(INSTANCES), rng.randint(500, HORIZON_MS // 2)
        moves.append(Order(at_ms=at_ms, kind="drain", instance=instance))
        moves.append(Order(at_ms=at_ms + rng.randint(500, 3_000), kind="undrain", instance=instance))
    return sorted(moves, key=lambda order: order.at_ms)


def _faults(rng: random.Random, intensity: float) -> tuple[Fault, ...]:
    llumlets = [f"llumlet/{name}" for name in INSTANCES]
    gateways = [f"gateway/{name}" for name in GATEWAYS]
    controllers = [f"controller/{name}" for name in CONTROLLERS]
    nodes = [*llumlets, *gateways, *controllers, "archiver"]
    mortal = [*llumlets, *llumlets, gateways[1], *controllers, "archiver"]
    return plan_faults(rng, nodes, HORIZON_MS, intensity, crashable=mortal)


def _outages(rng: random.Random) -> list[LogOutage]:
    if rng.random() < 0.7:
        return []
    at_ms = rng.randint(500, HORIZON_MS - 2_000)
    return [LogOutage(at_ms=at_ms, until_ms=at_ms + rng.randint(10, 2_000), lose=rng.choice([0, 0, 3, 30]))]
