"""What the control plane costs: folding, committing, deciding, dispatching, and doing nothing."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from midstream.api.bench.report import Measured, machine, rank
from midstream.api.bench.states import NOW_MS, cluster_state, life
from midstream.api.cli.output import say
from midstream.api.cli.up.cluster import ClusterPlan, local_cluster
from midstream.api.gateway.prefixes import BLOCKS_MAX, PrefixIndex
from midstream.api.settings import load_settings
from midstream.control.adapters.local_valkey import LocalValkey
from midstream.control.adapters.redis_log import RedisLog
from midstream.control.decide import decide
from midstream.control.events import Fact, TickElapsed
from midstream.control.fold import apply
from midstream.control.ids import COMMIT_SOURCE, START
from midstream.control.policies import DISPATCH, DispatchWanted, InFlight, choose
from midstream.control.state import PolicyChoice, PolicySettings, State
from midstream.migration.protocol.messages import CacheChange
from midstream.migration.protocol.prefixes import prefix_keys

SEED: Final = 5
FACTS: Final = 40_000
REPEATS: Final = 5
SIZES: Final = (4, 64, 1_000)
DISPATCH_SIZES: Final = (64, 1_000)
REQUESTS_EACH: Final = 8
DECISIONS: Final = 200
LOOKUPS: Final = 20
LOOKUP_TOKENS: Final = (2_048, 8_192, 16_384)
COMMITS: Final = 500
FACTS_PER_COMMIT: Final = 3
IDLE_SETTLE_S: Final = 4.0
IDLE_S: Final = 10.0


def measure() -> Measured:
    """Everything; about half a minute."""
    params = {
        "facts": FACTS, "repeats": REPEATS, "requests_each": REQUESTS_EACH, "decisions": DECISIONS, "lookups": LOOKUPS,
        "commits": COMMITS, "facts_per_commit": FACTS_PER_COMMIT, "idle_s": IDLE_S, "seed": SEED,
    }  # fmt: skip
    found = machine()
    say("folding ...")
    folded = folded_per_s()
    say("deciding ...")
    summary: dict[str, Any] = {
        "facts_folded_per_s": rank(folded, 0.5),
        "facts_folded_per_s_min": min(folded),
        "facts_folded_per_s_max": max(folded),
        "decide_ms_p99": {str(size): rank(decide_ms(size), 0.99) for size in SIZES},
        "dispatch_ms_p99": {str(size): rank(dispatch_ms(size), 0.99) for size in DISPATCH_SIZES},
    }
    say("dispatching by every policy ...")
    rows = dispatch_rows()
    summary["dispatch_ms_p99_max"] = {
        str(size): max(row["p99_ms"] for row in rows if row["instances"] == size) for size in DISPATCH_SIZES
    }
    say("looking up prefixes ...")
    summary |= {
        f"prefix_lookup_ms_p99_{tokens}_tokens": {
            str(size): rank(lookup_ms(size, tokens), 0.99) for size in DISPATCH_SIZES
        }
        for tokens in LOOKUP_TOKENS
    }
    with tempfile.TemporaryDirectory() as folder:
        say("committing ...")
        commits = asyncio.run(commit_ms(Path(folder) / "valkey"))
        say(f"doing nothing for {IDLE_S:g} s ...")
        idle = asyncio.run(idle_cpu(Path(folder) / "cluster"))
    summary |= {"commit_ms_p50": rank(commits, 0.5), "commit_ms_p99": rank(commits, 0.99)} | idle
    return Measured(params=params, rows=tuple(rows), summary=summary, machine=found)


def folded_per_s() -> list[float]:
    """Facts per second of one core, several times over."""
    entries = life(FACTS, instances=16, seed=SEED)
    rates = []
    for _ in range(REPEATS):
        state = State()
        begun = time.perf_counter()
        for entry in entries:
            apply(state, entry)
        rates.append(len(entries) / (time.perf_counter() - begun))
    return rates


def decide_ms(instances: int) -> list[float]:
    """Whole decisions on an uneven cluster."""
    state = cluster_state(instances, REQUESTS_EACH, SEED)
    ticks = [TickElapsed(now_ms=NOW_MS + 10_000, seed=seed, decided_at=state.position) for seed in range(DECISIONS)]
    return [best_ms(partial(decide, state, tick)) for tick in ticks]


def dispatch_ms(instances: int, policy: str = "freeness") -> list[float]:
    """Choices of an instance for a new request of some session, of whose prompt every fourth instance has a part."""
    state = cluster_state(instances, REQUESTS_EACH, SEED)
    state.policies = PolicySettings(dispatch=PolicyChoice(policy))
    cached = dict.fromkeys(list(state.instances)[::4], 512)
    sent = {name: InFlight(2, 100) for name in list(state.instances)[::8]}
    wanted = [
        DispatchWanted(
            request=f"new-{turn}", prompt_tokens=1_000, output_tokens_max=400, session=f"s-{turn}", cached=cached
        )
        for turn in range(DECISIONS)
    ]
    return [best_ms(partial(choose, state, one, sent, turn)) for turn, one in enumerate(wanted)]


def dispatch_rows() -> list[dict[str, Any]]:
    """The same for every policy."""
    rows = []
    for policy in DISPATCH:
        for size in DISPATCH_SIZES:
            times = dispatch_ms(size, policy)
            row = {"policy": policy, "instances": size}
            rows.append(row | {"p50_ms": rank(times, 0.5), "p99_ms": rank(times, 0.99), "max_ms": max(times)})
    return rows


def lookup_ms(instances: int, tokens: int) -> list[float]:
    """What `prefix_affinity` asks before it chooses: who holds how much of a prompt. The worst case: all hold all."""
    state, prompt, index = cluster_state(instances, REQUESTS_EACH, SEED), tuple(range(tokens)), PrefixIndex()
    for view in state.instances.values():
        keys = prefix_keys(prompt, view.fingerprint.block_tokens, BLOCKS_MAX)
        index.learn(view.owner, CacheChange(upto=1, is_whole=True, stored=b"".join(keys)))
    return [best_ms(partial(index.cached, state, prompt)) for _ in range(LOOKUPS)]


async def commit_ms(directory: Path) -> list[float]:
    """Atomic commits on a real Valkey, one after the other."""
    valkey = LocalValkey(directory)
    valkey.start()
    log = RedisLog(valkey.url, cluster="bench", opened_by="bench")
    try:
        generation = (await log.tail()).generation
        position, times = START, []
        for number in range(COMMITS):
            tick = TickElapsed(now_ms=NOW_MS, seed=number, decided_at=position)
            first = number * FACTS_PER_COMMIT + 1
            facts = [
                Fact(COMMIT_SOURCE, generation, seq, NOW_MS, tick) for seq in range(first, first + FACTS_PER_COMMIT)
            ]
            begun = time.perf_counter()
            position = await log.commit(after=position, facts=facts, commands=())
            times.append(1e3 * (time.perf_counter() - begun))
        return times
    finally:
        await log.close()
        valkey.stop()


async def idle_cpu(data_dir: Path) -> dict[str, float | None]:
    """Cores that a controller and a llumlet use while nothing happens."""
    settings = load_settings(data_dir=data_dir, gateway_port=0, admin_port=0)
    async with local_cluster(settings, ClusterPlan(sizes=(1_000, 1_000)), say) as cluster:
        await asyncio.sleep(IDLE_SETTLE_S)
        pids = {
            kind: cluster.state.process(name).pid for kind, name in (("controller", "controller-0"), ("llumlet", "i0"))
        }
        before = {kind: _cpu_s(pid) for kind, pid in pids.items()}
        await asyncio.sleep(IDLE_S)
        return {f"idle_cpu_{kind}": _share(before[kind], _cpu_s(pid)) for kind, pid in pids.items()}


def _share(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else (after - before) / IDLE_S


def _cpu_s(pid: int | None) -> float | None:
    """User and system time of a process so far; None where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def best_ms(work: Callable[[], object]) -> float:
    """The shortest of a few runs of the same work: what it costs, without what else the machine does."""
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begun))
    return min(times)
