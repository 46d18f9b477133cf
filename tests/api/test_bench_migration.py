"""`midstream bench migration`: every mode on a real cluster, and the arithmetic of its summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midstream.api.bench.migration import Plan, draw, measure, summary
from midstream.api.bench.moves import Moved, measured
from midstream.api.bench.report import is_missing
from midstream.api.bench.streams import Stream
from midstream.control.errors import BadInput

STEP_US = 50_000
SEAM = 30


def facts(mode_rounds: list[dict[str, Any]], *, tail: int = 0) -> list[dict[str, Any]]:
    """What the log says of a move: prepared at 1,000 ms, frozen behind output token 29, which came at 1,450 ms."""
    return [
        {"kind": "MigrationStarted", "at_ms": 900, "event": {}},
        {"kind": "MigrationPrepared", "at_ms": 1_000, "event": {}},
        {"kind": "RequestFrozen", "at_ms": 1_450, "event": {"tokens": 100 + SEAM}},
        *mode_rounds,
        {"kind": "MigrationAdopted", "at_ms": 1_470, "event": {"freeze_to_adopt_ms": 20.0}},
        {"kind": "MigrationCommitted", "at_ms": 1_480, "event": {"tail_tokens": tail}},
    ]


def copied(at_ms: int, *, is_final: bool = False) -> dict[str, Any]:
    event = {"copied_bytes": 10, "blocks": 1, "duration_ms": 5.0, "is_final": is_final}
    return {"kind": "RoundCopied", "at_ms": at_ms, "event": event}


def stream(seam_gap_us: int) -> Stream:
    """One token each 50 ms, and one longer gap at the seam."""
    found = Stream(prompt_tokens=100, max_tokens=1_000)
    for index in range(60):
        found.times_us.append(index * STEP_US + (seam_gap_us - STEP_US if index >= SEAM else 0))
    return found


def figures(rounds: list[dict[str, Any]], seam_gap_us: int) -> Moved:
    return measured(facts(rounds), stream(seam_gap_us), ordered=20, seam=SEAM)


def test_the_seam_is_the_gap_before_the_targets_first_token() -> None:
    found = figures([copied(1_300), copied(1_460, is_final=True)], 70_000)
    assert (found.normal_gap_ms, found.gap_ms, found.extra_ms) == (50.0, 70.0, 20.0)
    assert (found.rounds, found.copied_bytes, found.freeze_to_adopt_ms, found.total_ms) == (2, 20, 20.0, 580.0)


def test_the_source_is_compared_with_itself_while_bytes_move() -> None:
    slow = stream(70_000)
    for index in range(22, 60):
        slow.times_us[index] += 25_000
    found = measured(facts([copied(1_090), copied(1_480, is_final=True)]), slow, ordered=20, seam=SEAM)
    assert found.source_slowdown == pytest.approx((75 + 50) / 2 / 50)
    assert figures([copied(1_460, is_final=True)], 70_000).source_slowdown is None


def test_a_plan_is_checked() -> None:
    for wrong in ({"engine": "tpu"}, {"modes": ("live", "teleport")}, {"contexts": (8,)}, {"contexts": (10**6,)}):
        with pytest.raises(BadInput):
            Plan(**wrong)  # type: ignore[arg-type]


def test_P31_the_summary_compares_and_lacks_what_was_not_measured() -> None:
    def row(context: int, mode: str, gap_ms: float) -> dict[str, Any]:
        slowdown = 1.1 if mode == "live" else None
        figures = {"normal_gap_ms": 50.0, "gap_ms": gap_ms, "extra_ms": gap_ms - 50.0, "source_slowdown": slowdown}
        return {"context": context, "mode": mode, **figures}

    rows = [row(128, "live", 60.0), row(4096, "live", 70.0), row(128, "recompute", 600.0)]
    found = summary(rows)
    assert found["extra_steps_max"] == pytest.approx(0.4)
    assert found["flatness"] == pytest.approx(2.0)
    assert found["recompute_over_live"] == pytest.approx(10.0)
    assert not is_missing(found)
    assert is_missing(summary(rows[:2]))


@pytest.mark.timeout(300)
def test_P32_every_mode_is_measured_on_a_real_cluster_of_simulated_engines(tmp_path: Path) -> None:
    found = measure(Plan(engine="sim", contexts=(256,), repeats=1))
    rows = {row["mode"]: row for row in found.rows}
    assert set(rows) == {"live", "blocking", "recompute"}
    assert not is_missing(found.summary)
    assert rows["live"]["rounds"] >= 2
    assert rows["blocking"]["rounds"] == 1
    assert (rows["recompute"]["rounds"], rows["recompute"]["bytes"]) == (0, 0)
    assert all(row["repeats"] == 1 and row["gap_ms"] > 0 for row in rows.values())
    draw(found, tmp_path)
    assert (tmp_path / "migration.png").read_bytes().startswith(b"\x89PNG")
