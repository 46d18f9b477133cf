"""One contract for all policies: pure, deterministic, total, bounded, and never to where nothing may go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.api.bench.control import best_ms
from midstream.api.bench.states import NOW_MS, cluster_state
from midstream.control.codec import encode_state
from midstream.control.decide import decide
from midstream.control.decide.rng import SplitMix
from midstream.control.events import (
    DrainRequested,
    InstanceLost,
    InstanceStopped,
    InstanceSuspected,
    MoveDecided,
    TickElapsed,
)
from midstream.control.policies import DISPATCH, MOVES, InFlight, choose, dispatch_policy, move_policy
from midstream.control.policies.base import CANDIDATES_MAX, SCORE_MAX
from midstream.control.policies.room import Room, pair_problem
from midstream.control.state import PolicyChoice, PolicySettings, State
from tests.control.fixtures import Story, fingerprint, owner
from tests.control.policies.scenes import dispatch_many, even, put_in_force, wanted

HERDING = {"flood"}
"""Policies that are meant to choose one and the same."""

DECISION_S = 1.0
"""Far above what any decision may take; a policy that is quadratic in 1,000 instances takes longer."""

HOW_IT_IS = st.sampled_from(["up", "up", "up", "suspect", "lost", "stopped", "draining"])


@st.composite
def clusters(draw: st.DrawFn) -> Story:
    """Small clusters, as odd as the log can make them."""
    story = Story()
    for index in range(draw(st.integers(0, 5))):
        kind = fingerprint(layout=draw(st.sampled_from(["NHD", "NHD", "HND"])))
        total = draw(st.sampled_from([0, 10, 100, 1000]))
        me = story.instance(f"i{index}", blocks=total, slots=draw(st.sampled_from([1, 8, 64])), fingerprint=kind)
        _fill(draw, story, me, total)
        _say(story, me, draw(HOW_IT_IS))
    story.tick(draw(st.sampled_from([250, 2_500, 10_000])))
    return story


def _fill(draw: st.DrawFn, story: Story, me: Any, total: int) -> None:
    requests = draw(st.integers(0, 5))
    for index in range(requests):
        name = f"{me.instance}-{index}"
        story.dispatch(name, me, prompt=draw(st.integers(1, 2_000)))
        if draw(st.booleans()):
            tokens = draw(st.integers(1, 4_000))
            story.progress(name, tokens, is_waiting=draw(st.booleans()), is_movable=draw(st.integers(0, 9)) > 0)
    waiting = draw(st.integers(0, requests + 1))
    head = draw(st.integers(1, 400)) if waiting else 0
    free = draw(st.integers(0, total))
    story.load(
        me, running=max(0, requests - waiting), waiting=waiting, blocks_free=free, blocks_head=head,
        blocks_waiting=head * waiting, step_ms=draw(st.sampled_from([0.0, 20.0])),
    )  # fmt: skip


def _say(story: Story, me: Any, health: str) -> None:
    event: Any = {
        "suspect": InstanceSuspected(owner=me, silent_ms=1),
        "lost": InstanceLost(owner=me, silent_ms=1, witnesses=("g",)),
        "stopped": InstanceStopped(owner=me),
        "draining": DrainRequested(operation=f"drain-{me.instance}", instance=me.instance, actor="ann"),
    }.get(health)
    if event is not None:
        story.say("someone", event)


# --- dispatch -------------------------------------------------------------------------------------

LOADS: list[dict[str, int]] = [
    {},
    {"running": 10, "blocks_free": 300},
    {"running": 10, "waiting": 4, "blocks_free": 30, "blocks_head": 20, "blocks_waiting": 80},
    {"running": 60, "waiting": 50, "blocks_free": 0, "blocks_head": 20, "blocks_waiting": 900},
]


@pytest.mark.parametrize("policy", sorted(set(DISPATCH) - HERDING))
@pytest.mark.parametrize("load", LOADS, ids=["empty", "half", "full", "overloaded"])
@pytest.mark.parametrize("count", [4, 7])
def test_P22_a_hundred_dispatches_between_two_reports_spread(policy: str, load: dict[str, int], count: int) -> None:
    hits = dispatch_many(even(count, policy, **load), 100)
    assert len(hits) == count
    assert max(hits.values()) / (100 / count) <= 1.15


@pytest.mark.parametrize("policy", DISPATCH)
@settings(deadline=None, max_examples=25)
@given(
    clusters(), st.integers(0, 9), st.frozensets(st.sampled_from(["i0", "i1"])), st.sampled_from(["", "s"]), st.data()
)
def test_dispatch_is_a_total_pure_function_that_keeps_off_what_may_not_be_chosen(
    policy: str, story: Story, turn: int, exclude: frozenset[str], session: str, data: st.DataObject
) -> None:
    state, chosen = story.state, dispatch_policy(policy)
    names = st.sampled_from(sorted(state.instances)) if state.instances else st.nothing()
    cached = data.draw(st.dictionaries(names, st.integers(16, 160), max_size=3)) if state.instances else {}
    sent = {"i0": InFlight(3, 40)}
    asked = wanted(exclude=exclude, session=session, cached=cached, model=data.draw(st.sampled_from([None, "m"])))
    before = encode_state(state)
    choice = chosen.choose(state, asked, sent, chosen.params({}), turn)
    assert choice == chosen.choose(state, asked, sent, chosen.params({}), turn)
    assert encode_state(state) == before
    takers = {n: v for n, v in state.instances.items() if v.health in ("up", "suspect") and not v.is_draining}
    able = takers.keys() - exclude
    assert (choice is None) == (not able)
    if choice is None:
        return
    view = state.instances[choice.owner.instance]
    assert (choice.owner, choice.address) == (view.owner, view.address)
    assert choice.owner.instance in able
    assert view.health == "up" or not any(takers[name].health == "up" for name in able)
    assert choice.scores[0][0] == choice.owner.instance
    assert len(choice.scores) <= CANDIDATES_MAX
    assert all(name in able and abs(score) <= SCORE_MAX for name, score in choice.scores)
    assert [s for _, s in choice.scores] == sorted((s for _, s in choice.scores), reverse=True)
    assert choice.reason


@pytest.mark.parametrize("policy", DISPATCH)
@pytest.mark.parametrize(
    "event",
    [
        DrainRequested(operation="o", instance="i0", actor="ann"),
        InstanceSuspected(owner=owner("i0"), silent_ms=1),
        InstanceLost(owner=owner("i0"), silent_ms=1, witnesses=("g",)),
        InstanceStopped(owner=owner("i0")),
    ],
    ids=lambda event: type(event).__name__,
)
def test_P16_P27_nothing_new_goes_where_it_may_not(policy: str, event: Any) -> None:
    story = even(3, policy)
    story.say("someone", event)
    assert set(dispatch_many(story, 12)) == ({"i1"} if policy in HERDING else {"i1", "i2"})


@pytest.mark.parametrize("policy", DISPATCH)
def test_P20_suspects_serve_when_nobody_else_can_and_the_lost_never(policy: str) -> None:
    story = even(2, policy)
    story.control(InstanceSuspected(owner=owner("i0"), silent_ms=1))
    story.control(InstanceLost(owner=owner("i1"), silent_ms=1, witnesses=("g",)))
    assert set(dispatch_many(story, 4)) == {"i0"}
    story.say("llumlet/i0", InstanceStopped(owner=owner("i0")))
    assert choose(story.state, wanted(), {}, 0) is None


@pytest.mark.parametrize("policy", DISPATCH)
def test_a_request_goes_where_its_model_is_and_where_it_was_not_refused(policy: str) -> None:
    story = even(2, policy)
    story.instance("other", fingerprint=fingerprint(model="m2"))
    assert set(dispatch_many(story, 6, model="m2")) == {"other"}
    assert set(dispatch_many(story, 6, model="m", exclude=frozenset({"i0"}))) == {"i1"}
    assert choose(story.state, wanted(model="m3"), {}, 0) is None


@pytest.mark.parametrize("policy", DISPATCH)
def test_a_choice_among_a_thousand_is_quick(policy: str) -> None:
    state, chosen = cluster_state(1_000, 2, seed=1), dispatch_policy(policy)
    asked, params = wanted(session="s", cached={"i7": 128}), chosen.params({})
    quick = best_ms(partial(chosen.choose, cluster_state(100, 2, seed=1), asked, {}, params, 0))
    slow = best_ms(partial(chosen.choose, state, asked, {}, params, 0))
    assert slow <= 40 * max(quick, 0.01), "time grows with the number of instances, no faster"


# --- moves ----------------------------------------------------------------------------------------


def proposals(policy: str, state: State, now_ms: int, count_max: int = 200) -> Iterator[tuple[Room, Any]]:
    """What a policy would like, if all of it were ordered."""
    chosen, room = move_policy(policy), Room(state, now_ms)
    for number, proposal in enumerate(chosen.propose(state, room, now_ms, chosen.params({}), SplitMix(1))):
        assert number < count_max, "a policy must come to an end"
        yield room, proposal
        room.take(state.requests[proposal.request], proposal.target, proposal.blocks_needed)


@pytest.mark.parametrize("policy", MOVES)
@settings(deadline=None, max_examples=40)
@given(clusters())
def test_P23_P24_P26_a_move_is_proposed_only_where_every_limit_allows_it(policy: str, story: Story) -> None:
    state, before = story.state, encode_state(story.state)
    found = []
    for room, proposal in proposals(policy, state, story.now_ms):
        view, target = state.requests[proposal.request], state.instances[proposal.target]
        source = state.instances[view.owner.instance]
        assert room.is_up(source)
        assert room.stay_problem(view) is None
        assert pair_problem(source, target) is None
        is_promised = proposal.is_first and room.takes(view, target, proposal.blocks_needed)
        assert is_promised or room.fits(target, proposal.blocks_needed)
        assert view.is_waiting or target.load.blocks_free >= proposal.blocks_needed
        assert not room.is_at_limit(source.owner.instance)
        assert not room.is_at_limit(proposal.target)
        assert proposal.candidates[0][0] == proposal.target
        assert proposal.reason
        found.append(proposal)
    assert encode_state(state) == before
    assert [p for _, p in proposals(policy, state, story.now_ms)] == found


@pytest.mark.parametrize("policy", MOVES)
@settings(deadline=None, max_examples=25)
@given(clusters())
def test_P17_decisions_are_equal_however_often_they_are_made(policy: str, story: Story) -> None:
    put_in_force(story, policy)
    tick = story.next_tick()
    decision = decide(story.state, tick)
    assert decision == decide(story.state, tick)
    moves = [event for event in decision.events if isinstance(event, MoveDecided)]
    assert len(moves) <= story.state.policies.moves_per_tick_max
    assert len({move.request for move in moves}) == len(moves) == len(decision.commands)


@pytest.mark.parametrize("policy", MOVES)
@settings(deadline=None, max_examples=15)
@given(clusters())
def test_nothing_moves_from_or_to_what_a_tick_found_silent(policy: str, story: Story) -> None:
    put_in_force(story, policy)
    down = frozenset(story.state.instances)
    room = Room(story.state, story.now_ms, down)
    chosen = move_policy(policy)
    assert list(chosen.propose(story.state, room, story.now_ms, chosen.params({}), SplitMix(1))) == []


@pytest.mark.parametrize("policy", MOVES)
@pytest.mark.parametrize("kind", ["uneven", "queues"])
def test_a_decision_about_a_thousand_instances_takes_bounded_time(policy: str, kind: str) -> None:
    state = cluster_state(1_000, 8, seed=1)
    if kind == "queues":
        queue_everywhere(state)
    state.policies = PolicySettings(moves=(PolicyChoice(policy),))
    begun = time.perf_counter()
    decide(state, TickElapsed(now_ms=NOW_MS + 10_000, seed=1, decided_at=state.position))
    assert time.perf_counter() - begun < DECISION_S


def queue_everywhere(state: State) -> None:
    """Every second instance gets a line whose head does not fit."""
    from msgspec.structs import replace

    for name, view in list(state.instances.items())[::2]:
        load = replace(view.load, waiting=5, blocks_head=view.load.blocks_free + 100, blocks_waiting=2_000)
        state.instances[name] = replace(view, load=load)
