"""Moves that policies propose: who to whom, which request, and when it is not worth it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.control.decide import decide
from midstream.control.events import DrainRequested, MigrationCommitted, MoveDecided, PolicyConfigured
from midstream.control.policies.base import Proposal
from midstream.control.policies.freeness_math import freeness
from midstream.control.state import PolicyChoice, PolicySettings
from tests.control.fixtures import GATEWAY, Story, fingerprint, owner
from tests.control.policies.scenes import proposals

NAMES = "abcdefgh"


def cluster(*loads: tuple[int, int]) -> Story:
    """One instance for each (running requests of 10 blocks, free blocks)."""
    story = Story()
    for name, (running, free) in zip(NAMES, loads, strict=False):
        me = story.instance(name)
        for index in range(running):
            story.running(f"{name}{index}", me, tokens=160)
        story.load(me, running=running, blocks_free=free)
    return story


def pairs(found: list[Proposal]) -> list[tuple[str, str]]:
    return [(proposal.request[0], proposal.target) for proposal in found]


def drain(story: Story, instance: str) -> None:
    story.say("admin", DrainRequested(operation="o", instance=instance, actor="ann"))


def test_none_moves_nothing() -> None:
    assert proposals(cluster((20, 0), (0, 1000)), "none") == []


# --- balance --------------------------------------------------------------------------------------


def test_balance_pairs_the_extremes() -> None:
    story = cluster((20, 40), (20, 5), (2, 900), (2, 700))
    assert pairs(proposals(story, "balance")) == [("b", "c"), ("a", "d")]


def test_balance_leaves_alone_what_is_between_the_thresholds() -> None:
    assert proposals(cluster((20, 300), (2, 900)), "balance") == []
    assert proposals(cluster((20, 5), (20, 500)), "balance") == []
    assert len(proposals(cluster((20, 300), (2, 900)), "balance", low=20)) == 1


def test_balance_says_why() -> None:
    (proposal,) = proposals(cluster((20, 5), (2, 900)), "balance")
    assert "freeness of a is 0.2 (under 10), of b 450.0 (over 30)" in proposal.reason
    assert proposal.candidates == (("b", 450.0),)
    assert proposal.blocks_needed == (160 + 128) // 16


def sized(story: Story) -> None:
    for index, tokens in enumerate((160, 480, 32, 320)):
        story.progress(f"a{index}", tokens)


@pytest.mark.parametrize(
    ("choice", "request_id"),
    [("last_come", "a3"), ("first_come", "a0"), ("longest", "a1"), ("shortest", "a2"), ("cheapest", "a2")],
)
def test_balance_takes_the_request_it_is_told_to(choice: str, request_id: str) -> None:
    story = cluster((4, 12), (2, 900))
    sized(story)
    (proposal,) = proposals(story, "balance", request=choice)
    assert proposal.request == request_id


def test_cheapest_is_what_relieves_an_overcommitted_source_for_the_fewest_bytes() -> None:
    story = cluster((4, 12), (2, 900))
    sized(story)
    story.load(owner("a"), running=4, waiting=1, blocks_free=12, blocks_head=60)
    (proposal,) = proposals(story, "balance")
    assert proposal.request == "a1", "small requests do not relieve it at all"


def test_P23_a_move_must_gain_more_than_it_costs() -> None:
    story = cluster((20, 5), (2, 900))
    assert proposals(story, "balance") != []
    assert proposals(story, "balance", cost_per_move=11.0) == []
    assert proposals(story, "balance", cost_per_block=1.1) == []


def test_P23_a_move_does_not_turn_the_imbalance_round() -> None:
    assert proposals(cluster((1, 5), (1, 40)), "balance") == [], "its only request would only change places"
    assert proposals(cluster((2, 10), (8, 250)), "balance") != []
    story = cluster((2, 10), (8, 250))
    for request in ("a0", "a1"):
        story.progress(request, 2400)
    assert proposals(story, "balance") == [], "150 blocks would make the target the fuller one"


def test_balance_does_not_move_waiting_unmovable_or_unreported_requests() -> None:
    story = cluster((3, 6), (2, 900))
    story.progress("a0", 160, is_waiting=True)
    story.progress("a1", 160, is_movable=False)
    story.running("a3", owner("a"))
    story.dispatch("a2", owner("a"), epoch=5)
    assert {p.request for p in proposals(story, "balance")} == {"a3"}


def test_P26_balance_pairs_only_equal_fingerprints() -> None:
    story = cluster((20, 5), (2, 700))
    story.load(story.instance("z", fingerprint=fingerprint(layout="HND")), running=1, blocks_free=990)
    assert pairs(proposals(story, "balance")) == [("a", "b")]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 800)), min_size=2, max_size=6),
    st.sampled_from(["last_come", "first_come", "longest", "shortest", "cheapest"]),
)
def test_P23_no_request_goes_there_and_back_while_nothing_else_changes(
    loads: list[tuple[int, int]], choice: str
) -> None:
    """Moves end at once and the load follows them exactly; balancing must come to rest."""
    story = cluster(*loads)
    policies = PolicySettings(moves=(PolicyChoice("balance", {"request": choice}),), cooldown_ms=0)
    story.say("admin", PolicyConfigured(policies=policies, actor="test"))
    worst = min(freeness(view) for view in story.state.instances.values())
    for _ in range(200):
        moved = [e for e in decide(story.state, story.next_tick()).events if isinstance(e, MoveDecided)]
        if not moved:
            break
        story.tick()
        story.control(*moved)
        for move in moved:
            finish(story, move)
        now_worst = min(freeness(view) for view in story.state.instances.values())
        assert now_worst >= worst, "balancing made the fullest instance fuller"
        worst = now_worst
    else:
        pytest.fail("balancing never comes to rest")


def finish(story: Story, move: MoveDecided) -> None:
    blocks = story.state.requests[move.request].blocks
    story.say(
        GATEWAY,
        MigrationCommitted(
            migration=move.migration, request=move.request, epoch=move.epoch, owner=move.target, tail_tokens=0
        ),
    )
    for me, sign in ((move.source, -1), (move.target, 1)):
        load = story.state.instances[me.instance].load
        story.load(me, running=load.running + sign, blocks_free=load.blocks_free - sign * blocks)


# --- drain ----------------------------------------------------------------------------------------


def test_P16_drain_takes_all_and_spreads_by_what_it_leaves() -> None:
    story = cluster((8, 900), (8, 400), (8, 800), (0, 1000))
    drain(story, "a")
    story.say("admin", PolicyConfigured(policies=PolicySettings(moves_per_instance_max=50), actor="test"))
    found = proposals(story, "drain")
    assert [p.request for p in found] == [f"a{index}" for index in range(8)]
    assert {p.target for p in found} <= {"b", "c", "d"}
    assert [p.target for p in found].count("d") >= 4


def test_P16_drain_sends_a_request_back_to_where_it_came_from_if_need_be() -> None:
    story = cluster((1, 900), (0, 1000))
    story.say(GATEWAY, MigrationCommitted(migration="m", request="a0", epoch=1, owner=owner("b"), tail_tokens=0))
    drain(story, "b")
    story.tick(2_100)
    assert [(p.request, p.target) for p in proposals(story, "drain")] == [("a0", "a")]


def test_P24_drain_waits_where_nobody_has_room() -> None:
    story = cluster((3, 900), (10, 20), (64, 500))
    drain(story, "a")
    assert [(p.request, p.target) for p in proposals(story, "drain")] == [("a0", "b")]


def test_drain_finds_the_one_small_instance_that_fits_behind_many_free_ones_that_do_not() -> None:
    story = Story()
    me = story.instance("a")
    story.running("r", me, tokens=1600)
    for index in range(20):
        story.instance(f"tiny{index}", blocks=20)
    story.load(story.instance("roomy", blocks=2000), running=40, blocks_free=200)
    drain(story, "a")
    assert [p.target for p in proposals(story, "drain")] == ["roomy"]


def test_waiting_requests_are_drained_too() -> None:
    story = cluster((1, 900), (0, 1000))
    story.dispatch("w", owner("a"), prompt=3200)
    drain(story, "a")
    found = {p.request: p.blocks_needed for p in proposals(story, "drain")}
    assert found == {"a0": 18, "w": 201}
