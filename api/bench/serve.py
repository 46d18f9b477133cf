"""The founding latency table, on real processes: Poisson arrivals, and dispatch and move policies that take turns.

One cluster is booted as `midstream up` boots it; arms are policies put in force by a fact, so all arms have the same
processes. Every repeat has a seed of its own and plays the same arrivals and lengths to each arm, one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from midstream.api import event_loop
from midstream.api.bench.arms import policies_of
from midstream.api.bench.report import Measured, machine
from midstream.api.bench.serve_figures import Load, figures, row_of, summary_of
from midstream.api.bench.serve_load import OUTPUT_MIN, Ask, asks_of, draw, load
from midstream.api.bench.serve_operator import Operator, load_of
from midstream.api.bench.serve_plots import draw as draw_plots
from midstream.api.bench.signals import ended_by_signal
from midstream.api.cli.client import AdminClient
from midstream.api.cli.output import say
from midstream.api.cli.up.cluster import ClusterPlan, local_cluster
from midstream.api.settings import Settings, load_settings
from midstream.api.traces.load import TraceRow
from midstream.control.errors import BadInput, MidstreamError

ARMS: Final = ("round_robin", "freeness", "freeness+balance")
TRACE: Final = "heavy_tail"
SEED: Final = 1
WARM_UP: Final = 4
"""Short requests for each instance before anything counts."""
WARM_ROW: Final = TraceRow(0.0, 32, 8)
ROOM: Final = 2
"""The longest request takes at most one in so many of an instance's blocks."""


