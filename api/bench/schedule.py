"""How well policies schedule a fleet: the production code on virtual time, arms side by side on the same workloads."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from midstream.api.bench.arms import moves_anything, policies_of
from midstream.api.bench.report import Measured, commit, machine
from midstream.api.bench.schedule_figures import Slo, figures_of, summary_of
from midstream.api.bench.schedule_plots import draw
from midstream.api.bench.schedule_runs import Made, Run, Runs, opened
from midstream.api.simulation.fleet import GATEWAY, STREAM_INTERVAL_MS, FleetPlan, play
from midstream.api.traces.workload import has_content, workload
from midstream.control.errors import BadInput
from midstream.instance.engines.sim.config import SimConfig

ARMS: Final = (
    "round_robin", "least_kv", "freeness", "freeness+balance", "freeness+defragment+balance",
    "least_kv+defragment+balance",
)  # fmt: skip
TRACES: Final = (
    "azure_conv_2023",
    "servegen_language_mlarge_sampled",
    "servegen_reason_r1_sampled",
    "mooncake_conversation_2025",
    "heavy_tail",
)
LATENCY_MS: Final = 0.2
STEPS_AT_ONCE: Final = 256
SEARCH_RUNS: Final = 9
SEARCH_FIRST: Final = 4.0
SEARCH_FACTOR: Final = 2.0
"""A step of the search for a rate, until it has one that is sustained and one that is not."""


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
    latency_ms: float = LATENCY_MS
    """One way between two instances."""
    queue_depth: int = GATEWAY.queue_depth
    """Requests that wait at an instance; more wait at the gateway. 0: all are sent on at once."""
    jobs: int = 0
    """Processes; 0: one per core."""

    def __post_init__(self) -> None:
        for arm in self.arms:
            policies_of(arm)
        if self.rate_scale is not None and self.rate_scale <= 0:
            raise BadInput("rate-scale must be above 0")


def measure(plan: Plan, plots: Path | None = None, kept: Path | None = None) -> Measured:
    """Every arm on every trace with every seed; pictures into `plots`; what is in the file `kept` is not made again.

    Raises `BadInput`, `UnknownThing`.
    """
    found = machine()
    with opened(partial(simulate, plan), jobs=plan.jobs, kept=kept, setting=_setting(plan)) as made:
        scales = {trace: _scale(plan, made, trace) for trace in plan.traces}
        runs = [Run(t, a, s, scales[t]) for t in plan.traces for s in range(plan.seeds) for a in plan.arms]
        results = made.make(runs, "simulating")
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


def _setting(plan: Plan) -> str:
    """What two runs must have in common to be one: the commit, and all of the plan that a run depends on."""
    alike = msgspec.structs.replace(plan, traces=(), arms=(), seeds=1, rate_scale=None, sustained=0.0, jobs=0)
    return f"{commit()} {msgspec.json.encode(alike).decode()}"


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
        latency_ms=plan.latency_ms,
        queue_depth=plan.queue_depth,
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


def _scale(plan: Plan, made: Runs, trace: str) -> float:
    """The highest rate at which some arm keeps enough requests within the SLO."""
    if plan.rate_scale is not None:
        return plan.rate_scale
    return highest(lambda scale: any(_sustains(plan, made, trace, arm, scale) for arm in _searched(plan.arms)))


def highest(is_sustained: Callable[[float], bool]) -> float:
    """Doubles or halves until one rate is sustained and one is not, then halves the steps between the two."""
    scale, held, failed = SEARCH_FIRST, 0.0, 0.0
    for _ in range(SEARCH_RUNS):
        if is_sustained(scale):
            held = scale
        else:
            failed = scale
        if held and failed:
            scale = round((held * failed) ** 0.5, 3)
        else:
            scale = scale * SEARCH_FACTOR if held else scale / SEARCH_FACTOR
    return held or scale


def _searched(arms: tuple[str, ...]) -> list[str]:
    """Those that move first: they are likely to sustain more."""
    return sorted(arms, key=moves_anything, reverse=True)


def _sustains(plan: Plan, made: Runs, trace: str, arm: str, scale: float) -> bool:
    """Does an arm sustain a rate with every seed: parts of a trace differ, and the hardest one counts."""
    what = f"{trace}: {arm} at rate x {scale:.2f}"
    return all(
        made.make([Run(trace, arm, seed, scale)], what)[0].figures.slo_share >= plan.sustained
        for seed in range(plan.seeds)
    )
