"""The machines, explored: every reachable state of small clusters, and planted faults that must be found."""

from __future__ import annotations

import pytest

from tests.migration.model import CONFIGS, Config, explore, main
from tests.migration.mutants import MUTANTS, Mutant

MUTANT_STATES_MAX = 150_000


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_P01_P02_P07_P08_every_reachable_state_is_safe_and_has_a_way_to_the_end(config: Config) -> None:
    report = explore(config)
    assert report.violation is None, "\n".join((report.violation or "", *report.trace))
    assert report.is_complete
    assert report.states > 100, "a check that reaches nothing proves nothing"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_P01_a_planted_fault_is_found(mutant: Mutant) -> None:
    report = explore(mutant.config, mutant.machines, states_max=MUTANT_STATES_MAX)
    assert report.violation is not None, f"{report.states} states explored, nothing seen"
    assert report.trace


def test_a_violation_is_told_as_a_readable_trace() -> None:
    mutant = MUTANTS[0]
    report = explore(mutant.config, mutant.machines, states_max=MUTANT_STATES_MAX)
    assert any(line.startswith("deliver Final(") for line in report.trace)
    assert any(line.startswith("deadline at A") for line in report.trace)


def test_the_command_line_prints_what_was_explored(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dispatch, failure"]) == 0
    printed = capsys.readouterr().out
    assert "no violation" in printed
    assert "states" in printed
