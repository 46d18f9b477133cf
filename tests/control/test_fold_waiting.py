"""What waits at gateways, as the fold has it: paired with those who said it, gone when they are (P21)."""

from __future__ import annotations

from midstream.control.events import FirstTokenDelivered, GatewayStarted, RunsDropped, WaitingReported
from midstream.control.state import WaitingView
from tests.control.fixtures import GATEWAY, Story


def waiting(story: Story, requests: int) -> None:
    story.say(GATEWAY, WaitingReported(gateway="g0", requests=requests, tokens=100 * requests))


def test_P21_what_waits_is_known_until_the_gateway_says_otherwise() -> None:
    story = Story()
    waiting(story, 3)
    assert story.state.waiting == {"g0": WaitingView(requests=3, tokens=300)}
    waiting(story, 0)
    assert story.state.waiting == {}


def test_whose_turn_it_is_at_a_gateway_is_known() -> None:
    story = Story()
    story.say(GATEWAY, WaitingReported(gateway="g0", requests=2, tokens=300, head_tokens=64, head_model="m"))
    view = story.state.waiting["g0"]
    assert (view.head_tokens, view.head_model) == (64, "m")


def test_who_waited_at_its_gateway_came_earlier_than_it_was_dispatched() -> None:
    story = Story()
    story.dispatch("r", story.instance("a"), waited_ms=400.0)
    view = story.state.requests["r"]
    assert view.dispatched_at_ms - view.arrived_at_ms == 400


def test_P21_a_gateway_that_started_again_has_nothing_waiting() -> None:
    story = Story()
    waiting(story, 3)
    story.say(GATEWAY, GatewayStarted(gateway="g0"), incarnation=2)
    assert story.state.waiting == {}


def test_P21_a_gateway_whose_runs_were_dropped_is_gone() -> None:
    story = Story()
    me = story.instance("a")
    waiting(story, 3)
    story.say("llumlet/a", RunsDropped(owner=me, gateway="g0", runs=1))
    assert story.state.waiting == {}


def test_a_first_token_is_known_at_once_and_never_goes_back() -> None:
    story = Story()
    me = story.instance("a", role="prefill")
    story.dispatch("r", me, prompt=64)
    event = FirstTokenDelivered(request="r", epoch=1, owner=me, ttft_ms=5.0)
    story.say(GATEWAY, event)
    view = story.state.requests["r"]
    assert (view.tokens, view.is_waiting) == (65, False)
    story.progress("r", 90)
    story.say(GATEWAY, event)
    assert story.state.requests["r"].tokens == 90
