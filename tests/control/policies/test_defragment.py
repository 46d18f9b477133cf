"""Room for the head of the line: free blocks that are enough only in the sum."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.control.decide import decide
from midstream.control.events import MoveDecided, WaitingReported
from tests.control.fixtures import BLOCK_TOKENS, GATEWAY, Story, fingerprint, owner
from tests.control.policies.scenes import decide_and_move, pairs, proposals, put_in_force, scene


def test_a_head_of_line_that_fits_nowhere_but_in_the_sum_gets_its_place_by_moves() -> None:
    story = scene(a=([300, 200, 400], [300]), b=([300, 450], []), c=([400, 450], []))
    (move,) = proposals(story, "defragment")
    assert (move.request, move.blocks_needed) == ("a1", 208)
    assert move.target == "b", "c has only 150 blocks"
    assert "the head of 1 in line on a lacks 200 of 300 blocks; move 1 of 1" in move.reason


def test_the_line_is_served_and_nothing_moves_any_more() -> None:
    story = scene(a=([300, 200, 400], [300]), b=([300, 400], []), c=([400, 400], []))
    put_in_force(story, "defragment")
    assert [move.request for move in decide_and_move(story)] == ["a1"]
    assert story.state.instances["a"].load.waiting == 0
    assert story.state.requests["a3"].blocks == 300
    assert decide_and_move(story) == []


def test_a_waiting_request_goes_where_there_is_room_without_copying_anything() -> None:
    story = scene(a=([500, 400], [300]), b=([400], []))
    (move,) = proposals(story, "defragment")
    assert (move.request, move.target, move.blocks_needed) == ("a2", "b", 301)
    assert "a2, which waits, has room there" in move.reason


def test_a_whole_line_spreads_over_those_that_have_none() -> None:
    story = scene(a=([900], [300, 200, 200]), b=([400], []), c=([600], []))
    assert pairs(proposals(story, "defragment")) == [("a1", "b"), ("a2", "c"), ("a3", "b")]
    assert pairs(proposals(story, "defragment", keep=40.0)) == [("a1", "b"), ("a2", "c")]


def test_what_waits_behind_a_head_that_fits_is_left_alone() -> None:
    assert proposals(scene(a=([500], [300, 400]), b=([100], [])), "defragment") == []


def test_several_moves_make_room_together_or_none_is_made() -> None:
    story = scene(a=([320, 320, 320], [600]), b=([600], []), c=([600], []))
    assert {move.request for move in proposals(story, "defragment")} == {"a0", "a2"}
    story.load(owner("c"), running=1, blocks_free=300)
    assert proposals(story, "defragment") == [], "one move alone would only have cost"


def test_P23_the_smallest_request_that_is_enough_goes_and_the_price_has_a_bound() -> None:
    story = scene(a=([60, 250, 240, 360], [300]), b=([710], []))
    (move,) = proposals(story, "defragment")
    assert move.request == "a2"
    assert proposals(story, "defragment", copy_max=0.7) == []


def test_targets_keep_the_room_that_their_own_requests_need() -> None:
    story = scene(a=([300, 200, 400], [300]), b=([157] * 5, []))
    assert pairs(proposals(story, "defragment", keep=0.0)) == [("a1", "b")]
    assert proposals(story, "defragment") == []


def test_P24_two_lines_do_not_count_on_the_same_room() -> None:
    story = scene(a=([950], [300]), b=([950], [300]), c=([500], []))
    assert len(proposals(story, "defragment")) == 1


def test_nothing_is_sent_to_others_with_a_line_or_of_another_kind() -> None:
    story = scene(a=([950], [300]), b=([200], [100]))
    story.load(story.instance("z", fingerprint=fingerprint(layout="HND")), blocks_free=1000)
    assert proposals(story, "defragment") == []


def test_moves_on_their_way_count_as_done() -> None:
    story = scene(a=([300, 200, 400], [300]), b=([300, 400], []), c=([400, 400], []))
    put_in_force(story, "defragment")
    decision = decide(story.state, story.next_tick())
    story.tick()
    story.control(*decision.events)
    assert [e for e in decide(story.state, story.next_tick()).events if isinstance(e, MoveDecided)] == []


def test_a_full_batch_is_relieved_by_those_who_wait() -> None:
    story = scene(a=([1] * 64, [5, 5]), b=([10], []))
    assert pairs(proposals(story, "defragment")) == [("a64", "b"), ("a65", "b")]


def test_a_head_goes_where_the_fewest_blocks_have_to_leave_and_its_own_hole_takes_some_of_them() -> None:
    story = scene(a=([420, 420], [200]), b=([100] * 9, []), c=([850], []))
    first, *others = proposals(story, "defragment", keep=0.0)
    assert (first.request, first.target, first.is_first) == ("a2", "b", True)
    assert "101 blocks have to leave b for it" in first.reason
    assert {(move.request[0], move.target) for move in others} == {("b", "a"), ("b", "c")}


def test_who_came_first_has_the_room_that_a_stuck_line_of_later_ones_keeps() -> None:
    assert pairs(proposals(scene(a=([950], [100]), b=([700], [400])), "defragment")) == [("a1", "b")]
    assert proposals(scene(a=([700], [400]), b=([950], [100])), "defragment") == [], "b1 came later than a1"


def test_what_is_free_for_the_first_in_line_is_ordered_by_decide_too() -> None:
    story = scene(a=([950], [100]), b=([700], [400]))
    put_in_force(story, "defragment")
    assert [(move.request, move.target.instance) for move in decide_and_move(story)] == [("a1", "b")]
    assert not story.state.requests["a1"].is_waiting


def waits_at_the_gateway(story: Story, blocks: int, model: str = "") -> None:
    tokens = blocks * BLOCK_TOKENS - 1
    story.say(GATEWAY, WaitingReported(gateway="g0", requests=1, tokens=tokens, head_tokens=tokens, head_model=model))


def test_room_is_made_for_who_waits_at_a_gateway_where_the_fewest_blocks_are_missing() -> None:
    story = scene(a=([100, 300, 150], []), b=([300, 300], []))
    waits_at_the_gateway(story, 500)
    (move,) = proposals(story, "defragment")
    assert (move.request, move.target) == ("a0", "b")
    assert "who waits at the gateway lacks 50 of 500 blocks on a" in move.reason
    waits_at_the_gateway(story, 450)
    assert proposals(story, "defragment") == [], "it fits, and will be sent at once"
    waits_at_the_gateway(story, 500, model="another")
    assert proposals(story, "defragment") == []


def test_P24_moves_do_not_fill_the_room_of_who_waits_at_a_gateway() -> None:
    story = scene(a=([60] * 16, []), b=([300], []))
    assert len(proposals(story, "balance")) == 1
    waits_at_the_gateway(story, 690)
    assert proposals(story, "balance") == []


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(20, 400), max_size=4), st.lists(st.integers(20, 600), max_size=3)),
        min_size=2, max_size=5,
    )
)  # fmt: skip
def test_P23_lines_only_get_shorter_and_moving_comes_to_rest(loads: list[tuple[list[int], list[int]]]) -> None:
    """No tick leaves more requests waiting than before it, whatever the cluster looks like."""
    fitting = {name: (list(_fit(running)), waiting) for name, (running, waiting) in zip("abcde", loads, strict=False)}
    story = scene(**fitting)
    put_in_force(story, "defragment", cooldown_ms=0)
    waiting = sum(view.load.waiting for view in story.state.instances.values())
    for _ in range(60):
        moves = decide_and_move(story)
        now = sum(view.load.waiting for view in story.state.instances.values())
        assert now <= waiting
        waiting = now
        if not moves:
            return
    pytest.fail("defragmenting never comes to rest")


def _fit(running: list[int]) -> list[int]:
    """As many as 1,000 blocks hold."""
    fitting: list[int] = []
    for blocks in running:
        if sum(fitting) + blocks <= 1000:
            fitting.append(blocks)
    return fitting
