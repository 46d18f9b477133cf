"""When requests wait at the gateway: for slots, for blocks, behind a line; and that a burst does not pile up."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from midstream.control.policies import DISPATCH, InFlight, choose
from midstream.control.policies.base import DispatchWanted
from midstream.control.policies.saturation import saturated, takes
from midstream.control.state import Speed
from tests.control.fixtures import Story, owner
from tests.control.policies.scenes import even, wanted
from tests.control.policies.test_priority import HIGH, cluster

DEPTH = 4
BLOCKS = 11
"""Of the request that `wanted()` describes."""


def admitted(story: Story, count: int, depth: int = DEPTH, **changes: int) -> Counter[str]:
    """Where a gateway sends so many requests between two reports; the others wait."""
    sent: dict[str, InFlight] = {}
    asked = wanted(**changes)
    for turn in range(count):
        closed = saturated(story.state, asked, sent, depth)
        choice = choose(story.state, replace(asked, exclude=asked.exclude | closed), sent, turn)
        if choice is None:
            break
        name = choice.owner.instance
        before = sent.get(name, InFlight(0, 0))
        count, tokens = before.requests + 1, before.line_tokens + asked.prompt_tokens
        sent[name] = InFlight(count, tokens // 16 + count, count, tokens)
    return Counter({name: flight.requests for name, flight in sent.items()})


def test_an_instance_takes_what_it_has_slots_blocks_and_no_queue_for() -> None:
    story = cluster(40, 100)
    want = DispatchWanted(request="r", prompt_tokens=64, output_tokens_max=64)
    state = story.state
    assert takes(state, "a", want, {}, DEPTH)
    story.load(owner("a"), running=4, waiting=4, blocks_free=40, blocks_head=30, blocks_waiting=37)
    assert not takes(state, "a", want, {}, DEPTH)
    story.load(owner("a"), running=4, blocks_free=4)
    assert not takes(state, "a", want, {}, DEPTH)
    story.load(owner("a"), running=64, blocks_free=40)
    assert not takes(state, "a", want, {}, DEPTH)
    assert saturated(state, want, {}, DEPTH) == {"a"}
    high = replace(want, priority=HIGH)
    assert saturated(state, high, {}, DEPTH) == frozenset()


def test_with_a_depth_of_0_nothing_waits_at_the_gateway() -> None:
    story = even(2, running=60, waiting=50, blocks_free=0, blocks_head=20, blocks_waiting=900)
    assert saturated(story.state, wanted(), {}, 0) == frozenset()


def test_an_idle_instance_takes_even_what_it_can_never_hold() -> None:
    want = DispatchWanted(request="r", prompt_tokens=64_000, output_tokens_max=64)
    assert takes(cluster(100).state, "a", want, {}, DEPTH)


def test_what_is_kept_free_for_the_high_class_is_not_room() -> None:
    story = cluster(53, 0)
    want = DispatchWanted(request="r", prompt_tokens=64, output_tokens_max=64)
    assert takes(story.state, "a", want, {}, DEPTH)
    story.dispatch("h", owner("a"), priority=HIGH)
    assert not takes(story.state, "a", want, {}, DEPTH)


def test_P22_long_prompts_sent_since_the_report_are_a_line_as_those_in_it_are() -> None:
    story = even(1, running=10)
    assert admitted(story, 100, prompt_tokens=1_600) == {"i0": DEPTH}


@pytest.mark.parametrize(
    "load", [{}, {"running": 3}, {"running": 3, "waiting": 4, "blocks_head": 4, "blocks_waiting": 16}]
)
def test_short_prompts_that_begin_together_with_slots_and_blocks_do_not_wait_for_a_report(load: dict[str, int]) -> None:
    """Arrived a moment before the report, some of them still wait for the engine's next step: that is no queue."""
    assert admitted(even(1, **load), 16, prompt_tokens=96) == {"i0": 16}


def test_a_line_is_counted_in_tokens_and_not_in_started_blocks() -> None:
    """Large blocks are mostly empty: what they hold is no measure of the work."""
    sent = {"i0": InFlight(19, 152, line=19, line_tokens=1_900)}
    assert takes(even(1, running=3).state, "i0", wanted(prompt_tokens=100), sent, DEPTH)


def test_who_has_a_token_stands_in_no_line() -> None:
    state, asked = even(1, running=3).state, wanted(prompt_tokens=1_600)
    assert not takes(state, "i0", asked, {"i0": InFlight(8, 40, line=8, line_tokens=640)}, DEPTH)
    assert takes(state, "i0", asked, {"i0": InFlight(8, 40)}, DEPTH)


def test_a_fast_instance_takes_as_many_prompts_as_it_computes_until_the_next_report() -> None:
    story = even(1, running=10)
    story.state.speeds["i0"] = Speed(prefill_ms_per_token=0.01)
    assert admitted(story, 100, prompt_tokens=960) == {"i0": 10}


@pytest.mark.parametrize("policy", sorted(set(DISPATCH) - {"flood", "session_affinity"}))
@pytest.mark.parametrize("prompt_tokens", [160, 1_600])
def test_P22_a_burst_through_admission_does_not_pile_up_where_the_line_was_empty(
    policy: str, prompt_tokens: int
) -> None:
    """Seven have one in line, one has none: it must not get all that the others do not take."""
    story = even(8, policy, running=10)
    for index in range(1, 8):
        story.load(
            owner(f"i{index}"), running=10, waiting=1, blocks_free=1000, blocks_head=BLOCKS, blocks_waiting=BLOCKS
        )
    hits = admitted(story, 100, prompt_tokens=prompt_tokens)
    assert len(hits) == 8
    assert max(hits.values()) - min(hits.values()) <= 2, hits
    assert prompt_tokens > 160 or max(hits.values()) / (sum(hits.values()) / 8) <= 1.15, hits
