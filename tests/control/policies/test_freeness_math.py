"""Virtual usage and freeness by the formulas of Llumnix (OSDI 2024)."""

from __future__ import annotations

from math import inf

from midstream.control.events import DrainRequested
from midstream.control.policies.freeness_math import freeness
from tests.control.fixtures import Story


def freeness_with(**load: int) -> float:
    story = Story()
    story.load(story.instance("a", blocks=1000), **load)
    return freeness(story.state.instances["a"])


def test_freeness_is_the_blocks_left_for_each_running_request() -> None:
    assert freeness_with(running=8, blocks_free=400) == 50
    assert freeness_with(running=8, blocks_free=300, blocks_reserved=100) == 37.5


def test_an_empty_instance_is_infinitely_free() -> None:
    assert freeness_with(blocks_free=1000) == inf


def test_the_head_of_the_line_counts_with_the_blocks_it_needs_and_others_do_not() -> None:
    assert freeness_with(running=4, waiting=9, blocks_free=100, blocks_head=60, blocks_waiting=900) == 10
    assert freeness_with(running=4, waiting=1, blocks_free=10, blocks_head=50) == -10


def test_a_draining_instance_must_lose_everything() -> None:
    story = Story()
    story.load(story.instance("a"), running=1, blocks_free=900)
    story.say("admin", DrainRequested(operation="o", instance="a", actor="ann"))
    assert freeness(story.state.instances["a"]) == -inf
