"""The high class: where it goes, what is kept free for it, who leaves for it."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.control import codec
from midstream.control.events import MigrationCommitted, PolicyConfigured, RequestFinished
from midstream.control.policies import DISPATCH, DispatchWanted, choose, move_policy
from midstream.control.policies.base import Proposal
from midstream.control.policies.freeness_math import blocks_kept
from midstream.control.policies.room import Room
from midstream.control.state import PolicyChoice, PolicySettings
from tests.control.fixtures import GATEWAY, Story, owner
from tests.control.policies.test_moves import proposals

HIGH, LOW = -1, 1


def cluster(*free: int, headroom: float = 0.5, policy: str = "freeness") -> Story:
    """Instances a, b, … of 100 blocks with so many of them free, four requests on each."""
    story = Story()
    settings = PolicySettings(dispatch=PolicyChoice(policy), high_headroom=headroom)
    story.say("admin", PolicyConfigured(policies=settings, actor="test"))
    for name, blocks in zip("abcdefgh", free, strict=False):
        story.load(story.instance(name, blocks=100), running=4 if blocks < 100 else 0, blocks_free=blocks)
    return story


def chosen(story: Story, priority: int, **changes: Any) -> str:
    wanted = DispatchWanted(request="r", prompt_tokens=64, output_tokens_max=64, priority=priority, **changes)
    choice = choose(story.state, wanted, {}, 0)
    assert choice is not None
    return choice.owner.instance


def test_the_fold_knows_who_has_requests_of_the_high_class() -> None:
    story = cluster(50, 50)
    story.dispatch("r", owner("a"), priority=HIGH)
    story.dispatch("s", owner("a"), priority=0)
    assert story.state.high == {"a": {"r": None}}
    story.say(GATEWAY, MigrationCommitted(migration="m", request="r", epoch=1, owner=owner("b"), tail_tokens=0))
    assert story.state.high == {"b": {"r": None}}
    assert codec.decode_state(codec.encode_state(story.state)).high == story.state.high
    end = RequestFinished(
        request="r", epoch=2, owner=owner("b"), finish_reason="stop", output_tokens=1, ttft_ms=1, gap_ms_mean=1,
        gap_ms_max=1,
    )  # fmt: skip
    story.say(GATEWAY, end)
    assert story.state.high == {}


def test_its_head_room_is_usage_that_is_counted_once_for_an_instance() -> None:
    story = cluster(60, 60)
    room = Room(story.state, story.now_ms)
    before = room.freeness(story.state.instances["a"])
    for request in ("r", "s"):
        story.dispatch(request, owner("a"), priority=HIGH)
    assert blocks_kept(story.state, story.state.instances["a"]) == 50
    assert (before, room.freeness(story.state.instances["a"])) == (60 / 4, 10 / 4)
    assert room.blocks_left(story.state.instances["a"]) == 60, "a move may still use what is free in truth"


@pytest.mark.parametrize("policy", DISPATCH)
def test_others_keep_away_from_it_while_there_is_room_elsewhere(policy: str) -> None:
    story = cluster(90, 20, policy=policy)
    story.dispatch("h", owner("a"), priority=HIGH)
    assert {chosen(story, priority) for priority in (0, LOW)} == {"b"}
    story.load(owner("b"), running=4, blocks_free=3)
    assert chosen(story, LOW) == "a"
    story.load(owner("a"), running=4, blocks_free=52)
    story.load(owner("b"), running=4, blocks_free=4)
    assert chosen(story, LOW, exclude=frozenset({"b"})) == "a", "rather there than nowhere"


@pytest.mark.parametrize("policy", DISPATCH)
def test_the_high_class_goes_where_it_is_already_as_long_as_head_room_is_left(policy: str) -> None:
    story = cluster(80, 99, 55, policy=policy)
    story.dispatch("h", owner("c"), priority=HIGH, prompt=16)
    assert chosen(story, HIGH) == "c"
    story.dispatch("g", owner("c"), priority=HIGH, prompt=16 * 10)
    assert chosen(story, HIGH) in ("a", "b"), "the blocks of what was just sent are spoken for"


@pytest.mark.parametrize("policy", DISPATCH)
def test_the_high_class_avoids_queues(policy: str) -> None:
    story = cluster(20, 20, policy=policy)
    story.load(owner("a"), running=4, waiting=2, blocks_free=20, blocks_head=1, blocks_waiting=2)
    assert chosen(story, HIGH) == "b"


def moves(story: Story, **params: Any) -> list[Proposal]:
    return proposals(story, "priority", **params)


def crowded(*, high: str = "a") -> Story:
    """On a: 4 low requests of 5, 10, 15, 20 blocks, 25 free; on b nothing."""
    story = cluster(25, 100)
    for blocks in (5, 10, 15, 20):
        story.running(f"low{blocks}", owner("a"), tokens=blocks * 16, priority=LOW)
    story.running("high", owner(high), tokens=16, priority=HIGH)
    return story


def test_head_room_is_made_by_moving_others_away_the_largest_first() -> None:
    found = moves(crowded())
    assert [(p.request, p.target) for p in found] == [("low20", "b"), ("low15", "b")]
    assert "lacks 25 of 50 blocks" in found[0].reason
    assert "lacks 5 of 50" in found[1].reason


def test_normal_requests_leave_after_low_ones_and_the_waiting_before_all() -> None:
    story = crowded()
    story.running("normal30", owner("a"), tokens=480, priority=0)
    story.dispatch("queued", owner("a"), priority=0)
    assert [p.request for p in moves(story)] == ["queued", "low20", "low15"]


def test_nobody_leaves_without_need_and_the_high_class_itself_never() -> None:
    assert moves(crowded(high="b")) == []
    story = crowded()
    story.load(owner("a"), running=5, blocks_free=50)
    assert moves(story) == []
    assert all(p.request != "high" for p in moves(crowded(), blocks_min=0))


def test_P23_nobody_leaves_for_an_instance_that_has_the_high_class_too() -> None:
    story = crowded()
    story.dispatch("high2", owner("b"), priority=HIGH)
    assert moves(story) == []


def test_P23_balance_does_not_bring_them_back() -> None:
    story = crowded()
    story.load(owner("a"), running=1, blocks_free=95)
    story.load(owner("b"), running=6, blocks_free=10)
    for index in range(6):
        story.running(f"moved{index}", owner("b"), tokens=15 * 16, priority=LOW)
    assert move_policy("balance").name == "balance"
    free = [p.target for p in proposals(story, "balance", low=10, high=50)]
    assert free == [], "45 blocks of head-room aside, a is no emptier than it should be"
