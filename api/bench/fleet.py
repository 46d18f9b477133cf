"""Classes, tenants, scaling and roles, measured on simulated clusters: production code on virtual time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

from midstream.api.bench.fleet_plots import draw_day
from midstream.api.bench.report import Measured, machine, rank
from midstream.api.simulation.run import quiet
from midstream.api.simulation.scenarios import priorities, roles, scaling, tenants
from midstream.api.simulation.scenarios.play import Played, first_ms, mean

Runs = list[dict[str, Played]]

CLASSES: Final = {"rate_s": 7.5, "seconds": 75.0}
TENANTS: Final = {"rate_s": 2.0, "seconds": 40.0}
DAY: Final = {"peak_s": 15.0, "trough": 0.15, "seconds": 1_920.0}
DAY_INSTANCES: Final = 8
"""The smallest fixed fleet for that day: the arm `one_less` shows it."""
ROLES: Final = {"rate_s": 6.0, "seconds": 25.0}


def measure(only: Sequence[str], seeds: int, jobs: int = 0, plots: Path | None = None) -> Measured:
    """Play the scenarios named, or all, with so many seeds each; days in so many processes (0: one per core)."""
    quiet()
    on = machine()
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for name in only or SCENARIOS:
        began = time.monotonic()
        runs, found = SCENARIOS[name](seeds, jobs)
        if plots is not None and name == "scaling":
            draw_day(plots, runs[0]["scaled"])
        rows += [_row(name, arm, runs) for arm in runs[0]]
        summary |= {f"{name}_{key}": _rounded(value) for key, value in found.items()}
        sys.stderr.write(f"{name}: {time.monotonic() - began:.0f} s\n")
    return Measured(params={"seeds": seeds, **PARAMS}, rows=tuple(rows), summary=summary, machine=on)


def _classes(seeds: int, _: int) -> tuple[Runs, dict[str, Any]]:
    runs = [priorities.run_arms(seed, **CLASSES) for seed in range(seeds)]
    return runs, priorities.figures(runs)


def _tenants(seeds: int, _: int) -> tuple[Runs, dict[str, Any]]:
    runs = [tenants.run_arms(seed, **TENANTS) for seed in range(seeds)]
    return runs, tenants.figures(runs, seconds=TENANTS["seconds"])


def _scaling(seeds: int, jobs: int) -> tuple[Runs, dict[str, Any]]:
    runs: Runs = [{} for _ in range(seeds)]
    with ProcessPoolExecutor(jobs or os.cpu_count() or 1, initializer=quiet) as pool:
        futures = [pool.submit(_day, arm, seed) for seed in range(seeds) for arm in scaling.ARMS]
        for done, future in enumerate(as_completed(futures), 1):
            arm, seed, played, took_s = future.result()
            runs[seed][arm] = played
            sys.stderr.write(f"scaling: {done} of {len(futures)}, {arm} of seed {seed}, {took_s:.0f} s\n")
    return [{arm: run[arm] for arm in scaling.ARMS} for run in runs], scaling.figures(runs)


def _day(arm: str, seed: int) -> tuple[str, int, Played, float]:
    """One arm's day, in whichever process, and how long it took."""
    began = time.monotonic()
    played = scaling.run_arm(arm, seed, scaling.clients(seed, **DAY), fixed=DAY_INSTANCES)
    return arm, seed, scaling.told(played), time.monotonic() - began


def _roles(seeds: int, _: int) -> tuple[Runs, dict[str, Any]]:
    runs = [roles.run_arms(seed, **ROLES) for seed in range(seeds)]
    return runs, roles.figures(runs)


SCENARIOS: Final[dict[str, Callable[[int, int], tuple[Runs, dict[str, Any]]]]] = {
    "priorities": _classes,
    "tenants": _tenants,
    "scaling": _scaling,
    "roles": _roles,
}
PARAMS: Final = {
    "priorities": CLASSES,
    "tenants": TENANTS,
    "scaling": {**DAY, "fixed": DAY_INSTANCES, "boot_s": scaling.BOOT_S, "gbit_per_s": scaling.GBIT_PER_S},
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
