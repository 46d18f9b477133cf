"""What a move costs its client, for three ways to move: live, stop and copy, compute again.

A real cluster of two instances; one stream goes to and fro between them while its client notes every arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
import msgspec

from midstream.api.bench.moves import Moved, move
from midstream.api.bench.plots import plot
from midstream.api.bench.report import Measured, machine, spread
from midstream.api.bench.signals import ended_by_signal
from midstream.api.bench.streams import Stream, streaming
from midstream.api.cli.client import AdminClient
from midstream.api.cli.output import say
from midstream.api.cli.up.cluster import ClusterPlan, local_cluster
from midstream.api.settings import Settings, load_settings
from midstream.control.errors import BadInput
from midstream.migration.plan import LIVE, MODES, RECOMPUTE

SEED: Final = 7
CONTEXTS: Final = {"sim": (128, 512, 1024, 2048, 4096), "vllm": (128, 512, 1024, 2048, 4096, 7000)}
TOKENS_MAX: Final = {"sim": 16_000, "vllm": 8_192}
"""Longest prompt and output."""
ROOM: Final = 160
"""Output tokens that one move may need."""
GROWTH: Final = 4
"""A stream that has grown by more than a fourth is no measure of its context any more."""
ANSWER_S: Final = 900.0
CONNECT_S: Final = 10.0
DEADLINE_S: Final = 240.0
FLAT_MS: Final = 1.0
"""Extra times below count as so much when the largest is divided by the smallest."""
CHANGES: Final[dict[str, Any]] = {
    "gateway_port": 0,
    "admin_port": 0,
    "move_policies": "none",
    "tick_ms": 100,
    # On a CPU a step of a small model takes 50 ms and a prompt seconds, in which an engine answers nobody.
    "prepare_ms": 20_000.0,
    "stop_budget_ms": 60.0,
    "stop_max_ms": 2_500.0,
    "decision_ms": 5_000.0,
    "copy_max_ms": 30_000.0,
    "lease_ms": 90_000.0,
    "command_ttl_ms": 20_000,
}
FLAGS: Final = "--max-num-seqs 4 --max-num-batched-tokens 2048 --no-enable-prefix-caching"
"""Without a prefix cache a stream that comes back finds nothing of its own."""

FIGURES: Final = (
    "normal_gap_ms", "gap_ms", "extra_ms", "rounds", "freeze_to_adopt_ms", "source_slowdown", "total_ms",
)  # fmt: skip


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    engine: str = "sim"
    contexts: tuple[int, ...] = ()
    """Tokens; none: what suits the engine."""
    modes: tuple[str, ...] = MODES
    repeats: int = 5
    recompute_s: float = 60.0
    """Computing again is repeated until it took so long at one context."""
    kv_gib: float = 1.0

    def __post_init__(self) -> None:
        if self.engine not in CONTEXTS:
            raise BadInput(f"no engine {self.engine!r}; known: {', '.join(CONTEXTS)}")
        if unknown := [mode for mode in self.modes if mode not in MODES]:
            raise BadInput(f"no mode {unknown[0]!r}; known: {', '.join(MODES)}")
        most = TOKENS_MAX[self.engine] - ROOM
        if wrong := [context for context in self.contexts if not 16 <= context <= most]:
            raise BadInput(f"a context is 16 to {most} tokens, not {wrong[0]}")

    @property
    def chosen(self) -> tuple[int, ...]:
        """The contexts, short ones first."""
        return tuple(sorted(self.contexts or CONTEXTS[self.engine]))

    @property
    def may_return(self) -> bool:
        """A simulated engine finds blocks of a stream that was there before: it moves each stream once."""
        return self.engine == "vllm"


Found = dict[tuple[int, str], list[Moved]]


def measure(plan: Plan) -> Measured:
    """Boot, move, report. Raises `MidstreamError`, one line."""
    before = machine()
    with tempfile.TemporaryDirectory(prefix="bench-migration-") as folder:
        found = asyncio.run(_on_cluster(plan, _settings(plan, Path(folder))))
    rows = tuple(_row(context, mode, moves) for (context, mode), moves in sorted(found.items(), key=_in_order))
    return Measured(
        params=msgspec.to_builtins(plan) | {"contexts": plan.chosen, "seed": SEED},
        rows=rows,
        summary=summary(rows),
        machine=before,
    )


def _settings(plan: Plan, folder: Path) -> Settings:
    own: dict[str, Any] = {"data_dir": folder, "engine": plan.engine}
    if plan.engine == "vllm":
        own |= {"vllm_kv_gib": plan.kv_gib, "vllm_args": f"{FLAGS} --max-model-len {TOKENS_MAX['vllm']}"}
    return load_settings(**CHANGES, **own)


async def _on_cluster(plan: Plan, settings: Settings) -> Found:
    with ended_by_signal():
        async with local_cluster(settings, ClusterPlan(sizes=(None, None)), say) as cluster:
            state = cluster.state
            say(f"measuring on two {plan.engine} instances ({settings.served_model})")
            with contextlib.closing(AdminClient(state.admin, state.admin_key)) as admin:
                timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
                async with httpx.AsyncClient(base_url=state.gateway, timeout=timeout, trust_env=False) as http:
                    return await Mover(plan, http, admin, settings.served_model).work()


class Mover:
    """All moves, one after the other."""

    def __init__(self, plan: Plan, http: httpx.AsyncClient, admin: AdminClient, model: str) -> None:
        self._plan = plan
        self._http = http
        self._admin = admin
        self._model = model
        self._streams = 0
        self._found: Found = defaultdict(list)

    async def work(self) -> Found:
        """Context by context; the modes of one take turns."""
        async with self._opened(32) as stream:
            await stream.has(8, DEADLINE_S)  # both faces and one engine have done everything once
            await self._move(stream, self._plan.modes[0])
        self._found.clear()
        for context in self._plan.chosen:
            await self._measure(context)
        return self._found

    async def _measure(self, context: int) -> None:
        async with AsyncExitStack() as stack:
            stream: Stream | None = None
            for mode in self._plan.modes * self._plan.repeats:
                if self._has_enough(context, mode):
                    continue
                if stream is None or self._is_used_up(stream):
                    await stack.aclose()
                    stream = await stack.enter_async_context(self._opened(context))
                    await stream.has(1, DEADLINE_S)
                await self._move(stream, mode)

    def _has_enough(self, context: int, mode: str) -> bool:
        took_s = sum(moved.gap_ms for moved in self._found[context, mode]) / 1e3
        return mode == RECOMPUTE and took_s > self._plan.recompute_s

    def _is_used_up(self, stream: Stream) -> bool:
        if not self._plan.may_return:
            return True
        has_grown = len(stream.times_us) > stream.prompt_tokens // GROWTH
        return has_grown or stream.max_tokens - len(stream.times_us) < ROOM

    @contextlib.asynccontextmanager
    async def _opened(self, context: int) -> AsyncIterator[Stream]:
        """A fresh stream, once the one before is gone everywhere."""
        while await asyncio.to_thread(lambda: next(self._admin.items("/requests", limit=1), None)):
            await asyncio.sleep(0.1)
        self._streams += 1
        tokens = TOKENS_MAX[self._plan.engine] - context
        async with streaming(self._http, self._model, self._streams, SEED, context, tokens) as stream:
            yield stream

    async def _move(self, stream: Stream, mode: str) -> None:
        moved = await move(self._admin, stream, mode, DEADLINE_S)
        self._found[stream.prompt_tokens, mode].append(moved)
        say(f"{stream.prompt_tokens:>6} {mode:<9} gap {moved.gap_ms:8.1f} ms, usual {moved.normal_gap_ms:6.1f} ms")


def _in_order(item: tuple[tuple[int, str], object]) -> tuple[int, int]:
    (context, mode), _ = item
    return context, MODES.index(mode)


def _row(context: int, mode: str, moves: Sequence[Moved]) -> dict[str, Any]:
    """Medians over the moves, with the least and the most."""
    row: dict[str, Any] = {"context": context, "mode": mode}
    for figure in FIGURES:
        row |= spread(figure, [getattr(moved, figure) for moved in moves])
    return row | {"bytes": int(median(moved.copied_bytes for moved in moves)), "repeats": len(moves)}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures to aim at; None where a mode was not measured."""
    live = [row for row in rows if row["mode"] == LIVE]
    extras = [max(row["extra_ms"], FLAT_MS) for row in live]
    slowdowns = [row["source_slowdown"] for row in live if row["source_slowdown"] is not None]
    return {
        "extra_steps_max": max((row["extra_ms"] / row["normal_gap_ms"] for row in live), default=None),
        "flatness": max(extras) / min(extras) if extras else None,
        "recompute_over_live": _ratio(rows, RECOMPUTE, LIVE),
        "source_slowdown_max": max(slowdowns, default=None),
    }


