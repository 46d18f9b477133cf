"""How long the steps of a running instance take, measured from outside, and the step-time model fitted to that."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from statistics import median
from typing import Final

import httpx
import msgspec

from midstream.api.bench.report import Measured, machine
from midstream.api.cli.output import say
from midstream.api.traces import TraceRow
from midstream.api.traces.send import CONNECT_S, REQUEST_S, Sent, first_model, send_one
from midstream.control.errors import BadInput, MidstreamError
from midstream.instance.engines.sim.fit import Row, as_csv, fitted

BATCHES: Final = (1, 2, 4, 8)
PROMPTS: Final = (128, 512, 2_048)
TOKENS: Final = 32
REPEATS: Final = 3


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure, and where: an OpenAI endpoint with one idle instance behind it."""

    url: str
    batches: tuple[int, ...] = BATCHES
    prompts: tuple[int, ...] = PROMPTS
    tokens: int = TOKENS
    repeats: int = REPEATS
    hardware: str = "here"
    """Middle part of the model's name in the constants: model/hardware/tensor-parallel."""
    tensor_parallel: int = 1
    key: str | None = None

    def __post_init__(self) -> None:
        if 1 not in self.batches or len(set(self.batches)) < 2 or len(set(self.prompts)) < 2:
            raise BadInput("a fit needs batch size 1 and another one, and two prompt lengths")
        if min(*self.batches, *self.prompts, self.repeats) < 1 or self.tokens < 4:
            raise BadInput("batch sizes, prompts and repeats start at 1, tokens at 4")


def measure(plan: Plan, constants: Path | None = None) -> Measured:
    """Measure and fit; the constants also as CSV, to be given to `--step-times`. Raises `MidstreamError`."""
    found = machine()
    rows = asyncio.run(_measured(plan))
    fit = fitted(rows, alone=[row for row in rows if row["batch_size"] == "1"])
    if constants is not None:
        constants.write_text(as_csv({_name(rows[0]): fit}), encoding="utf-8")
    summary = {name: float(value) for name, value in fit.items() if name != "prefill_knots"}
    return Measured(
        params=msgspec.to_builtins(plan) | {"key": None},
        rows=tuple(rows),
        summary=summary | {"prefill_knots": fit["prefill_knots"]},
        machine=found,
    )


async def _measured(plan: Plan) -> list[Row]:
    headers = {"Authorization": f"Bearer {plan.key}"} if plan.key else {}
    timeout = httpx.Timeout(REQUEST_S, connect=CONNECT_S)
    limits = httpx.Limits(max_connections=max(plan.batches))
    async with httpx.AsyncClient(
        base_url=plan.url, headers=headers, timeout=timeout, limits=limits, trust_env=False
    ) as http:
        model = await first_model(http)
        rows = []
        for batch, prompt in product(plan.batches, plan.prompts):
            say(f"{batch} at once, {prompt} prompt tokens ...")
            rows.append(await _point(plan, http, model, batch, prompt))
        return rows


async def _point(plan: Plan, http: httpx.AsyncClient, model: str, batch: int, prompt: int) -> Row:
    """Medians of some repeats. Only a prompt that comes alone is surely one pass."""
    prefills: list[float] = []
    steps: list[float] = []
    for repeat in range(plan.repeats):
        row = TraceRow(0.0, prompt, plan.tokens)
        seed = 1_000 * repeat + 7 * batch + prompt
        sent = await asyncio.gather(*(send_one(http, model, index, row, seed) for index in range(batch)))
        ttft, gaps = zip(*(_taken(one) for one in sent), strict=True)
        prefills.append(max(ttft))
        steps.append(median(gaps))
    return {
        "model": model,
        "hardware": plan.hardware,
        "tensor_parallel": str(plan.tensor_parallel),
        "prompt_size": str(prompt),
        "batch_size": str(batch),
        "token_size": str(plan.tokens),
        "n_runs": str(plan.repeats),
        "prefill_ms_p50": f"{median(prefills):.3f}",
        "decode_step_ms_p50": f"{median(steps):.3f}",
    }


def _taken(one: Sent) -> tuple[float, float]:
    if one.error is not None or one.ttft_ms is None or one.gap_ms_p50 is None:
        raise MidstreamError(f"a request failed: {one.error}")
    return one.ttft_ms, one.gap_ms_p50


def _name(row: Row) -> str:
    return f"{row['model']}/{row['hardware']}/{row['tensor_parallel']}"
