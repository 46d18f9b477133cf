"""Dispatch: exact turns, no herding, only where a request may go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.control.policies import choose
from midstream.control.policies.base import CANDIDATES_MAX
from tests.control.fixtures import Story, owner
from tests.control.policies.scenes import dispatch_many, even, wanted


@given(st.integers(1, 9), st.integers(1, 6))
def test_P22_k_n_round_robin_dispatches_hit_each_of_n_instances_k_times(n: int, k: int) -> None:
    assert dispatch_many(even(n, "round_robin"), k * n) == {f"i{index}": k for index in range(n)}


def test_P22_ties_rotate_with_the_gateways_turn() -> None:
    story = even(4)
    chosen = [choose(story.state, wanted(), {}, turn) for turn in range(4)]
    assert {choice.owner.instance for choice in chosen if choice} == {"i0", "i1", "i2", "i3"}


def test_the_freest_is_chosen_and_the_scores_are_its_reasons() -> None:
    story = even(12, running=10, blocks_free=200)
    story.load(owner("i7"), running=10, blocks_free=400)
    choice = choose(story.state, wanted(), {}, 3)
    assert choice is not None
    assert choice.owner == owner("i7")
    assert choice.address == "mem:i7"
    assert len(choice.scores) == CANDIDATES_MAX
    assert choice.scores[0] == ("i7", (400 - 11) / 11)
    assert [score for _, score in choice.scores] == sorted((s for _, s in choice.scores), reverse=True)


def test_a_queue_counts_with_all_its_blocks() -> None:
    story = even(2, running=4, blocks_free=200)
    story.load(owner("i0"), running=4, waiting=9, blocks_free=300, blocks_head=5, blocks_waiting=250)
    choice = choose(story.state, wanted(), {}, 0)
    assert choice is not None
    assert choice.owner == owner("i1")


def test_a_request_prefers_instances_that_can_ever_hold_it() -> None:
    story = Story()
    story.instance("small", blocks=10)
    story.load(story.instance("big", blocks=100), running=50, blocks_free=1)
    assert set(dispatch_many(story, 5)) == {"big"}
    choice = choose(story.state, wanted(prompt_tokens=100_000), {}, 0)
    assert choice is not None


def slo_cluster(*steps_ms: float) -> Story:
    """Instances at equal batches, that report steps of these lengths; 0: it reports none."""
    story = even(len(steps_ms), "slo")
    for _ in range(30):
        for index, step_ms in enumerate(steps_ms):
            if step_ms:
                story.load(owner(f"i{index}"), running=4, blocks_free=900, step_ms=step_ms)
    return story


@pytest.mark.parametrize("prompt_tokens", [10, 160, 1_000])
@pytest.mark.parametrize("steps_ms", [(20.0, 20.4, 20.2, 20.1), (30.0, 31.0, 30.5, 32.0), (60.0, 60.0, 60.0, 0.0)])
def test_P22_slo_spreads_over_instances_that_are_nearly_alike_and_over_one_it_knows_nothing_of(
    steps_ms: tuple[float, ...], prompt_tokens: int
) -> None:
    hits = dispatch_many(slo_cluster(*steps_ms), 100, prompt_tokens=prompt_tokens)
    assert len(hits) == 4
    assert max(hits.values()) <= 1.15 * 100 / 4


def test_slo_prefers_one_that_is_faster_by_more_than_a_few_requests() -> None:
    hits = dispatch_many(slo_cluster(20.0, 40.0), 40, prompt_tokens=10)
    assert hits["i0"] >= 35
