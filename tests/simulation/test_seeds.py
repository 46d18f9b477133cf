"""The whole cluster under faults, for seeds that nobody has seen before, and for some that must never change."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from midstream.api.simulation.run import SeedReport, run_seed, run_seeds
from midstream.api.simulation.workload import HANDOVER_KINDS, draw_scenario
from midstream.control.simulate.faults import Lossy
from midstream.migration.protocol import messages

ROOT = Path(__file__).parents[2]
SEEDS = 200
JOBS = 2
HARSH = 3.0
REPRODUCE = "python -m midstream.api.simulation --first {seed} --seeds 1 --trace"

DIGESTS = """
from midstream.api.simulation.run import quiet, run_seed
quiet()
for seed in (1, 2, 3):
    print(run_seed(seed, 3.0).digest)
"""


def first_seed() -> int:
    """Seconds since 1970, in steps of `SEEDS`: each run of the tests has seeds of its own."""
    return int(datetime.now(UTC).timestamp()) // SEEDS * SEEDS


@pytest.mark.timeout(400)
def test_P01_to_P21_hold_for_fresh_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    """What the oracle checks: tokens, owners, blocks, terminal facts, decisions, holes, repeats, replay."""
    first = first_seed()
    reports = list(run_seeds(range(first, first + SEEDS), jobs=JOBS))
    failed = [report for report in reports if report.violations]
    assert not failed, explain(failed)
    assert len(reports) == SEEDS
    moves, faults = sum(report.moves for report in reports), sum(report.faults for report in reports)
    with capsys.disabled():
        print(f"\n{SEEDS} seeds from {first}: {moves} moves, {faults} faults, 0 violations")  # noqa: T201
    assert moves > SEEDS and faults > SEEDS, "a run in which nothing happens shows nothing"


def explain(failed: list[SeedReport]) -> str:
    lines = [f"seed {report.seed}: {violation}" for report in failed for violation in report.violations]
    return "\n".join([*lines, "again: " + REPRODUCE.format(seed=failed[0].seed)])


def test_P17_a_seed_gives_the_same_log_byte_for_byte_in_every_process() -> None:
    here = [run_seed(seed, HARSH).digest for seed in (1, 2, 3)]
    assert [run_seed(seed, HARSH).digest for seed in (1, 2, 3)] == here
    assert len(set(here)) == 3
    there = [digests_in_a_process_with(hash_seed) for hash_seed in ("1", "4242")]
    assert there == [here, here]


def digests_in_a_process_with(hash_seed: str) -> list[str]:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}  # noqa: TID251 - a child's
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_a_seed_without_faults_has_none() -> None:
    scenario = draw_scenario(5, intensity=0.0)
    assert (scenario.faults, scenario.outages, scenario.strikes) == ((), (), ())


def test_every_fault_of_a_hand_over_names_messages_that_exist() -> None:
    assert all(hasattr(messages, kind) for kinds in HANDOVER_KINDS for kind in kinds)
    drawn = {fault.only for seed in range(60) for fault in draw_scenario(seed).faults if isinstance(fault, Lossy)}
    assert drawn >= set(HANDOVER_KINDS)
