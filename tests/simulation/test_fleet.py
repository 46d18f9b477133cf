"""Fleets on virtual time: many steps at once are single steps, a seed is a log, and nothing is lost or left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from midstream.api.simulation.fleet import Fleet, FleetPlan, Played, play
from midstream.api.traces import TraceRow
from midstream.api.traces.workload import workload
from midstream.control.events import Entry, InstanceDrained
from midstream.control.state import PolicyChoice, PolicySettings
from midstream.instance.engines.sim.config import SimConfig

ROOT = Path(__file__).parents[2]
ENGINE = SimConfig(
    kv="lengths",
    prefix_cache=False,
    stream_interval_ms=5_000,
    steps_at_once_max=128,
    blocks_total=512,
    slots_max=64,
    bytes_per_token=131_072,
)
PLAN = FleetPlan(instances=4, engine=ENGINE, digests=True)

DIGEST = """
from midstream.api.simulation.run import quiet
from tests.simulation.test_fleet import PLAN, play, rows
quiet()
print(play(PLAN, rows()).record.digest)
"""


def rows(requests: int = 120) -> tuple[TraceRow, ...]:
    """Enough at once for queues, preemptions and moves."""
    return workload("azure_conv_2023", seed=3, rate_scale=4.0, requests=requests)


def one_by_one(plan: FleetPlan) -> FleetPlan:
    return msgspec.structs.replace(plan, engine=msgspec.structs.replace(plan.engine, steps_at_once_max=1))


def play_and_keep(plan: FleetPlan, workload_rows: tuple[TraceRow, ...]) -> tuple[Played, Fleet, list[Entry]]:
    kept: list[Fleet] = []
    entries: list[Entry] = []

    def look(fleet: Fleet) -> None:
        kept.append(fleet)
        fleet.store.readers.append(entries.append)

    return play(plan, workload_rows, look), kept[0], entries


@pytest.mark.parametrize("seed", [1, 2])
def test_P17_many_steps_at_once_are_the_same_log_and_the_same_token_times_as_single_steps(seed: int) -> None:
    plan = msgspec.structs.replace(PLAN, seed=seed, drain_at_s=6.0)
    at_once, _, entries = play_and_keep(plan, rows())
    single, _, expected = play_and_keep(one_by_one(plan), rows())
    assert entries == expected
    assert at_once.record.token_s == single.record.token_s
    assert at_once.record.digest == single.record.digest
    assert at_once.record.moves > 0 and at_once.record.preemptions > 0, "nothing happened that could differ"


def test_P17_a_seed_is_one_log_byte_for_byte_in_every_process() -> None:
    here = play(PLAN, rows()).record.digest
    environment = os.environ | {"PYTHONHASHSEED": "4242"}  # noqa: TID251 - a child's
    done = subprocess.run(
        [sys.executable, "-c", DIGEST], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [here]
    assert play(msgspec.structs.replace(PLAN, seed=1), rows()).record.digest != here


def test_P04_P07_every_request_gets_all_its_tokens_and_every_block_comes_back() -> None:
    workload_rows = rows()
    played, fleet, _ = play_and_keep(PLAN, workload_rows)
    record = played.record
    assert (played.refused, record.failed, len(record.finished)) == (0, {}, len(workload_rows))
    for index, row in enumerate(workload_rows):
        assert record.finished[f"r{index}"].output_tokens == len(record.token_s[f"r{index}"]) == row.output_tokens
        assert record.token_s[f"r{index}"] == sorted(record.token_s[f"r{index}"])
    assert [llumlet.engine.account().free for llumlet in fleet.llumlets] == [ENGINE.blocks_total] * 4


def test_what_a_gateway_measures_is_what_the_engines_did() -> None:
    """Tokens travel in bulk; first and last do not, so waits and mean gaps are true."""
    record = play(PLAN, rows(40)).record
    for request, finished in record.finished.items():
        times = record.token_s[request]
        if len(times) > 1:
            mean_ms = 1e3 * (times[-1] - times[0]) / (len(times) - 1)
            assert finished.gap_ms_mean == pytest.approx(mean_ms, abs=1.0)


def test_a_prefix_that_is_shared_is_computed_once() -> None:
    plan = msgspec.structs.replace(PLAN, instances=1, engine=msgspec.structs.replace(ENGINE, prefix_cache=True))
    alone = TraceRow(0.0, 3_000, 4, content=(1, 2, 3, 4, 5, 6))
    other = TraceRow(5.0, 3_000, 4, content=(1, 2, 3, 4, 5, 7))
    stranger = TraceRow(10.0, 3_000, 4, content=(8, 9, 10, 11, 12, 13))
    finished = play(plan, (alone, other, stranger)).record.finished
    assert finished["r1"].ttft_ms < 0.5 * finished["r0"].ttft_ms
    assert finished["r2"].ttft_ms == pytest.approx(finished["r0"].ttft_ms, rel=0.05)


def test_P16_64_running_requests_leave_a_draining_instance_within_2_s_at_25_gbit() -> None:
    """About 3 GB of KV leave over a link that carries 3.1 GB a second: 64 requests of some 350 tokens, 131 kB each."""
    policies = PolicySettings(
        dispatch=PolicyChoice("freeness"),
        moves=(PolicyChoice("drain"),),
        moves_per_tick_max=64,
        moves_per_instance_max=16,
    )
    engine = msgspec.structs.replace(ENGINE, blocks_total=8_192, slots_max=128)
    plan = msgspec.structs.replace(PLAN, instances=16, engine=engine, policies=policies, drain_at_s=3.0)
    workload_rows = tuple(TraceRow(index / 512, 300, 400) for index in range(1_024))  # no queues: spread evenly
    played, _, entries = play_and_keep(plan, workload_rows)
    asked_ms = played.began_ms + 3_000
    drained = [e.fact.at_ms for e in entries if isinstance(e.fact.event, InstanceDrained)]
    assert played.record.moves >= 64
    assert len(drained) == 1
    assert drained[0] - asked_ms <= 2_000
    assert len(played.record.finished) == 1_024
