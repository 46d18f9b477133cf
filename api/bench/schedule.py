"""How well policies schedule a fleet: the production code on virtual time, arms side by side on the same workloads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from midstream.api.bench.report import Measured, machine
from midstream.api.bench.schedule_figures import Figures, Slo, figures_of, moves_anything, summary_of
from midstream.api.bench.schedule_plots import draw
from midstream.api.simulation.fleet import STREAM_INTERVAL_MS, FleetPlan, play
from midstream.api.simulation.run import quiet
from midstream.api.traces.workload import has_content, workload
from midstream.control.errors import BadInput
from midstream.control.policies import dispatch_policy, move_policy
from midstream.control.state import PolicyChoice, PolicySettings
from midstream.instance.engines.sim.config import SimConfig

ARMS: Final = ("round_robin", "freeness", "freeness+balance")
TRACES: Final = (
    "azure_conv_2023",
    "servegen_language_mlarge_sampled",
    "servegen_reason_r1_sampled",
    "mooncake_conversation_2025",
    "heavy_tail",
)
STEPS_AT_ONCE: Final = 256
SEARCH_RUNS: Final = 7
SEARCH_FIRST: Final = 4.0
SEARCH_FACTOR: Final = 2.0
"""The first step of the search for a rate; from the first sustained rate on each is the root of the one before."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate. The defaults of the engine: a 70B model on two 80 GB cards each."""

    traces: tuple[str, ...] = TRACES
    arms: tuple[str, ...] = ARMS
    seeds: int = 3
    instances: int = 16
    requests: int = 3_000
    """Of each run; all of a trace if it has no more."""
    rate_scale: float | None = None
    """Not given: the highest that the best arm sustains is searched for, per trace."""
    sustained: float = 0.9
    """Share of requests within the SLO that counts as sustained."""
    slo: Slo = Slo()
    step_times: str = "llama2-70b/h100-80gb/2"
    blocks: int = 2_048
    block_tokens: int = 16
    token_bytes: int = 327_680
    """KV of one token: 80 layers, 8 heads of 128, keys and values, 2 bytes each."""
    slots: int = 256
    gbit_per_s: float = 25.0
    jobs: int = 0
    """Processes; 0: one per core."""

    def __post_init__(self) -> None:
        for arm in self.arms:
            policies_of(arm)
        if self.rate_scale is not None and self.rate_scale <= 0:
            raise BadInput("rate-scale must be above 0")


class Run(NamedTuple):
    """One simulation to make."""

    trace: str
    arm: str
    seed: int
    rate_scale: float


def measure(plan: Plan, plots: Path | None = None) -> Measured:
    """Every arm on every trace with every seed; pictures into `plots`. Raises `BadInput`, `UnknownThing`."""
    found = machine()
    with _pool(plan) as pool, _progress() as progress:
        scales = {trace: _scale(plan, pool, trace, progress) for trace in plan.traces}
        runs = [Run(t, a, s, scales[t]) for t in plan.traces for s in range(plan.seeds) for a in plan.arms]
        done = {made.run: made for made in _made(plan, pool, runs, progress, "simulating")}
    results = [done[run] for run in runs]
    if plots is not None:
        for trace in plan.traces:
            draw(plots, trace, [m for m in results if m.run.trace == trace and m.run.seed == 0], blocks=plan.blocks)
    speeds = [made.simulated_s / made.took_s for made in results]
    summary = {trace: summary_of([m for m in results if m.run.trace == trace]) for trace in plan.traces}
    return Measured(
        params=msgspec.to_builtins(plan) | {"rate_scales": scales},
        rows=tuple(row_of(made) for made in results),
        summary=summary | {"sim_speedup": median(speeds)},
        machine=found,
    )


class Made(NamedTuple):
    """A simulation that was made."""

    run: Run
    figures: Figures
    simulated_s: float
    took_s: float
    cpu_s: float
    """Of the one core that it ran on."""
    facts: int