class Usual(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is measured with if nothing else is said: memory that runs short, steps that two cores manage."""

    instances: int
    blocks: int
    block_tokens: int
    length_scale: float
    requests: int
    rate: float
    moves: dict[str, dict[str, float]] = {}
    """Parameters of move policies, by name: their own defaults are for blocks of a big model."""


USUAL: Final = {
    "sim": Usual(
        instances=4, blocks=256, block_tokens=4, length_scale=0.25, requests=240, rate=14.0,
        moves={"balance": {"low": 8.0, "high": 16.0}},
    ),
    "vllm": Usual(
        instances=2, blocks=16, block_tokens=32, length_scale=0.25, requests=40, rate=2.0,
        moves={"balance": {"low": 1.0, "high": 2.0, "cost_per_move": 0.25}},
    ),
}  # fmt: skip
SIM_TIMES: Final = 0.5
VLLM_FLAGS: Final = "--max-num-seqs 32 --max-num-batched-tokens 512 --no-enable-prefix-caching"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to play. None: what is usual for the engine."""

    engine: str = "sim"
    model: Path | None = None
    """vllm: folder of the model; none: as the settings say."""
    arms: tuple[str, ...] = ARMS
    trace: str = TRACE
    """Where lengths come from; its arrivals are not played."""
    length_scale: float | None = None
    rate: float | None = None
    """Requests a second, of the whole cluster."""
    requests: int | None = None
    """Of each arm in each repeat."""
    repeats: int = 3
    instances: int | None = None
    blocks: int | None = None
    """KV blocks of each instance."""

    def __post_init__(self) -> None:
        if self.engine not in USUAL:
            raise BadInput(f"no engine {self.engine!r}; known: {', '.join(USUAL)}")
        for arm in self.arms:
            policies_of(arm)
        if len(set(self.arms)) < len(self.arms) or not self.arms:
            raise BadInput("each of the policies is named once, and there is at least one")
        for name in ("rate", "length_scale"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise BadInput(f"{name.replace('_', '-')} must be above 0")
        if self.engine != "vllm" and self.model is not None:
            raise BadInput("only vllm loads a model")

    @property
    def usual(self) -> Usual:
        """With what was asked for in place of what is usual."""
        asked = {name: getattr(self, name) for name in ("length_scale", "rate", "requests", "instances", "blocks")}
        given = {name: value for name, value in asked.items() if value is not None}
        return msgspec.structs.replace(USUAL[self.engine], **given)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return self.usual.blocks * self.usual.block_tokens // ROOM


def rows_of(plan: Plan, repeat: int) -> tuple[TraceRow, ...]:
    """What every arm is asked in a repeat. Raises `UnknownThing`, `BadInput`."""
    usual = plan.usual
    return draw(
        plan.trace, SEED + repeat, usual.requests,
        rate_per_s=usual.rate, scale=usual.length_scale, longest=plan.longest,
    )  # fmt: skip


def order(arms: Sequence[str], repeat: int) -> tuple[str, ...]:
    """Another arm is first in each repeat."""
    first = repeat % len(arms)
    return (*arms[first:], *arms[:first])


Loads = dict[str, list[Load]]


def measure(plan: Plan, plots: Path | None = None) -> Measured:
    """Boot, play, compare; minutes. Raises `MidstreamError`, one line."""
    before, played = machine(), [rows_of(plan, repeat) for repeat in range(plan.repeats)]
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as folder:
        loads = event_loop.run(_on_cluster(plan, _settings(plan, Path(folder)), played))
    if plots is not None:
        draw_plots(plots, plan.engine, loads)
    return Measured(
        params=_params(plan, played),
        rows=tuple(row_of(arm, made) for arm, made in loads.items()),
        summary=summary_of(loads),
        machine=before,
    )


def _params(plan: Plan, played: Sequence[Sequence[TraceRow]]) -> dict[str, Any]:
    """What was played, with what it came to."""
    rows = [row for rows in played for row in rows]
    totals = {
        "prompt_tokens_mean": round(sum(row.prompt_tokens for row in rows) / len(rows), 1),
        "output_tokens_mean": round(sum(row.output_tokens for row in rows) / len(rows), 1),
        "longest": plan.longest,
        "shrunk": sum(row.prompt_tokens + row.output_tokens >= plan.longest - OUTPUT_MIN - 2 for row in rows),
        "seed": SEED,
        "engine_settings": VLLM_FLAGS if plan.engine == "vllm" else f"sim_time_scale {SIM_TIMES}",
    }
    params: dict[str, Any] = msgspec.to_builtins(plan, enc_hook=str) | msgspec.to_builtins(plan.usual) | totals
    return params


def _settings(plan: Plan, folder: Path) -> Settings:
    own: dict[str, Any] = {"data_dir": folder, "engine": plan.engine, "gateway_port": 0, "admin_port": 0}
    if plan.engine == "sim":
        own |= {"sim_block_tokens": plan.usual.block_tokens, "sim_time_scale": SIM_TIMES}
    else:
        length = f"--block-size {plan.usual.block_tokens} --max-model-len {plan.longest + OUTPUT_MIN}"
        own |= {"vllm_args": f"{VLLM_FLAGS} {length}", "vllm_cpu_threads": 1}
        own |= {} if plan.model is None else {"vllm_model": str(plan.model)}
        if plan.model is not None and not any(plan.model.glob("*.safetensors")):
            own["vllm_args"] += " --load-format dummy"
    return load_settings(**own, move_policies="none")


async def _on_cluster(plan: Plan, settings: Settings, played: Sequence[Sequence[TraceRow]]) -> Loads:
    usual = plan.usual
    sizes = (usual.blocks,) * usual.instances
    with ended_by_signal():
        async with local_cluster(settings, ClusterPlan(sizes=sizes), say) as cluster:
            state = cluster.state
            with contextlib.closing(AdminClient(state.admin, state.admin_key)) as admin:
                player = Player(plan, state.gateway, settings.served_model, Operator(admin, usual.moves))
                await player.warm_up()
                return await player.work(played)


class Player:
    """All loads, one after the other."""

    def __init__(self, plan: Plan, url: str, model: str, operator: Operator) -> None:
        self._plan = plan
        self._url = url
        self._model = model
        self._operator = operator
        self._asked = 0

    async def warm_up(self) -> None:
        """Every process has done everything once. Raises `MidstreamError`."""
        await asyncio.to_thread(self._operator.configure, ARMS[0])
        answers = await load(self._url, self._asks((WARM_ROW,) * WARM_UP * self._plan.usual.instances))
        if failed := [answer.error for answer in answers if answer.error is not None]:
            raise MidstreamError(f"the cluster does not serve: {failed[0]}")

    async def work(self, played: Sequence[Sequence[TraceRow]]) -> Loads:
        """Repeat by repeat; the arms of one take turns. Raises `MidstreamError`."""
        loads: Loads = {arm: [] for arm in self._plan.arms}
        for repeat, rows in enumerate(played):
            for arm in order(self._plan.arms, repeat):
                seconds = rows[-1].arrival_s
                say(f"repeat {repeat + 1} of {len(played)}, {arm}: {len(rows)} requests in {seconds:.0f} s ...")
                loads[arm].append(made := await self._load(arm, rows))
                say(told(made))
        return loads

    async def _load(self, arm: str, rows: Sequence[TraceRow]) -> Load:
        asks = self._asks(rows)
        await asyncio.to_thread(self._operator.configure, arm)
        before = await asyncio.to_thread(self._operator.when_idle)
        answers = await load(self._url, asks)
        after = await asyncio.to_thread(self._operator.when_idle)
        said = await asyncio.to_thread(self._operator.moves, before, after)
        return load_of(answers, said, preemptions=after.preemptions - before.preemptions)

    def _asks(self, rows: Sequence[TraceRow]) -> list[Ask]:
        asks = asks_of(rows, self._url, self._model, SEED, self._asked)
        self._asked += len(rows)
        return asks


def told(made: Load) -> str:
    """One load in a line of words."""
    failed = f"; {len(made.errors)} failed, the first: {made.errors[0]}" if made.errors else ""
    if not made.well:
        return f"  nothing was answered{failed}"
    found = figures(made)
    waits = ", ".join(f"{found[name][part]:.1f}" for name in ("prefill_ms", "decode_ms") for part in ("p50", "p99"))
    return (
        f"  prefill p50, p99, decode p50, p99: {waits} ms; {made.moves} moves, {made.preemptions} preemptions{failed}"
    )
