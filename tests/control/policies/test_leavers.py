"""Which request leaves: one place for all policies."""

from __future__ import annotations

import pytest

from midstream.control.policies.leavers import RequestChoice, gain_blocks, leavers, line, price
from midstream.control.policies.room import Room
from tests.control.fixtures import Story, owner
from tests.control.policies.scenes import scene


def chosen(story: Story, choice: RequestChoice) -> list[str]:
    room = Room(story.state, story.now_ms)
    return [view.request for view in leavers(story.state, room, story.state.instances["a"], choice)]


@pytest.mark.parametrize(
    ("choice", "order"),
    [
        ("first_come", ["a0", "a1", "a2"]),
        ("last_come", ["a2", "a1", "a0"]),
        ("longest", ["a1", "a0", "a2"]),
        ("shortest", ["a2", "a0", "a1"]),
        ("first_waiting", ["a3", "a4"]),
    ],
)
def test_each_choice_has_its_order(choice: RequestChoice, order: list[str]) -> None:
    assert chosen(scene(100, a=([20, 30, 10], [5, 4])), choice) == order


def test_cheapest_is_bytes_for_relief_whatever_moves_elsewhere() -> None:
    story = scene(100, a=([20, 30, 10], [70]))
    room, source = Room(story.state, story.now_ms), story.state.instances["a"]
    prices = {name: price(room, source, story.state.requests[name]) for name in ("a0", "a1", "a2")}
    assert chosen(story, "cheapest") == sorted(prices, key=lambda name: (prices[name], name))


def test_a_request_waits_only_as_long_as_the_load_says() -> None:
    """Progress comes once a second: what was dispatched a moment ago may run by now."""
    story = scene(100, a=([20], [5, 6, 7]))
    story.load(owner("a"), running=3, waiting=1, blocks_free=60, blocks_head=7, blocks_waiting=7)
    room = Room(story.state, story.now_ms)
    assert [view.request for view in line(story.state, room, story.state.instances["a"])] == ["a3"]


def test_a_line_stands_in_order_of_priority_then_arrival() -> None:
    story = scene(100, a=([20], [5, 6]))
    story.dispatch("urgent", owner("a"), prompt=64, priority=-1)
    story.load(owner("a"), running=1, waiting=3, blocks_free=0, blocks_head=4, blocks_waiting=15)
    room = Room(story.state, story.now_ms)
    assert [v.request for v in line(story.state, room, story.state.instances["a"])] == ["urgent", "a1", "a2"]


def test_a_waiting_request_relieves_by_what_the_head_claims_and_costs_no_bytes() -> None:
    story = scene(100, a=([40, 50], [30]), b=([10], []))
    room, state = Room(story.state, story.now_ms), story.state
    head, source, target = state.requests["a2"], state.instances["a"], state.instances["b"]
    assert price(room, source, head) == 0
    assert room.blocks_after(source) == 10 - 30
    assert room.blocks_after(source, head) == 10
    assert gain_blocks(room, source, target, head) == 30
