"""Emptying one instance: all of it or nothing, and never so that the others suffer."""

from __future__ import annotations

from tests.control.policies.scenes import decide_and_move, pairs, proposals, put_in_force, scene


def test_the_instance_with_the_fewest_requests_is_emptied() -> None:
    story = scene(1000, a=([20, 20, 20], []), b=([30, 10], []), c=([20] * 4, []))
    found = proposals(story, "consolidate")
    assert pairs(found) == [("b0", "a"), ("b1", "c")]
    assert "b has the fewest requests" in found[0].reason


def test_P23_nothing_moves_if_the_others_would_have_too_little_afterwards() -> None:
    story = scene(300, a=([20, 20, 20], []), b=([30, 10], []))
    assert proposals(story, "consolidate") == []
    assert len(proposals(story, "consolidate", keep=20.0)) == 2


def test_P23_it_stops_when_one_is_empty() -> None:
    story = scene(1000, a=([20] * 9, []), b=([30, 10, 10, 10, 10], []), c=([20] * 9, []))
    put_in_force(story, "consolidate")
    moved = [move.request for _ in range(5) for move in decide_and_move(story)]
    assert sorted(moved) == ["b0", "b1", "b2", "b3", "b4"]
    assert story.state.placed["b"] == {}


def test_a_busy_cluster_is_left_alone() -> None:
    story = scene(1000, a=([5] * 9, []), b=([5] * 9, []))
    assert proposals(story, "consolidate") == []
    assert len(proposals(story, "consolidate", requests_max=9, keep=0.0)) > 0
