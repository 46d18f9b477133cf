"""The same small workload on a live cluster and on a simulated fleet: same tokens, placements, and like times (P31)."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from statistics import median

from midstream.api.simulation.fleet import FleetPlan, play
from midstream.api.traces import TraceRow
from midstream.api.traces.send import SendPlan, Sent, send_trace
from midstream.control.events import RequestDispatched
from midstream.control.state import PolicyChoice, PolicySettings
from midstream.instance.engines.sim.config import SimConfig
from tests.e2e.helpers import running

BLOCKS = 512
SCALE = 2.0
"""Steps of 60 ms: what the machine adds to them is little."""
ROWS = tuple(TraceRow(0.25 * index, 200 + 40 * index, 16 + 3 * index) for index in range(12))
ENGINE = SimConfig(kv="lengths", prefix_cache=False, blocks_total=BLOCKS, time_scale=SCALE, steps_at_once_max=64)
POLICIES = PolicySettings(dispatch=PolicyChoice("round_robin"), moves=(PolicyChoice("none"),))


async def live(folder: Path) -> tuple[list[Sent], Counter[str]]:
    """What clients saw, and how many requests each instance was given."""
    settings = {"sim_time_scale": SCALE, "dispatch_policy": "round_robin", "move_policies": "none"}
    async with running(folder, (BLOCKS, BLOCKS, BLOCKS), **settings) as rig:
        sent = await send_trace(ROWS, SendPlan(url=rig.state.gateway), lambda one: None)
        events = [entry.fact.event for entry in await rig.facts()]
        return sent, Counter(event.owner.instance for event in events if isinstance(event, RequestDispatched))


def test_P31_a_workload_is_served_alike_live_and_simulated(tmp_path: Path) -> None:
    sent, placed = asyncio.run(live(tmp_path))
    record = play(FleetPlan(instances=3, engine=ENGINE, policies=POLICIES), ROWS).record
    simulated = [record.finished[f"r{index}"] for index in range(len(ROWS))]
    assert [one.error for one in sent] == [None] * len(ROWS)
    assert [one.output_tokens for one in sent] == [one.output_tokens for one in simulated]
    assert sorted(placed.values()) == [4, 4, 4]
    assert 0.8 < median(_gap_ms(one) for one in sent) / median(one.gap_ms_mean for one in simulated) < 1.5
    assert 0.7 < median(one.ttft_ms or 0.0 for one in sent) / median(one.ttft_ms for one in simulated) < 2.5


def _gap_ms(one: Sent) -> float:
    assert one.ttft_ms is not None
    return (one.duration_ms - one.ttft_ms) / (one.output_tokens - 1)
