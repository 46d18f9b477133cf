"""Benchmarks print the agreed object, and a figure that was not taken fails the run (P31)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from midstream.api.bench import control, transfer
from midstream.api.bench.plots import plot
from midstream.api.bench.report import Measured, is_missing, machine, rank, show
from midstream.api.bench.states import cluster_state, life
from midstream.api.cli.main import BAD_INPUT, run
from midstream.control.fold import fold


def test_an_unknown_bench_is_one_line_and_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "nothing"]) == BAD_INPUT
    assert "No such command 'nothing'" in capsys.readouterr().err


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    with plot(tmp_path / "new", "line") as (_, axes):
        axes.plot([1, 2], [3, 4])
    assert (tmp_path / "new" / "line.png").read_bytes().startswith(b"\x89PNG")


def test_P31_a_missing_measurement_fails_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    whole = Measured(params={}, summary={"a": {"b": 1.0}}, machine=machine())
    assert show("x", whole, as_json=True) == 0
    broken = Measured(params={}, summary={"a": {"b": None}}, machine=machine())
    assert show("x", broken, as_json=True) == 1
    assert show("x", broken, as_json=False) == 1
    printed = json.loads(capsys.readouterr().out.splitlines()[0])
    assert {"bench", "version", "commit", "machine", "params", "rows", "summary"} <= set(printed)
    assert set(printed["machine"]) == {"cpu", "cores", "memory_gb", "python", "load_before"}


def test_ranks() -> None:
    assert rank([3.0, 1.0, 2.0], 0.5) == 2.0
    assert rank([1.0], 0.99) == 1.0
    assert rank([], 0.5) is None
    assert not is_missing({"a": 0.0, "b": {"c": False}})


def test_made_up_clusters_are_busy_and_uneven() -> None:
    state = cluster_state(10, 3, seed=1)
    assert (len(state.instances), len(state.requests), state.gaps) == (10, 30, 0)
    free = sorted(view.load.blocks_free for view in state.instances.values())
    assert free[4] < free[5] / 4
    after = fold(life(2_000, 4, seed=1))
    assert (after.requests, after.gaps) == ({}, 0)


def test_figures_of_pure_parts_are_taken() -> None:
    assert len(control.decide_ms(4)) == len(control.dispatch_ms(4)) == control.DECISIONS
    assert min(control.folded_per_s()) > 0
    assert len(control.lookup_ms(4, 64)) == control.LOOKUPS


async def test_commits_are_measured_on_a_real_valkey(tmp_path: Path) -> None:
    times = await control.commit_ms(tmp_path)
    assert len(times) == control.COMMITS
    assert min(times) > 0


def test_transfers_are_measured_between_two_processes_and_drawn(tmp_path: Path) -> None:
    measured = transfer.measure(("shm", "rpc"), (8, 64), ("small",), 1, 64 << 20, 1)
    assert [(row["backend"], row["size_mb"]) for row in measured.rows] == [
        ("shm", 8), ("rpc", 8), ("shm", 64), ("rpc", 64)
    ]  # fmt: skip
    assert not is_missing(measured.summary)
    assert all(row["gib_s"] > 0 and row["ratio"] > 0 for row in measured.rows)
    transfer.draw(measured, tmp_path)
    assert (tmp_path / "transfer.png").stat().st_size > 0


def test_the_founding_curves_are_there_for_orientation() -> None:
    curves = transfer.founding()
    assert set(curves) == {"rpc", "gloo", "nccl"}
    assert 1.0 < curves["rpc"][8.0] < 1.1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--sizes", "many"], "whole numbers"),
        (["--sizes", ""], "at least one"),
        (["--backends", "nccl"], "no raw medium to compare 'nccl'"),
        (["--layouts", "round"], "no layout 'round'"),
        (["--backends", "pigeon"], "no transfer is called 'pigeon'"),
    ],
)
def test_P29_a_transfer_that_cannot_be_measured_is_one_line(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "transfer", *options]) != 0
    said = capsys.readouterr().err.splitlines()
    assert told in said[-1]


HEARS_CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""A shell's background job, and so these tests if they are one, is deaf to it."""


def test_a_transfer_bench_that_is_interrupted_ends_in_one_line_and_takes_its_processes_along(tmp_path: Path) -> None:
    """Ctrl-C reaches the whole process group of a terminal."""
    bench_transfer = ["-m", "midstream.api.cli", "bench", "transfer", "--sizes", "64", "--backends", "rpc"]
    command = [sys.executable, "-c", HEARS_CTRL_C, *bench_transfer]
    bench = subprocess.Popen(
        command, cwd=tmp_path, text=True, start_new_session=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert bench.stderr is not None
    first = bench.stderr.readline()
    os.killpg(bench.pid, signal.SIGINT)
    out, said = bench.communicate(timeout=60)
    assert first == "layout 7b: 64 MB ...\n"
    assert said == "midstream: ended by a signal before everything was measured\n"
    assert (bench.returncode, out) == (1, "")
