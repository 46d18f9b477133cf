"""Plays, watches, verifies, reports."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from midstream.api.cli.client import AdminClient
from midstream.api.cli.output import Output, line
from midstream.api.cli.up.cluster import ClusterPlan, LocalCluster, local_cluster
from midstream.api.demo.audit import Audit, audit, percentile
from midstream.api.demo.operator import Operator
from midstream.api.demo.settle import settle
from midstream.api.settings import Settings
from midstream.api.traces import TraceRow, load_trace, window
from midstream.api.traces.send import SendPlan, Sent, row_prompt, send_trace
from midstream.control.adapters.sql_store import ArchiveStore
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.reference import reference_output
from midstream.migration.protocol.messages import RequestSpec, Sampling

TRACE = "azure_conv_2023"
SPEED = 3.0
"""The trace runs three times as fast, and so do the engines: the load is the recorded one."""
SIZES = (900, 600, 400, 300)
"""KV blocks of the four instances, 16 tokens each."""
PROGRESS_EVERY_S = 2.0
SEED = 11


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The whole result."""

    requests: int
    tokens: int
    wrong: tuple[str, ...]
    """Requests that failed or whose tokens differ from an undisturbed run."""
    leaks: tuple[str, ...]
    audit: Audit
    seconds: float

    @property
    def problems(self) -> list[str]:
        """Everything that was lost, repeated, different or leaked; empty is success."""
        found = [*self.wrong, *self.leaks, *(f"hole in the archive: {hole}" for hole in self.audit.holes)]
        found += [f"task failed: {failure}" for failure in self.audit.task_failures]
        if self.audit.decisions_equal != self.audit.decisions:
            found.append(f"decisions differ: {self.audit.first_difference}")
        if not self.audit.moves_by_reason:
            found.append("nothing was moved")
        return found


def run(settings: Settings, *, seconds: float, output: Output, kill: Sequence[str] = ()) -> int:
    """Play `seconds` of the trace on a fresh cluster; 0 if everything held."""
    console = Console(stderr=True)
    demo_settings = settings.model_copy(
        update={
            "data_dir": settings.data_dir / f"demo-{int(time.time() * 1e3)}",  # noqa: TID251 - a folder's name
            "gateway_port": 0,
            "admin_port": 0,
            "sim_time_scale": 1.0 / SPEED,
        }
    )
    verdict = asyncio.run(_demo(demo_settings, seconds, tuple(kill), console))
    if output is Output.table:
        Console(file=sys.stdout).print(_table(verdict))
    else:
        line(msgspec.to_builtins(verdict) | {"problems": verdict.problems})
    for problem in verdict.problems[:20]:
        console.print(f"[red]✗[/red] {problem}")
    return 1 if verdict.problems else 0


async def _demo(settings: Settings, seconds: float, kill: tuple[str, ...], console: Console) -> Verdict:
    begun = time.monotonic()
    rows = window(load_trace(TRACE), seconds=seconds)
    console.print(f"starting a cluster of {len(SIZES)} instances ({', '.join(map(str, SIZES))} KV blocks)")
    plan = ClusterPlan(sizes=SIZES, controllers=2)

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - begun:6.1f} s[/dim]  {text}")

    async with local_cluster(settings, plan, say) as cluster:
        state = cluster.state
        say(f"playing {seconds:.0f} s of {TRACE} at {SPEED:g} x: {len(rows)} requests; admin API at {state.admin}")
        admin = AdminClient(state.admin, state.admin_key)
        sent = await _play(cluster, admin, rows, seconds, kill, say)
        leaks = await asyncio.to_thread(settle, admin, state.database_url)
        say("verifying: undisturbed runs, the archive, every decision")
        wrong = tuple(await asyncio.to_thread(_compare, settings, rows, sent))
        store = ArchiveStore(state.database_url)
        try:
            found = await asyncio.to_thread(audit, store)
        finally:
            store.close()
    return Verdict(
        requests=len(sent),
        tokens=sum(one.output_tokens for one in sent),
        wrong=wrong,
        leaks=leaks,
        audit=found,
        seconds=time.monotonic() - begun,
    )


async def _play(
    cluster: LocalCluster,
    admin: AdminClient,
    rows: Sequence[TraceRow],
    seconds: float,
    kill: tuple[str, ...],
    say: Any,
) -> list[Sent]:
    done: list[Sent] = []
    operator = Operator(cluster, admin, seconds / SPEED, say)

    async def progress() -> None:
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            tokens = sum(one.output_tokens for one in done)
            failed = sum(one.error is not None for one in done)
            say(f"{len(done)} of {len(rows)} requests done, {tokens} tokens, {failed} failed")

    watching = asyncio.create_task(progress())
    operating = asyncio.create_task(operator.work(kill))
    try:
        sent = await send_trace(rows, SendPlan(url=cluster.state.gateway, speed=SPEED, seed=SEED), done.append)
        await operating
    finally:
        watching.cancel()
        operating.cancel()
    return sent


def _compare(settings: Settings, rows: Sequence[TraceRow], sent: Sequence[Sent]) -> list[str]:
    """Every stream against the run that nothing ever happened to."""
    config = SimConfig(model=settings.served_model)
    wrong = []
    for one, row in zip(sent, rows, strict=True):
        sampling = Sampling(max_tokens=row.output_tokens, temperature=1.0, seed=SEED + one.row, ignore_eos=True)
        prompt = tuple(row_prompt(one.row, row, SEED))
        expected, _ = reference_output(RequestSpec(request="", prompt=prompt, sampling=sampling), config)
        if one.error is not None:
            wrong.append(f"request {one.row}: {one.error}")
        elif one.token_ids != expected:
            wrong.append(f"request {one.row}: tokens differ from an undisturbed run")
    return wrong


def _table(verdict: Verdict) -> Table:
    found = verdict.audit
    table = Table(title="Midstream demo", show_header=False, min_width=72)
    right = verdict.requests - len(verdict.wrong)
    rows = [
        ("requests, tokens", f"{verdict.requests}, {verdict.tokens}"),
        ("moves by reason", _counts(found.moves_by_reason)),
        ("moves given up (request stayed)", _counts(found.refused_by_code)),
        ("downtime p50 / p99 / max", _milliseconds(found.downtime_ms)),
        ("  in decode steps p50 / p99", _steps(found.downtime_steps)),
        ("freeze to adopt p50 / p99 / max", _milliseconds(found.freeze_to_adopt_ms)),
        ("requests failed", str(found.requests_failed)),
        ("blocks leaked", "none" if not verdict.leaks else "; ".join(verdict.leaks)),
        ("facts archived, holes", f"{found.facts}, {len(found.holes)}"),
        ("tokens equal to an undisturbed run", f"{right} of {verdict.requests}"),
        ("decisions re-derived from the log", f"{found.decisions_equal} of {found.decisions} equal"),
        ("took", f"{verdict.seconds:.0f} s"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _counts(counts: dict[str, int]) -> str:
    total = sum(counts.values())
    parts = ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda pair: -pair[1]))
    return f"{total} ({parts})" if counts else "0"


def _milliseconds(ordered: tuple[float, ...]) -> str:
    if not ordered:
        return "none measured"
    return " / ".join(f"{percentile(ordered, share):.1f} ms" for share in (0.5, 0.99, 1.0))


def _steps(ordered: tuple[float, ...]) -> str:
    if not ordered:
        return "none measured"
    return " / ".join(f"{percentile(ordered, share):.2f}" for share in (0.5, 0.99))