def simulate(plan: Plan, run: Run) -> Made:
    """One run, in whichever process."""
    rows = workload(run.trace, seed=run.seed, rate_scale=run.rate_scale, requests=plan.requests)
    fits = [row for row in rows if row.prompt_tokens + row.output_tokens <= plan.blocks * plan.block_tokens]
    began, cpu_began = time.perf_counter(), time.process_time()
    played = play(fleet_plan(plan, run, is_cached=has_content(rows)), fits)
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    figures = figures_of(played, plan.slo, instances=plan.instances, too_long=len(rows) - len(fits))
    return Made(run, figures, played.simulated_s, took_s, cpu_s, played.record.facts)


def fleet_plan(plan: Plan, run: Run, *, is_cached: bool) -> FleetPlan:
    """The fleet of one run."""
    engine = SimConfig(
        model="sim-" + plan.step_times.partition("/")[0],
        kv="lengths",
        prefix_cache=is_cached,
        stream_interval_ms=STREAM_INTERVAL_MS,
        steps_at_once_max=STEPS_AT_ONCE,
        block_tokens=plan.block_tokens,
        blocks_total=plan.blocks,
        bytes_per_token=plan.token_bytes,
        slots_max=plan.slots,
        tokens_max=plan.blocks * plan.block_tokens,
        step_times=plan.step_times,
    )
    return FleetPlan(
        instances=plan.instances,
        engine=engine,
        policies=policies_of(run.arm),
        seed=run.seed,
        gbit_per_s=plan.gbit_per_s,
    )


def policies_of(arm: str) -> PolicySettings:
    """`DISPATCH` or `DISPATCH+MOVES+…`, by their registered names. Raises `UnknownThing`."""
    dispatch, *moves = arm.split("+")
    dispatch_policy(dispatch)
    for name in moves:
        move_policy(name)
    return PolicySettings(
        dispatch=PolicyChoice(dispatch), moves=tuple(PolicyChoice(name) for name in moves or ("none",))
    )


def row_of(made: Made) -> dict[str, Any]:
    """A row as it is printed."""
    run = made.run
    head = {"trace": run.trace, "policy": run.arm, "seed": run.seed, "rate_scale": run.rate_scale}
    speed = {
        "simulated_s": round(made.simulated_s, 1), "took_s": round(made.took_s, 2), "cpu_s": round(made.cpu_s, 2),
        "facts": made.facts,
    }  # fmt: skip
    return head | made.figures.row() | speed


# --- the rate ------------------------------------------------------------------------------------


def _scale(plan: Plan, pool: ProcessPoolExecutor, trace: str, progress: Progress) -> float:
    """The highest rate at which some arm keeps enough requests within the SLO: up and down in ever smaller steps."""
    if plan.rate_scale is not None:
        return plan.rate_scale
    scale, factor, best = SEARCH_FIRST, SEARCH_FACTOR, 0.0
    for _ in range(SEARCH_RUNS):
        is_sustained = _is_sustained(plan, pool, trace, scale, progress)
        best = max(best, scale) if is_sustained else best
        scale = scale * factor if is_sustained else scale / factor
        factor = factor**0.5 if best else factor
    return round(best or scale, 3)


def _is_sustained(plan: Plan, pool: ProcessPoolExecutor, trace: str, scale: float, progress: Progress) -> bool:
    """Does an arm sustain a rate, in the median of the seeds; those that move first: they are likely to."""
    for arm in sorted(plan.arms, key=moves_anything, reverse=True):
        runs = [Run(trace, arm, seed, scale) for seed in range(plan.seeds)]
        made = _made(plan, pool, runs, progress, f"{trace}: {arm} at rate x {scale:.2f}")
        if median(one.figures.slo_share for one in made) >= plan.sustained:
            return True
    return False


# --- processes and progress ----------------------------------------------------------------------


@contextmanager
def _pool(plan: Plan) -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(plan.jobs or os.cpu_count() or 1, initializer=quiet) as pool:
        yield pool


@contextmanager
def _progress() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress


def _made(
    plan: Plan, pool: ProcessPoolExecutor, runs: Sequence[Run], progress: Progress, what: str
) -> list[Made]:  # fmt: skip
    bar = progress.add_task(what, total=len(runs))
    futures = [pool.submit(partial(simulate, plan), run) for run in runs]
    done = []
    for future in as_completed(futures):
        done.append(future.result())
        progress.advance(bar)
    return done