def _ratio(rows: Sequence[dict[str, Any]], mode: str, other: str) -> float | None:
    """Gap of one mode by the gap of another, at the largest context that has both."""
    gaps = {(row["context"], row["mode"]): row["gap_ms"] for row in rows}
    common = [context for context, one in gaps if one == mode and (context, other) in gaps]
    return gaps[max(common), mode] / gaps[max(common), other] if common else None


def draw(measured: Measured, folder: Path) -> None:
    """Gap by context, one line per mode, in `folder/migration.png`."""
    with plot(folder, "migration") as (_, axes):
        for mode in MODES:
            rows = [row for row in measured.rows if row["mode"] == mode]
            if rows:
                contexts, gaps = [row["context"] for row in rows], [row["gap_ms"] for row in rows]
                low = [row["gap_ms"] - row["gap_ms_min"] for row in rows]
                high = [row["gap_ms_max"] - row["gap_ms"] for row in rows]
                axes.errorbar(contexts, gaps, yerr=(low, high), marker="o", capsize=3, label=mode)
        live = [row for row in measured.rows if row["mode"] == LIVE]
        usual = [row["normal_gap_ms"] for row in live]
        axes.plot([row["context"] for row in live], usual, "--", color="grey", label="ordinary gap")
        axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="gap that the client sees, ms")
        contexts = sorted({row["context"] for row in measured.rows})
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.set_xticks([], minor=True)
        axes.set_title(f"One move of a running request, {measured.params['engine']}")
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend()
