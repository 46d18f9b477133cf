"""What happens in one simulated run, drawn from its seed: engines, requests, orders by hand, faults."""

from __future__ import annotations

import random

import msgspec

from midstream.control.simulate.faults import Cut, Fault, Lossy, plan_faults
from midstream.instance.engines.sim.config import SimConfig
from midstream.migration.protocol.messages import RequestSpec, Sampling

INSTANCES = ("a", "b", "c")
GATEWAYS = ("g1", "g2")
CONTROLLERS = ("c1", "c2")
LLUMLETS = [f"llumlet/{name}" for name in INSTANCES]
NODES_OF_GATEWAYS = [f"gateway/{name}" for name in GATEWAYS]
NODES_OF_CONTROLLERS = [f"controller/{name}" for name in CONTROLLERS]
LOG = "log"
HORIZON_MS = 12_000
"""Requests arrive and faults happen before this; afterwards everything heals."""

HANDOVERS = 2.0
"""At intensity 1, so many times some kinds of message go wrong for a while."""
STRIKES = 1.0
"""At intensity 1, so many moves are hit in the middle of it."""
ISOLATIONS = 0.5
"""At intensity 1, so many nodes are out of reach for long."""
HANDOVER_KINDS = (
    ("Final",),
    ("Adopted",),
    ("Adopted",),
    ("Adopted", "Flipped"),
    ("Flipped", "Committed"),
    ("Reclaim", "Granted"),
    ("Drop", "Gone"),
    ("Tokens",),
    ("Acknowledge",),
    ("Prepare", "Prepared"),
    ("Prepared", "Cancel"),
    ("Cancel", "PrepareRefused"),
    ("Dispatch", "Accepted"),
    ("Probe", "Holding", "Gone"),
    ("Ping", "Pong"),
)
"""What is lost, late or doubled together: a question, its answer, and what takes it back."""


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
    instance: str | None
    """A move without one goes where the controller thinks best."""
    choice: float = 0.0
    """Which of the live requests, in order of their names: 0 the first, just under 1 the last."""


