"""Runs seeds through the simulated cluster and reports: seeds, moves, faults, violations; a trace for a failure."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

import msgspec
import structlog

from midstream.api.simulation.cluster import Cluster
from midstream.api.simulation.oracle import breaches, history
from midstream.api.simulation.workload import Scenario, draw_scenario
from midstream.control.codec import encode_fact
from midstream.control.events import Entry, LoadReported, MigrationCommitted, RequestsReported, TickElapsed
from midstream.control.simulate.faults import Fault, shrink
from midstream.control.simulate.loop import SimulationError, run_virtual

VIRTUAL_MAX_S = 1_000.0
CHUNK = 5
"""Seeds that a worker process takes at once."""


class SeedReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `digest` is over every archived fact: equal seeds give equal digests."""

    seed: int
    moves: int
    """Committed hand-overs."""
    faults: int
    """Planned faults, log outages and strikes included."""
    facts: int
    digest: str
    violations: tuple[str, ...]
    kinds: dict[str, int]
    """How often each kind of fact was said."""


def run_seed(seed: int, intensity: float = 1.0) -> SeedReport:
    """Draw and play one scenario."""
    return play(draw_scenario(seed, intensity=intensity))[0]


def play(scenario: Scenario) -> tuple[SeedReport, list[Entry]]:
    """Play one scenario on a fresh virtual loop; a run that cannot end is a violation as well."""
    try:
        violations, entries = run_virtual(lambda: _play(scenario), seed=scenario.seed, timeout_s=VIRTUAL_MAX_S)
    except (SimulationError, TimeoutError) as error:
        violations, entries = [f"P04 the run did not end well: {type(error).__name__}: {error}"], []
    kinds = Counter(type(entry.fact.event).__name__ for entry in entries)
    report = SeedReport(
        seed=scenario.seed,
        moves=kinds[MigrationCommitted.__name__],
        faults=len(scenario.faults) + len(scenario.outages) + len(scenario.strikes),
        facts=len(entries),
        digest=_digest(entries),
        violations=tuple(violations),
        kinds=dict(kinds),
    )
    return report, entries


async def _play(scenario: Scenario) -> tuple[list[str], list[Entry]]:
    cluster = Cluster(scenario)
    try:
        await cluster.play()
        return await breaches(cluster), await history(cluster)
    finally:
        await cluster.stop()


def _digest(entries: Iterable[Entry]) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for entry in entries:
        whole.update(f"{entry.position} ".encode())
        whole.update(encode_fact(entry.fact))
    return whole.hexdigest()


def quiet() -> None:
    """What nodes log of the faults they meet is what a run is for; the oracle speaks of what matters."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def run_seeds(seeds: Iterable[int], *, intensity: float = 1.0, jobs: int = 1) -> Iterator[SeedReport]:
    """Reports in seed order; `jobs` processes at once."""
    if jobs <= 1:
        for seed in seeds:
            yield run_seed(seed, intensity)
        return
    with ProcessPoolExecutor(jobs, initializer=quiet) as pool:
        ordered = list(seeds)
        yield from pool.map(run_seed, ordered, [intensity] * len(ordered), chunksize=CHUNK)


def minimal_faults(scenario: Scenario) -> tuple[Fault, ...]:
    """The fewest faults with which a failing scenario still fails."""

    def fails(faults: tuple[Fault, ...]) -> bool:
        return bool(play(msgspec.structs.replace(scenario, faults=faults))[0].violations)

    return shrink(scenario.faults, fails)


def trace(scenario: Scenario) -> Iterator[str]:
    """The run as text: its violations, faults and facts in order, without the noise of reports and ticks."""
    report, entries = play(scenario)
    yield f"seed {scenario.seed}: {len(report.violations)} violations"
    yield from (f"  ! {line}" for line in report.violations)
    yield from (f"  fault {fault}" for fault in scenario.faults)
    yield from (f"  outage {outage}" for outage in scenario.outages)
    yield from (f"  strike {strike}" for strike in scenario.strikes)
    for entry in entries:
        event = entry.fact.event
        if not isinstance(event, LoadReported | RequestsReported | TickElapsed):
            yield f"  {entry.position!s:>8} {entry.fact.at_ms % 1_000_000:>7} {entry.fact.source:<14} {event}"
