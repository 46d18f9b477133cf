"""What the gateway costs: the same chats through vLLM's own server and through Midstream, in turn, on engines alike."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from midstream.api import event_loop
from midstream.api.bench.plots import plot
from midstream.api.bench.report import Measured, machine, rank, spread
from midstream.api.bench.signals import ended_by_signal
from midstream.api.bench.sse import Timed, play
from midstream.api.bench.vllm_server import vllm_server
from midstream.api.cli.output import say
from midstream.api.cli.up.cluster import ClusterPlan, local_cluster
from midstream.api.settings import child_environment, load_settings
from midstream.control.errors import BadInput, MidstreamError

MODEL: Final = Path(".midstream/models/tiny")
FLAGS: Final = "--max-model-len 2048 --max-num-seqs 64 --kv-cache-memory-bytes 536870912 --enforce-eager"
NAME: Final = "bench"
ONE_PROCESS: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Core and worker of an engine in one process, as on one GPU: on a CPU vLLM would spin between two of them."""
PROMPT_WORDS: Final = 40
WARM_UP_CHATS: Final = 8
OURS: Final = ("gateway", "llumlet")
ARMS: Final = ("direct", "midstream")
FIGURES: Final = ("requests_per_s", "ttft_ms_p50", "gap_ms_p50")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of both arms."""

    model: Path = MODEL
    flags: str = FLAGS
    concurrencies: tuple[int, ...] = (1, 4, 16)
    repeats: int = 60
    tokens: int = 64
    threads: int = max(1, (os.cpu_count() or 2) - 1)
    seed: int = 1

    def __post_init__(self) -> None:
        if not (self.model / "config.json").is_file():
            raise BadInput(f"no model in {self.model} (`make vllm` makes two small ones)")
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise BadInput("concurrencies are numbers like 1,4,16")

    @property
    def vllm_flags(self) -> str:
        """Of both servers; a model without weights gets made-up ones."""
        has_weights = any(self.model.glob("*.safetensors"))
        return self.flags if has_weights else f"{self.flags} --load-format dummy"


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One way to the same model. `servers` are the processes between the client and the engine core, by name."""

    url: str
    servers: dict[str, int]
    engine: tuple[int, ...]
    """Processes of the engine."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """As many chats of one arm as go at a time, one repeat.

    So it is short: a machine that others share can change its speed by half within a minute.
    """

    answers: tuple[Timed, ...]
    took_s: float
    cpu_s: dict[str, float]
    engine_cpu_s: float

    @property
    def ttfts_ms(self) -> list[float]:
        """Of each answer."""
        return [answer.ttft_ms for answer in self.answers]

    def figures(self) -> dict[str, float]:
        """Of this block alone."""
        gaps = [gap for answer in self.answers for gap in answer.gaps_ms]
        return {
            "requests_per_s": len(self.answers) / self.took_s,
            "ttft_ms_p50": rank(self.ttfts_ms, 0.5) or 0.0,
            "gap_ms_p50": rank(gaps, 0.5) or 0.0,
        }


Blocks = dict[tuple[int, str], list[Block]]
"""By concurrency and arm, in the order of the repeats."""


def measure(plan: Plan, plots: Path | None = None) -> Measured:
    """Boot both, play in turn, compare; some minutes. Raises `MidstreamError`."""
    found = machine()
    with tempfile.TemporaryDirectory(prefix="midstream-bench-") as folder:
        blocks, resident = event_loop.run(_measure(plan, Path(folder)))
    rows = tuple(_row(concurrency, blocks) for concurrency in plan.concurrencies)
    if plots is not None:
        draw(rows, plots)
    params = msgspec.to_builtins(plan, enc_hook=str) | {"vllm_flags": plan.vllm_flags, "environment": ONE_PROCESS}
    return Measured(params=params, rows=rows, summary=_summary(rows, resident), machine=found)


async def _measure(plan: Plan, folder: Path) -> tuple[Blocks, dict[str, float]]:
    with ended_by_signal():
        async with _both(plan, folder) as arms:
            return await _play(plan, arms)


async def _play(plan: Plan, arms: dict[str, Arm]) -> tuple[Blocks, dict[str, float]]:
    say("warming up ...")
    for arm in arms.values():
        for concurrency in plan.concurrencies:
            await play(arm.url, _bodies(plan, f"warm {concurrency}", WARM_UP_CHATS + concurrency), concurrency)
    blocks: Blocks = {}
    for repeat in range(plan.repeats):
        for concurrency in plan.concurrencies:
            say(f"repeat {repeat + 1} of {plan.repeats}, {concurrency} at a time ...")
            for name in ARMS if repeat % 2 == 0 else reversed(ARMS):
                bodies = _bodies(plan, f"{repeat} {concurrency}", concurrency)
                blocks.setdefault((concurrency, name), []).append(await _block(arms[name], bodies, concurrency))
    return blocks, _resident_mb(arms)


@contextlib.asynccontextmanager
async def _both(plan: Plan, folder: Path) -> AsyncIterator[dict[str, Arm]]:
    """Both arms, booted one after the other: engines that load take every core."""
    settings = load_settings(
        engine="vllm", model=NAME, vllm_model=str(plan.model), vllm_args=plan.vllm_flags, vllm_cpu_threads=plan.threads,
        data_dir=folder / "cluster", gateway_port=0, admin_port=0,
    )  # fmt: skip
    own = child_environment(settings) | ONE_PROCESS | {"OMP_NUM_THREADS": str(plan.threads)}
    wanted = (*shlex.split(plan.vllm_flags), "--disable-uvicorn-access-log")
    flags = ("--model", str(plan.model), "--served-model-name", NAME, *wanted)
    say("booting vLLM's own server ...")
    async with vllm_server(flags, own, folder / "vllm.log") as (url, pid):
        say("booting Midstream ...")
        async with local_cluster(settings, ClusterPlan(sizes=(None,), environment=ONE_PROCESS), say) as cluster:
            parts = {part.kind: part.pid for part in cluster.state.processes if part.pid is not None}
            yield {
                "direct": Arm(url=url, servers={"server": pid}, engine=_below(pid)),
                "midstream": Arm(
                    url=cluster.state.gateway,
                    servers={kind: parts[kind] for kind in OURS},
                    engine=_below(parts["llumlet"]),
                ),
            }


def _bodies(plan: Plan, salt: str, count: int) -> list[dict[str, Any]]:
    """Chats that share no prefix with other blocks, the same for both arms."""
    return [
        {
            "model": NAME,
            "messages": [{"role": "user", "content": f"{plan.seed} {salt} {turn}: " + "tell me more " * PROMPT_WORDS}],
            "max_completion_tokens": plan.tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for turn in range(count)
    ]


async def _block(arm: Arm, bodies: Sequence[dict[str, Any]], concurrency: int) -> Block:
    before, engine_before, begun = _cpu_s(arm), _spent_s(arm.engine), time.perf_counter()
    answers = await play(arm.url, bodies, concurrency)
    took_s, after, engine_after = time.perf_counter() - begun, _cpu_s(arm), _spent_s(arm.engine)
    wrong = [answer.tokens for answer in answers if answer.tokens != bodies[0]["max_completion_tokens"]]
    if wrong:
        raise MidstreamError(f"{arm.url} answered with {wrong[0]} tokens")
    cpu_s = {name: after[name] - before[name] for name in after}
    return Block(answers=tuple(answers), took_s=took_s, cpu_s=cpu_s, engine_cpu_s=engine_after - engine_before)


def _below(pid: int) -> tuple[int, ...]:
    return tuple(process.pid for process in psutil.Process(pid).children(recursive=True))


def _cpu_s(arm: Arm) -> dict[str, float]:
    return {name: _spent_s((pid,)) for name, pid in arm.servers.items()}


def _spent_s(pids: Sequence[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(spent.user + spent.system for spent in times))


def _resident_mb(arms: Mapping[str, Arm]) -> dict[str, float]:
    return {
        name: round(psutil.Process(pid).memory_info().rss / 2**20, 1)
        for arm in arms.values()
        for name, pid in arm.servers.items()
    }


def _row(concurrency: int, blocks: Blocks) -> dict[str, Any]:
    """Medians over the repeats; what is added is taken within each repeat, of two blocks side by side."""
    figures = {name: [block.figures() for block in blocks[concurrency, name]] for name in ARMS}
    pairs = list(zip(figures["direct"], figures["midstream"], strict=True))
    row: dict[str, Any] = {"concurrency": concurrency, "repeats": len(pairs)}
    for name in ARMS:
        middle = [spread(figure, [one[figure] for one in figures[name]]) for figure in FIGURES]
        row[name] = {key: value for found in middle for key, value in found.items()} | _overall(
            blocks[concurrency, name]
        )
    row |= spread("ttft_added_ms_p50", [ours["ttft_ms_p50"] - own["ttft_ms_p50"] for own, ours in pairs])
    row |= spread("throughput_ratio", [ours["requests_per_s"] / own["requests_per_s"] for own, ours in pairs])
    return row | {"engine_busy_ratio": round(row["midstream"]["engine_busy"] / row["direct"]["engine_busy"], 4)}


def _overall(blocks: Sequence[Block]) -> dict[str, float]:
    """Of all repeats of an arm together: processor time is counted in hundredths of a second."""
    tokens = sum(answer.tokens for block in blocks for answer in block.answers)
    servers_s = sum(spent for block in blocks for spent in block.cpu_s.values())
    took_s, engine_s = (sum(getattr(block, part) for block in blocks) for part in ("took_s", "engine_cpu_s"))
    return {
        "ttft_ms_p99": round(rank([ttft for block in blocks for ttft in block.ttfts_ms], 0.99) or 0.0, 4),
        "cpu_us_per_token": round(1e6 * servers_s / tokens, 4),
        "engine_busy": round(engine_s / took_s, 4),
    }


def _summary(rows: Sequence[dict[str, Any]], resident: Mapping[str, float]) -> dict[str, Any]:
    """The worst concurrency of each, not the best."""
    return {
        "ttft_added_ms_p50": max(row["ttft_added_ms_p50"] for row in rows),
        "throughput_ratio": min(row["throughput_ratio"] for row in rows),
        "rss_mb": resident["gateway"],
        "rss_mb_llumlet": resident["llumlet"],
        "rss_mb_direct": resident["server"],
    }


def draw(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """TTFT and throughput of both arms over the concurrency, with the repeats' extremes."""
    with plot(folder, "gateway", width=9.0, height=4.0, ncols=2) as (_, axes):
        for axis, figure, label in (
            (axes[0], "ttft_ms_p50", "TTFT p50, ms"),
            (axes[1], "requests_per_s", "requests per second"),
        ):
            for name in ARMS:
                middle = [row[name][figure] for row in rows]
                low = [row[name][figure] - row[name][f"{figure}_min"] for row in rows]
                high = [row[name][f"{figure}_max"] - row[name][figure] for row in rows]
                at = [row["concurrency"] for row in rows]
                axis.errorbar(at, middle, yerr=(low, high), marker="o", capsize=3, label=name)
            axis.set(xscale="log", xlabel="requests at a time", ylabel=label)
            axis.set_xticks([row["concurrency"] for row in rows], [str(row["concurrency"]) for row in rows])
            axis.legend()