class LogOutage(msgspec.Struct, frozen=True, kw_only=True):
    """The log's server is away, and comes back without its last `lose` entries, or with nothing at all."""

    at_ms: int
    until_ms: int
    lose: int
    is_flush: bool = False


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """Hits the first move that enters `phase` in a window of time, right then, for a while."""

    at_ms: int
    until_ms: int
    phase: str
    """Of `migration.protocol.seat`: `preparing copying freezing final doubt`."""
    hit: tuple[str, ...]
    """One of `source target gateway`: that one crashes. Two: the way between them is cut."""
    for_ms: int


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a seed decides before the run begins."""

    seed: int
    engines: dict[str, SimConfig]
    arrivals: tuple[Arrival, ...]
    orders: tuple[Order, ...]
    faults: tuple[Fault, ...]
    outages: tuple[LogOutage, ...]
    strikes: tuple[Strike, ...]
    bytes_per_ms: float
    """Speed of the links that carry KV: a block has 32 bytes."""


def draw_scenario(seed: int, *, intensity: float = 1.0) -> Scenario:
    """A scenario from a seed. `intensity` 0 leaves out every fault; 1 gives a node about one in ten seconds."""
    rng = random.Random(f"scenario {seed}")
    return Scenario(
        seed=seed,
        engines={name: _engine(rng) for name in INSTANCES},
        arrivals=tuple(_arrival(rng, index) for index in range(rng.randint(4, 10))),
        orders=tuple(_orders(rng)),
        faults=_faults(rng, intensity),
        outages=tuple(_outages(rng)) if intensity else (),
        strikes=tuple(_strike(rng) for _ in range(round(STRIKES * intensity))),
        bytes_per_ms=rng.choice([1_000_000.0, 10.0, 2.0]),
    )


def _engine(rng: random.Random) -> SimConfig:
    return SimConfig(
        vocab_size=512,
        eos_probability=0.002,
        block_tokens=4,
        blocks_total=rng.choice([48, 64, 96]),
        slots_max=rng.choice([3, 4, 8]),
        tokens_max=256,
        step_tokens_max=rng.choice([16, 64]),
        time_scale=rng.choice([0.5, 1.0, 2.0, 4.0]),
    )


def _arrival(rng: random.Random, index: int) -> Arrival:
    prompt = tuple(rng.randint(3, 511) for _ in range(rng.randint(1, 40)))
    max_tokens = rng.choice([rng.randint(1, 80), rng.randint(1, 80), rng.randint(80, 150)])
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
        at_ms=rng.randint(0, HORIZON_MS * 2 // 3),
        gateway=rng.choice(GATEWAYS),
        spec=RequestSpec(request=f"r{index}", prompt=prompt, sampling=sampling, priority=rng.choice([0, 0, 1])),
        leaves_after_tokens=rng.randint(0, 40) if leaves < 0.15 else None,
        leaves_at_ms=rng.randint(0, HORIZON_MS) if 0.15 <= leaves < 0.25 else None,
    )


def _orders(rng: random.Random) -> list[Order]:
    """Moves, many of them of the same request again and again; sometimes a drain."""
    orders = [
        Order(
            at_ms=rng.randint(200, HORIZON_MS),
            kind="move",
            instance=rng.choice([*INSTANCES, None]),
            choice=rng.choice([0.0, rng.random()]),
        )
        for _ in range(rng.randint(8, 28))
    ]
    if rng.random() < 0.4:
        instance, at_ms = rng.choice(INSTANCES), rng.randint(500, HORIZON_MS // 2)
        orders.append(Order(at_ms=at_ms, kind="drain", instance=instance))
        orders.append(Order(at_ms=at_ms + rng.randint(500, 3_000), kind="undrain", instance=instance))
    return sorted(orders, key=lambda order: order.at_ms)


# --- what goes wrong -----------------------------------------------------------------------------


def _faults(rng: random.Random, intensity: float) -> tuple[Fault, ...]:
    nodes = [*LLUMLETS, *NODES_OF_GATEWAYS, *NODES_OF_CONTROLLERS, "archiver", "admin"]
    mortal = [*LLUMLETS, *LLUMLETS, NODES_OF_GATEWAYS[1], *NODES_OF_CONTROLLERS, "archiver"]
    faults: list[Fault] = [*plan_faults(rng, nodes, HORIZON_MS, intensity, crashable=mortal)]
    for _ in range(round(HANDOVERS * intensity)):
        faults.append(_handover(rng))
    for _ in range(round(ISOLATIONS * intensity)):
        faults += _isolation(rng)
    return tuple(sorted(faults, key=lambda fault: fault.at_ms))


def _handover(rng: random.Random) -> Lossy:
    """One kind of message of a move or of a request's stream gets lost, late or doubled, wherever it is sent."""
    at_ms, length_ms = _window(rng, 100, 4_000)
    return Lossy(
        source="",
        target="",
        only=rng.choice(HANDOVER_KINDS),
        drop=rng.choice([0.0, 0.3, 1.0]),
        duplicate=rng.choice([0.0, 0.5, 1.0]),
        reorder=rng.choice([0.0, 0.5]),
        delay_ms=rng.choice([0, 100, 400, 1_500]),
        at_ms=at_ms,
        until_ms=at_ms + length_ms,
    )


def _strike(rng: random.Random) -> Strike:
    at_ms, length_ms = _window(rng, 1_000, HORIZON_MS)
    return Strike(
        at_ms=at_ms,
        until_ms=at_ms + length_ms,
        phase=rng.choice(["preparing", "copying", "freezing", "final", "doubt"]),
        hit=rng.choice([("source",), ("target",), ("source", "target"), ("source", "gateway"), ("target", "gateway")]),
        for_ms=_window(rng, 50, 6_000)[1],
    )


def _isolation(rng: random.Random) -> list[Cut]:
    """A node is out of reach for long: of the log, of gateways, or both, so that it is taken for dead and is not."""
    node = rng.choice([*LLUMLETS, *LLUMLETS, *NODES_OF_GATEWAYS, *NODES_OF_CONTROLLERS])
    others = rng.choice([[LOG], NODES_OF_GATEWAYS, [LOG, *NODES_OF_GATEWAYS], [LOG, *NODES_OF_GATEWAYS]])
    at_ms, length_ms = _window(rng, 3_000, 11_000)
    return [Cut(a=node, b=other, at_ms=at_ms, until_ms=at_ms + length_ms) for other in others if other != node]


def _window(rng: random.Random, shortest_ms: int, longest_ms: int) -> tuple[int, int]:
    """(start, length), the lengths spread evenly over their orders of magnitude."""
    length_ms = int(shortest_ms * (longest_ms / shortest_ms) ** rng.random())
    return rng.randint(0, max(0, HORIZON_MS - length_ms)), length_ms


def _outages(rng: random.Random) -> list[LogOutage]:
    if rng.random() < 0.6:
        return []
    at_ms = rng.randint(500, HORIZON_MS - 2_000)
    until_ms = at_ms + rng.randint(10, 2_000)
    is_flush = rng.random() < 0.25
    return [LogOutage(at_ms=at_ms, until_ms=until_ms, lose=rng.choice([0, 0, 3, 30]), is_flush=is_flush)]
