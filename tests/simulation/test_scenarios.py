"""Classes, tenants, scaling and roles at small scale: what the benchmark measures, with wide bounds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from midstream.api.bench.report import rank
from midstream.api.simulation.run import quiet
from midstream.api.simulation.scenarios import priorities, roles, scaling, tenants
from midstream.api.simulation.scenarios.play import Played, first_ms, killed, play
from midstream.control.events import ClusterSampled, ScaleDecided
from midstream.control.replay import verify
from midstream.control.state import PolicySettings

quiet()


def assert_replays(run: Played) -> None:
    """P17: what was decided follows from the log alone."""
    report = verify(run.entries)
    assert report.decisions > 0
    assert report.first_difference is None


def hours_there(run: Played) -> float:
    """Instance hours as the samples have them: without starts and drains."""
    samples = [e.fact.event for e in run.entries if isinstance(e.fact.event, ClusterSampled)]
    steps = pairwise(samples)
    return sum(before.instances * (after.now_ms - before.now_ms) for before, after in steps) / scaling.HOUR_MS


def test_P16_the_high_class_hardly_notices_a_full_cluster_and_nobody_is_killed() -> None:
    run = priorities.run_arms(1, rate_s=11.0, seconds=12)
    found = priorities.figures([run])
    assert found["killed"] == 0
    high = first_ms(one for one in run["classes"].seen if one.client.tenant == "high")
    low = first_ms(one for one in run["classes"].seen if one.client.tenant == "low")
    idle = first_ms(run["idle"].seen)
    assert (rank(high, 0.5) or 0) < 1.5 * (rank(idle, 0.5) or 0)
    assert max(high) < 0.5 * max(low), "it is the low class that waits"
    assert_replays(run["classes"])


def test_one_tenant_that_floods_does_not_starve_the_others() -> None:
    run = tenants.run_arms(0, rate_s=2.5, seconds=12)
    found = tenants.figures([run], seconds=12)
    assert found["killed"] == 0
    assert (found["jain_shares"] or 0) > 1.5 * (found["jain_fifo"] or 1)
    assert (found["others_first_p99_ms_shares"] or 0) < (found["others_first_p99_ms_fifo"] or 0)


def test_tenants_get_equal_shares_when_one_of_ten_floods() -> None:
    """The aim of the benchmark, on one instance: a flood fills it before anybody waits, the rest is shared alike."""
    run = play(tenants.clients(0, rate_s=1.25, seconds=30), instances=1, policies=PolicySettings(), seed=0)
    assert tenants.jain(tenants.service(run.seen, 30)) >= 0.95
    assert killed(run.seen) == 0


def test_P16_P23_a_cluster_grows_and_shrinks_with_its_day_and_loses_nobody() -> None:
    day = scaling.clients(1, peak_s=7.0, trough=0.1, seconds=240)
    run = scaling.run_scaled(1, day, instances_max=4, in_after_ms=40_000, trend_ms=30_000)
    made = [action for _, action, _ in scaling.decisions(run.entries)]
    assert (made[0], made[-1]) == ("add", "remove")
    assert scaling.flaps(run.entries) == 0
    assert killed(run.seen) == 0
    fixed_ms = 4 * (run.entries[-1].fact.at_ms - run.entries[0].fact.at_ms)
    hours = scaling.instance_hours(run.entries)
    assert hours < 0.9 * fixed_ms / scaling.HOUR_MS
    assert hours == pytest.approx(hours_there(run), rel=0.15)
    assert 0.5 * hours < scaling.oracle_hours(run.entries) < 1.5 * hours
    assert any(isinstance(entry.fact.event, ScaleDecided) for entry in run.entries)
    assert_replays(run)


def test_P03_prompts_are_handed_over_within_two_ticks_and_a_move() -> None:
    run = roles.run_arms(0, rate_s=4.0, seconds=6)
    found = roles.figures([run])
    assert found["killed"] == 0
    assert found["hand_overs"] > 0.8 * len(run["roles"].seen)
    assert (found["hand_over_max_ms"] or 0) < 1_000
    assert_replays(run["roles"])
