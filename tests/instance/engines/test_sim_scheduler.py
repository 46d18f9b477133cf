"""Continuous batching: who is in the next step, who waits, and who loses blocks to whom."""

from __future__ import annotations

import pytest

from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.core import EngineCore
from midstream.instance.engines.sim.scheduler import Plan
from midstream.migration.protocol.messages import RequestSpec, Sampling


def core(**settings: int) -> EngineCore:
    return EngineCore(
        SimConfig(**({"block_tokens": 4, "blocks_total": 32, "slots_max": 4, "step_tokens_max": 16} | settings))
    )


def submit(core: EngineCore, slot: str, prompt: int, outputs: int = 20, priority: int = 0, arrival_ms: int = 0) -> None:
    first = sum(slot.encode())
    core.submit(
        slot,
        RequestSpec(
            request=slot,
            prompt=tuple(3 + (first + i) % 99 for i in range(prompt)),
            sampling=Sampling(max_tokens=outputs, ignore_eos=True),
            priority=priority,
            arrival_ms=arrival_ms,
        ),
        (),
    )


def shape(plan: Plan) -> dict[str, int]:
    return {chunk.run.slot: chunk.tokens for chunk in plan.chunks}


def step(core: EngineCore) -> dict[str, int]:
    plan = core.plan()
    core.apply(plan)
    assert core.faults() == ()
    return shape(plan)


def test_long_prompts_are_prefilled_in_chunks_beside_decodes() -> None:
    c = core()
    submit(c, "short", 5)
    assert step(c) == {"short": 5}
    submit(c, "long", 40)
    assert [step(c) for _ in range(4)] == [
        {"short": 1, "long": 15},
        {"short": 1, "long": 15},
        {"short": 1, "long": 10},
        {"short": 1, "long": 1},
    ]


def test_the_budget_is_shared_first_come_first_served() -> None:
    c = core()
    for slot in ("a", "b", "c"):
        submit(c, slot, 10)
    assert step(c) == {"a": 10, "b": 6}
    assert step(c) == {"a": 1, "b": 4, "c": 10}


def test_slots_bound_the_batch() -> None:
    c = core(slots_max=2)
    for slot in ("a", "b", "c"):
        submit(c, slot, 4, outputs=3)
    assert [set(step(c)) for _ in range(4)] == [{"a", "b"}, {"a", "b"}, {"a", "b"}, {"c"}]


def test_priority_then_arrival_decide_and_nobody_overtakes_the_head() -> None:
    c = core(slots_max=1)
    submit(c, "late", 4, outputs=1, arrival_ms=20)
    submit(c, "early", 4, outputs=1, arrival_ms=10)
    submit(c, "urgent", 4, outputs=1, priority=-1, arrival_ms=30)
    assert [list(step(c)) for _ in range(3)] == [["urgent"], ["early"], ["late"]]
    c = core(blocks_total=8)
    submit(c, "runs", 16, outputs=8)
    step(c)
    submit(c, "big head", 20, outputs=4)
    submit(c, "small", 4, outputs=4)
    assert list(step(c)) == ["runs"]


def test_when_blocks_run_out_the_last_in_rank_recomputes_later() -> None:
    c = core(blocks_total=8, slots_max=2)
    submit(c, "first", 12, outputs=16)
    submit(c, "second", 12, outputs=16)
    preempted = []
    while not c.runs["second"].preemptions:
        plan = c.plan()
        preempted += [run.slot for run in plan.preempted]
        assert not (plan.preempted and "second" in shape(plan))
        c.apply(plan)
    assert preempted == ["second"]
    assert c.runs["second"].phase == "waiting"
    assert c.runs["first"].preemptions == 0
    made = c.runs["second"].outputs
    while c.runs:
        step(c)
    assert made > 0


def test_a_rank_ahead_takes_blocks_even_from_the_batch_it_was_planned_into() -> None:
    c = core(blocks_total=7, slots_max=2)
    submit(c, "low", 11, outputs=16)
    step(c)
    submit(c, "high", 12, outputs=12, priority=-5)
    while "low" in c.runs and not c.runs["low"].preemptions:
        step(c)
    assert c.runs["high"].preemptions == 0


def test_a_run_preempted_by_a_later_entry_of_the_same_plan_is_not_in_it() -> None:
    """A prefill that joined with too few blocks takes them from a decode already planned."""
    source, c = core(), core(blocks_total=8)
    submit(source, "moved", 24, outputs=8, priority=-1)
    step(source)
    submit(c, "low", 15, outputs=6)
    step(c)
    run = source.runs["moved"]
    reservation = c.reserve("moved", run.spec, (), 4)
    state = source.freeze(run)
    for index, block in enumerate(source.pin(run, 0).blocks):
        c.incoming(reservation, index)[:] = source.bytes_of(block)
    c.adopt(reservation, state)
    plan = c.plan()
    assert [victim.slot for victim in plan.preempted] == ["low"]
    assert shape(plan) == {"moved": 8}
    c.apply(plan)
    assert c.faults() == ()


def test_B7_the_last_run_sits_a_step_out_rather_than_preempting_itself() -> None:
    c = core(blocks_total=8)
    submit(c, "x", 15, outputs=10)
    step(c)
    other = RequestSpec(request="y", prompt=(7,) * 9, sampling=Sampling(max_tokens=4))
    reservation = c.reserve("arriving", other, (), 4)
    while shape(plan := c.plan()):
        c.apply(plan)
    assert c.runs["x"].preemptions == 0
    assert shape(c.plan()) == {}
    c.cancel(reservation)
    while c.runs:
        assert step(c) == {"x": 1}


def test_B7_a_preempted_run_under_a_copy_gives_its_blocks_when_the_copy_stops() -> None:
    c = core(blocks_total=8, slots_max=2)
    submit(c, "first", 12, outputs=16)
    submit(c, "second", 12, outputs=16)
    for _ in range(3):
        step(c)
    pinned = c.pin(c.runs["second"], 0)
    while not (plan := c.plan()).preempted:
        c.apply(plan)
    assert shape(plan) == {}
    assert c.fate(pinned) == "preempted"
    c.unpin(pinned)
    assert step(c)["first"] == 1


def test_known_prefixes_are_not_computed_again() -> None:
    c = core()
    submit(c, "a", 16, outputs=1)
    assert step(c) == {"a": 16}
    spec = RequestSpec(request="b", prompt=tuple(3 + (97 + i) % 99 for i in range(16)), sampling=Sampling(max_tokens=1))
    c.submit("b", spec, ())
    assert step(c) == {"b": 4}


@pytest.mark.parametrize("waiting_max", [1, 3])
def test_P28_the_queue_is_bounded(waiting_max: int) -> None:
    c = core(waiting_max=waiting_max)
    for i in range(waiting_max):
        submit(c, f"r{i}", 4)
    with pytest.raises(Exception, match="queue_full"):
        submit(c, "more", 4)
