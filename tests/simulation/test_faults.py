"""Fault plans: drawn from a seed, bounded in time, asked by the moment, and shrunk to what matters."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.control.simulate.faults import (
    FAULTS_MAX,
    CorruptBlock,
    Crash,
    Cut,
    Fault,
    FaultPlan,
    LoseReply,
    Lossy,
    Slow,
    plan_faults,
    shrink,
)

NODES = ("gateway/g", "llumlet/a", "llumlet/b")


@given(seed=st.integers(), horizon_ms=st.integers(100, 100_000), intensity=st.floats(0, 20))
@settings(max_examples=60, deadline=None)
def test_faults_are_bounded_ordered_and_over_in_time(seed, horizon_ms, intensity):
    faults = plan_faults(random.Random(seed), NODES, horizon_ms, intensity, crashable=NODES[1:])
    assert len(faults) <= FAULTS_MAX
    assert [f.at_ms for f in faults] == sorted(f.at_ms for f in faults)
    assert all(0 <= f.at_ms <= f.until_ms <= horizon_ms for f in faults)
    down: dict[str, int] = {}
    for crash in FaultPlan(faults).crashes():
        assert crash.node in NODES[1:]
        assert crash.at_ms > down.get(crash.node, -1)
        down[crash.node] = crash.until_ms


def test_P17_a_seed_draws_the_same_faults_and_they_survive_json():
    faults = plan_faults(random.Random(3), NODES, 60_000, 2.0)
    assert faults == plan_faults(random.Random(3), NODES, 60_000, 2.0)
    assert faults != plan_faults(random.Random(4), NODES, 60_000, 2.0)
    assert msgspec.json.decode(msgspec.json.encode(faults), type=tuple[Fault, ...]) == faults


def test_every_kind_of_fault_is_drawn():
    faults = plan_faults(random.Random(1), NODES, 100_000, 10.0)
    assert {type(f) for f in faults} == {Lossy, Cut, Crash, Slow, LoseReply, CorruptBlock}


def test_one_node_alone_has_no_links():
    faults = plan_faults(random.Random(1), ["a"], 100_000, 10.0, crashable=[])
    assert {type(f) for f in faults} == {Slow, LoseReply, CorruptBlock}


def test_a_plan_answers_for_the_moment_and_the_direction():
    plan = FaultPlan(
        [
            Cut(at_ms=10, until_ms=20, a="a", b="b"),
            Lossy(at_ms=10, until_ms=30, source="a", target="b", drop=0.1, delay_ms=5),
            Lossy(at_ms=15, until_ms=30, source="a", target="b", drop=0.3, delay_ms=7),
            Slow(at_ms=10, until_ms=20, node="b", factor=4.0),
            LoseReply(at_ms=10, until_ms=20, node="a", probability=0.5),
            CorruptBlock(at_ms=10, until_ms=20, source="a", probability=0.25),
        ]
    )
    assert plan.link("a", "b", 9) == FaultPlan().link("a", "b", 15)
    assert plan.link("b", "a", 10).is_cut
    assert plan.link("b", "a", 10).drop == 0.0
    assert (plan.link("a", "b", 15).drop, plan.link("a", "b", 15).delay_ms) == (0.3, 12)
    assert (plan.link("a", "b", 20).is_cut, plan.link("a", "b", 20).slow) == (False, 1.0)
    assert (plan.slow("b", 10), plan.slow("b", 20), plan.slow("a", 10)) == (4.0, 1.0, 1.0)
    assert (plan.lost_reply("a", 10), plan.lost_reply("b", 10)) == (0.5, 0.0)
    assert (plan.corruption("a", 19), plan.corruption("a", 20)) == (0.25, 0.0)
    assert plan.quiet_after_ms == 30


@given(st.sets(st.integers(0, 59), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_shrinking_keeps_exactly_what_the_failure_needs(needed):
    faults = tuple(Slow(at_ms=n, until_ms=n + 1, node="a", factor=2.0) for n in range(60))
    kept = shrink(faults, lambda subset: needed <= {f.at_ms for f in subset})
    assert {f.at_ms for f in kept} == needed


def test_a_failure_that_needs_no_fault_shrinks_to_none():
    faults = plan_faults(random.Random(1), NODES, 60_000, 2.0)
    assert shrink(faults, lambda subset: True) == ()
    assert shrink(faults, lambda subset: len(subset) == len(faults)) == faults
