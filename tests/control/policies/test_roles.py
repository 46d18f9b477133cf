"""Roles of instances: prompts to those that are for them, tokens to the others, and neither side is a wall."""

from __future__ import annotations

import pytest

from midstream.control.events import DrainRequested, FirstTokenDelivered
from midstream.control.policies import DISPATCH
from tests.control.fixtures import GATEWAY, Story, owner
from tests.control.policies.test_moves import proposals
from tests.control.policies.test_priority import chosen


def cluster(policy: str = "freeness") -> Story:
    """p is for prompts, d and e are for tokens."""
    from midstream.control.events import PolicyConfigured
    from midstream.control.state import PolicyChoice, PolicySettings

    story = Story()
    story.say("admin", PolicyConfigured(policies=PolicySettings(dispatch=PolicyChoice(policy)), actor="test"))
    for name, role, free in (("p", "prefill", 50), ("d", "decode", 90), ("e", "decode", 80)):
        story.load(story.instance(name, blocks=100, role=role), running=4, blocks_free=free)
    return story


def began(story: Story, request: str, me: str = "p") -> None:
    epoch = story.state.requests[request].epoch
    story.say(GATEWAY, FirstTokenDelivered(request=request, epoch=epoch, owner=owner(me), ttft_ms=9.0))


@pytest.mark.parametrize("policy", DISPATCH)
def test_new_requests_go_where_prompts_are_computed(policy: str) -> None:
    assert chosen(cluster(policy), 0) == "p"


@pytest.mark.parametrize("policy", DISPATCH)
def test_a_busy_prefill_side_gives_to_an_idle_decode_side_and_to_a_busy_one_not(policy: str) -> None:
    story = cluster(policy)
    story.load(owner("p"), running=4, waiting=1, blocks_free=50, blocks_head=4, blocks_waiting=4)
    assert chosen(story, 0) in ("d", "e")
    for name in ("d", "e"):
        story.load(owner(name), running=30, blocks_free=1)
    assert chosen(story, 0) == "p"


@pytest.mark.parametrize("policy", DISPATCH)
def test_without_a_prefill_side_the_decode_side_serves(policy: str) -> None:
    story = cluster(policy)
    story.say("admin", DrainRequested(operation="o", instance="p", actor="ann"))
    assert chosen(story, 0) in ("d", "e")


def test_the_first_token_hands_over_at_the_next_tick() -> None:
    story = cluster()
    story.dispatch("r", owner("p"))
    assert proposals(story, "prefill_decode") == []
    began(story, "r")
    (proposal,) = proposals(story, "prefill_decode")
    assert (proposal.request, proposal.target, [name for name, _ in proposal.candidates]) == ("r", "d", ["d", "e"])
    assert "its prompt is computed" in proposal.reason


def test_a_first_token_of_an_older_owner_says_nothing() -> None:
    story = cluster()
    story.dispatch("r", owner("p"))
    story.dispatch("r", owner("p"), epoch=3)
    story.say(GATEWAY, FirstTokenDelivered(request="r", epoch=1, owner=owner("p"), ttft_ms=9.0))
    assert proposals(story, "prefill_decode") == []


def test_what_is_nearly_done_stays_and_so_does_what_finds_no_room() -> None:
    story = cluster()
    story.dispatch("short", owner("p"), output_tokens_max=20)
    story.dispatch("long", owner("p"))
    for request in ("short", "long"):
        began(story, request)
    assert [proposal.request for proposal in proposals(story, "prefill_decode")] == ["long"]
    for name in ("d", "e"):
        story.load(owner(name), running=30, blocks_free=14)
    assert proposals(story, "prefill_decode") == []


def test_balance_moves_nothing_to_the_prefill_side() -> None:
    story = cluster()
    story.load(owner("p"), running=1, blocks_free=99)
    for name in ("d", "e"):
        story.load(owner(name), running=20, blocks_free=5)
        for index in range(20):
            story.running(f"{name}{index}", owner(name), tokens=64)
    assert proposals(story, "balance") == []
    story.say("admin", DrainRequested(operation="o", instance="d", actor="ann"))
    assert proposals(story, "drain") != [], "a drain may have nowhere else"
