"""Boots two engines, streams each prompt undisturbed and then moved, compares every token, reports."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

import httpx
import msgspec
import psutil
from rich.console import Console

from midstream.api.cli.client import AdminClient
from midstream.api.cli.output import Output, line
from midstream.api.cli.up.cluster import ClusterPlan, local_cluster
from midstream.api.cli.up.state import UpState
from midstream.api.demo.audit import Audit, audit
from midstream.api.demo.settle import settle
from midstream.api.demo.vllm.prompts import ACTS
from midstream.api.demo.vllm.stage import Played, Stage
from midstream.api.settings import Settings
from midstream.control.adapters.sql_store import ArchiveStore
from midstream.control.errors import MidstreamError

CONNECT_S = 10.0
ANSWER_S = 600.0

CHANGES = {
    "engine": "vllm",
    "gateway_port": 0,
    "admin_port": 0,
    "move_policies": "drain",
    "cooldown_ms": 0,
}
FLAGS = "--max-model-len 4096 --max-num-seqs 8 --max-num-batched-tokens 4096 --no-enable-prefix-caching"
"""Without a prefix cache the second run of a prompt does the very same arithmetic as the first."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The whole result."""

    played: tuple[Played, ...]
    leaks: tuple[str, ...]
    audit: Audit
    seconds: float

    @property
    def problems(self) -> list[str]:
        """Everything that was lost, repeated, different or leaked; empty is success."""
        found = [problem for one in self.played for problem in one.problems]
        found += [*self.leaks, *(f"hole in the archive: {hole}" for hole in self.audit.holes)]
        found += [f"task failed: {failure}" for failure in self.audit.task_failures]
        if self.audit.decisions_equal != self.audit.decisions:
            found.append(f"decisions differ: {self.audit.first_difference}")
        return found


def run(settings: Settings, *, output: Output) -> int:
    """Play all acts on a fresh cluster of two engines; 0 if everything held."""
    from midstream.api.demo.vllm.report import report

    console = Console(stderr=True)
    folder = settings.data_dir / f"demo-vllm-{int(time.time() * 1e3)}"  # noqa: TID251 - a folder's name
    flags = f"{FLAGS} {settings.vllm_args}".strip()
    changes = CHANGES | {"data_dir": folder, "vllm_args": flags}
    verdict = asyncio.run(_demo(settings.model_copy(update=changes), console))
    if output is Output.table:
        report(verdict, Console(file=sys.stdout))
    else:
        line(msgspec.to_builtins(verdict) | {"problems": verdict.problems})
    for problem in verdict.problems[:20]:
        console.print(f"[red]✗[/red] {problem}")
    return 1 if verdict.problems else 0


async def _demo(settings: Settings, console: Console) -> Verdict:
    begun = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - begun:6.1f} s[/dim]  {text}", highlight=False)

    say(f"starting two vLLM engines with {settings.served_model}, a gateway and the control plane (half a minute)")
    async with local_cluster(settings, ClusterPlan(sizes=(None, None)), say) as cluster:
        state = cluster.state
        say(f"OpenAI API at {state.gateway}/v1, admin API at {state.admin}/api/v1")
        with contextlib.closing(AdminClient(state.admin, state.admin_key)) as admin:
            timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
            async with httpx.AsyncClient(base_url=state.gateway, timeout=timeout, trust_env=False) as http:
                stage = Stage(
                    http, admin, settings.served_model, console, say, lambda name: kill_core(cluster.state, name)
                )
                played = [await stage.play(act) for act in ACTS]
            say("verifying: leaks, the archive, every decision")
            leaks = await asyncio.to_thread(settle, admin, state.database_url)
        found = await asyncio.to_thread(_audit, state.database_url)
    return Verdict(played=tuple(played), leaks=leaks, audit=found, seconds=time.monotonic() - begun)


def kill_core(state: UpState, instance: str) -> None:
    """`kill -9` the engine core of an instance. Raises `MidstreamError` if there is none."""
    pids = [process.pid for process in state.processes if process.name == instance and process.pid is not None]
    cores = [child for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    if not cores:
        raise MidstreamError(f"{instance} has no engine core to kill")
    for core in cores:
        core.kill()


def _audit(database_url: str) -> Audit:
    with contextlib.closing(ArchiveStore(database_url)) as store:
        return audit(store)
