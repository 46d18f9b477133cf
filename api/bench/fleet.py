"""Classes, tenants, scaling and roles, measured on simulated clusters: production code on virtual time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from midstream.api.bench.report import Measured, machine, rank
from midstream.api.simulation.run import quiet
from midstream.api.simulation.scenarios import priorities, roles, scaling, tenants
from midstream.api.simulation.scenarios.play import Played, first_ms, mean

Runs = list[dict[str, Played]]

CLASSES: Final = {"rate_s": 7.5, "seconds": 75.0}
TENANTS: Final = {"rate_s": 2.0, "seconds": 40.0}
DAY: Final = {"peak_s": 8.0, "trough": 0.15, "seconds": 480.0}
DAY_INSTANCES: Final = 4
ROLES: Final = {"rate_s": 6.0, "seconds": 25.0}


def measure(only: Sequence[str], seeds: int) -> Measured:
    """Play the scenarios named, or all, with so many seeds each."""
    quiet()
    on = machine()
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for name in only or SCENARIOS:
        began = time.monotonic()
        runs, found = SCENARIOS[name](seeds)
        rows += [_row(name, arm, runs) for arm in runs[0]]
        summary |= {f"{name}_{key}": _rounded(value) for key, value in found.items()}
        sys.stderr.write(f"{name}: {time.monotonic() - began:.0f} s\n")
    return Measured(params={"seeds": seeds, **PARAMS}, rows=tuple(rows), summary=summary, machine=on)


def _classes(seeds: int) -> tuple[Runs, dict[str, Any]]:
    runs = [priorities.run_arms(seed, **CLASSES) for seed in range(seeds)]
    return runs, priorities.figures(runs)


def _tenants(seeds: int) -> tuple[Runs, dict[str, Any]]:
    runs = [tenants.run_arms(seed, **TENANTS) for seed in range(seeds)]
    return runs, tenants.figures(runs, seconds=TENANTS["seconds"])


def _scaling(seeds: int) -> tuple[Runs, dict[str, Any]]:
    runs = [scaling.run_arms(seed, scaling.clients(seed, **DAY), fixed=DAY_INSTANCES) for seed in range(seeds)]
    return runs, scaling.figures(runs)


def _roles(seeds: int) -> tuple[Runs, dict[str, Any]]:
    runs = [roles.run_arms(seed, **ROLES) for seed in range(seeds)]
    return runs, roles.figures(runs)


SCENARIOS: Final[dict[str, Callable[[int], tuple[Runs, dict[str, Any]]]]] = {
    "priorities": _classes,
    "tenants": _tenants,
    "scaling": _scaling,
    "roles": _roles,
}
PARAMS: Final = {
    "priorities": CLASSES,
    "tenants": TENANTS,
    "scaling": {**DAY, "fixed": DAY_INSTANCES, **scaling.PARAMS},
    "roles": ROLES,
}


def _row(name: str, arm: str, runs: Runs) -> dict[str, Any]:
    seen = [one for run in runs for one in run[arm].seen]
    first = first_ms(seen)
    return {
        "scenario": name,
        "arm": arm,
        "requests": len(seen),
        "first_p50_ms": _rounded(rank(first, 0.5)),
        "first_p99_ms": _rounded(rank(first, 0.99)),
        "end_to_end_mean_ms": _rounded(mean(one.last_ms for one in seen if one.last_ms is not None)),
        "decode_p99_ms": _rounded(rank([one.decode_ms for one in seen], 0.99)),
        "instance_hours": _rounded(sum(scaling.instance_hours(run[arm].entries) for run in runs)),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
