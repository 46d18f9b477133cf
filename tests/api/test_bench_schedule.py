"""`bench schedule` on a small fleet: rows, ratios and pictures; wrong names are one line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from midstream.api.bench.arms import moves_anything, policies_of
from midstream.api.bench.report import is_missing
from midstream.api.bench.schedule import Plan, highest, measure, simulate
from midstream.api.bench.schedule_figures import Slo, summary_of
from midstream.api.bench.schedule_runs import Made, Run
from midstream.api.cli.main import BAD_INPUT, run
from midstream.control.errors import BadInput, UnknownThing

PLAN = Plan(
    traces=("azure_conv_2023",), arms=("round_robin", "freeness+balance"), seeds=1, instances=2, requests=60,
    rate_scale=2.0, blocks=512, jobs=1,
)  # fmt: skip


def test_rows_summary_and_pictures(tmp_path: Path) -> None:
    measured = measure(PLAN, tmp_path)
    assert [(row["trace"], row["policy"], row["seed"]) for row in measured.rows] == [
        ("azure_conv_2023", "round_robin", 0), ("azure_conv_2023", "freeness+balance", 0)
    ]  # fmt: skip
    agreed = {"prefill_ms", "decode_ms", "gap_ms", "preemptions", "preempted_s", "moves", "goodput", "instance_hours"}
    assert all(agreed <= set(row) and row["requests"] == 60 and not row["failed"] for row in measured.rows)
    assert not is_missing(measured.summary)
    assert measured.summary["sim_speedup"] > 1
    assert {"over_round_robin", "over_best_without_moves", "best"} <= set(measured.summary["azure_conv_2023"])
    assert {path.name for path in tmp_path.iterdir()} >= {
        "azure_conv_2023-latency.png", "azure_conv_2023-round_robin-kv.png"
    }  # fmt: skip
    assert msgspec.json.encode(measured)


def test_a_request_that_no_instance_could_hold_is_left_out_and_counted() -> None:
    figures = simulate(msgspec.structs.replace(PLAN, blocks=64), Run("azure_conv_2023", "round_robin", 0, 2.0)).figures
    assert figures.too_long > 0
    assert figures.too_long + figures.requests == 60


def test_ratios_say_how_many_times_better_the_best_arm_is() -> None:
    base = simulate(PLAN, Run("azure_conv_2023", "round_robin", 0, 2.0))

    def made(arm: str, seed: int, factor: float, share: float, preemptions: int) -> Made:
        prefill = dict.fromkeys(("mean", "p50", "p99"), 100 * factor)
        figures = msgspec.structs.replace(
            base.figures, prefill_ms=prefill, slo_share=share, preemptions=preemptions, goodput=share
        )
        return base._replace(run=Run("t", arm, seed, 1.0), figures=figures)

    mine, still, moving = "round_robin", "freeness", "freeness+balance"
    first = [made(mine, 0, 6.0, 0.4, 10), made(still, 0, 3.0, 0.6, 5), made(moving, 0, 1.0, 0.8, 1)]
    other = [made(mine, 1, 8.0, 0.4, 10), made(still, 1, 3.0, 0.6, 0), made(moving, 1, 1.0, 0.8, 0)]
    summary = summary_of([*first, *other])
    assert (summary["best"], summary["best_without_moves"]) == ("freeness+balance", "freeness")
    assert summary["over_round_robin"]["prefill_p99"] == {"median": 7.0, "min": 6.0, "max": 8.0}
    assert summary["over_best_without_moves"]["prefill_mean"]["median"] == 3.0
    assert summary["over_best_without_moves"]["preemptions_saved"] == {"median": 0.4, "min": 0.0, "max": 0.8}
    assert summary["over_round_robin"]["goodput"]["median"] == 2.0
    assert summary["over_round_robin"]["gap_p99"]["median"] == 1.0


def test_a_rate_is_searched_that_the_slo_allows() -> None:
    plan = msgspec.structs.replace(PLAN, rate_scale=None, arms=("freeness",), requests=40, slo=Slo(prefill_ms=1_000))
    scale = measure(plan).params["rate_scales"]["azure_conv_2023"]
    held = simulate(plan, Run("azure_conv_2023", "freeness", 0, scale)).figures.slo_share
    over = simulate(plan, Run("azure_conv_2023", "freeness", 0, 4 * scale)).figures.slo_share
    assert held >= plan.sustained > over


def test_what_was_made_is_kept_and_not_made_again(tmp_path: Path) -> None:
    kept = tmp_path / "runs.jsonl"
    plan = msgspec.structs.replace(PLAN, arms=("freeness",))
    first = measure(plan, kept=kept)
    lines = kept.read_bytes()
    assert measure(plan, kept=kept).rows == first.rows, "took_s too: nothing was simulated"
    assert kept.read_bytes() == lines
    measure(msgspec.structs.replace(plan, blocks=400), kept=kept)
    assert kept.read_bytes().count(b"\n") == 2, "another fleet is another run"
    kept.write_bytes(b"{}")
    with pytest.raises(BadInput, match="kept runs"):
        measure(plan, kept=kept)


def test_with_a_queue_depth_of_0_requests_wait_at_instances() -> None:
    """Round robin then waits behind a full instance although another has room."""
    plan = msgspec.structs.replace(PLAN, blocks=400, requests=120)
    waits = {
        depth: simulate(msgspec.structs.replace(plan, queue_depth=depth), Run("azure_conv_2023", "round_robin", 0, 2.0))
        for depth in (0, 4)
    }
    assert waits[0].figures.prefill_ms != waits[4].figures.prefill_ms
    assert waits[0].figures.requests == waits[4].figures.requests


@pytest.mark.parametrize("limit", [0.3, 4.0, 5.0, 17.0, 100.0])
def test_the_search_reaches_a_rate_wherever_it_is(limit: float) -> None:
    """Steps that shrank from the first sustained rate on never got past four times the first."""
    assert limit * 0.85 <= highest(lambda scale: scale <= limit) <= limit


def test_arms_are_policies_by_name() -> None:
    policies = policies_of("freeness+drain+balance")
    assert (policies.dispatch.name, [move.name for move in policies.moves]) == ("freeness", ["drain", "balance"])
    assert [moves_anything(arm) for arm in ("freeness", "freeness+none", "freeness+balance")] == [False, False, True]
    with pytest.raises(UnknownThing, match="round_robin"):
        Plan(arms=("nothing",))


def test_policies_of_an_arm_have_parameters() -> None:
    policies = policies_of("slo:ttft_ms=500+defragment:keep=2,copy_max=10.5+balance:request=longest")
    assert policies.dispatch.params == {"ttft_ms": 500}
    assert [move.params for move in policies.moves] == [{"keep": 2, "copy_max": 10.5}, {"request": "longest"}]
    assert moves_anything("freeness+balance:low=20")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--policies", "nothing"], "nothing"),
        (["--policies", "freeness+balance:low"], "parameters are name=value, not 'low'"),
        (["--policies", "freeness+balance:"], "parameters are name=value, not ''"),
        (["--policies", "freeness+balance:deep=1"], "parameters: low, high"),
        (["--policies", "freeness+balance:low=full"], "policy balance: Expected `float`"),
        (["--trace", "nothing", "--rate-scale", "1"], "no trace nothing"),
        (["--rate-scale", "-1"], "rate-scale"),
        (["--step-times", "nothing", "--rate-scale", "1", "--requests", "5"], "no step times 'nothing'"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "schedule", *arguments]) == BAD_INPUT
    assert told in capsys.readouterr().err
