"""What the log teaches about speeds, and what the dispatcher by targets makes of it."""

from __future__ import annotations

import pytest

from midstream.control.codec import decode_state, encode_state
from midstream.control.events import PolicyConfigured, RequestFinished
from midstream.control.fold.speeds import PREFILL_SEEN_MAX
from midstream.control.policies import DispatchWanted, InFlight, choose
from midstream.control.policies.dispatch_slo import UNKNOWN_GROWTH, predicted_ms, step_ms
from midstream.control.state import PolicyChoice, PolicySettings
from tests.control.fixtures import GATEWAY, Story, owner

SLO = PolicySettings(dispatch=PolicyChoice("slo", {"ttft_ms": 500.0, "itl_ms": 40.0}))


def reports(story: Story, name: str, line: tuple[float, float], count: int = 200) -> None:
    """A busy instance: step time = a + b x running, a little off in turn."""
    for index in range(count):
        running = 1 + index % 20
        noise = 0.2 * (-1) ** index
        story.load(owner(name), running=running, blocks_free=900, step_ms=line[0] + line[1] * running + noise)


def finished(story: Story, request: str, name: str, *, prompt: int, ttft_ms: float, output: int = 100) -> None:
    story.dispatch(request, owner(name), prompt=prompt)
    story.say(
        GATEWAY,
        RequestFinished(
            request=request, epoch=1, owner=owner(name), finish_reason="stop", output_tokens=output, ttft_ms=ttft_ms,
            gap_ms_mean=1.0, gap_ms_max=1.0,
        ),
    )  # fmt: skip


def test_the_line_of_step_times_is_found() -> None:
    story = Story()
    story.instance("a")
    reports(story, "a", (12.0, 0.5))
    speed = story.state.speeds["a"]
    assert step_ms(speed, 10) == pytest.approx(17.0, rel=0.03)
    assert step_ms(speed, 40) == pytest.approx(32.0, rel=0.05)


def test_it_follows_an_engine_that_became_slower() -> None:
    story = Story()
    story.instance("a")
    reports(story, "a", (12.0, 0.5))
    reports(story, "a", (30.0, 1.0), count=400)
    assert step_ms(story.state.speeds["a"], 10) == pytest.approx(40.0, rel=0.05)


def test_reports_at_one_load_leave_the_growth_that_was_assumed() -> None:
    story = Story()
    story.instance("a")
    for _ in range(10):
        story.load(owner("a"), running=8, blocks_free=900, step_ms=25.0)
    assert step_ms(story.state.speeds["a"], 8) == pytest.approx(25.0)
    assert step_ms(story.state.speeds["a"], 32) == pytest.approx(25.0 * (1 + 24 * UNKNOWN_GROWTH))


def test_prefill_is_what_remains_when_nothing_queues() -> None:
    story = Story()
    story.instance("a")
    for index, ttft_ms in enumerate((900.0, 120.0, 2_000.0, 500.0)):
        finished(story, f"r{index}", "a", prompt=1_000, ttft_ms=ttft_ms)
    assert story.state.speeds["a"].prefill_ms_per_token == pytest.approx(0.12, rel=0.1)
    assert story.state.speeds["a"].output_tokens == pytest.approx(100)


def test_one_cached_prompt_does_not_make_an_engine_look_fast() -> None:
    story = Story()
    story.instance("a")
    for index in range(20):
        finished(story, f"r{index}", "a", prompt=4_000, ttft_ms=400.0)
    for index in range(3):
        finished(story, f"cached{index}", "a", prompt=4_000, ttft_ms=20.0)
        assert story.state.speeds["a"].prefill_ms_per_token == pytest.approx(0.1)


def test_prefill_follows_an_engine_that_became_slower_or_faster() -> None:
    story = Story()
    story.instance("a")
    for number, ttft_ms in enumerate((100.0, 500.0, 50.0)):
        for index in range(PREFILL_SEEN_MAX):
            finished(story, f"r{number}-{index}", "a", prompt=1_000, ttft_ms=ttft_ms)
        assert story.state.speeds["a"].prefill_ms_per_token == pytest.approx(ttft_ms / 1_000)


def test_time_at_the_gateway_is_no_prefill() -> None:
    story = Story()
    story.instance("a")
    story.dispatch("r", owner("a"), prompt=1_000, waited_ms=900.0)
    finished(story, "r", "a", prompt=1_000, ttft_ms=1_000.0)
    assert story.state.speeds["a"].prefill_ms_per_token == pytest.approx(0.1)


def test_a_first_token_that_another_instance_made_teaches_nothing() -> None:
    story = Story()
    for name in "ab":
        story.instance(name)
    story.dispatch("lost", owner("a"), prompt=1_000, epoch=2)
    story.dispatch("lost", owner("b"), prompt=1_000, epoch=4, cause="lost")
    finished(story, "lost", "b", prompt=1_000, ttft_ms=5.0)
    story.dispatch("unknown", owner("b"), prompt=1_000, epoch=4, cause="again", delivered_tokens=7)
    finished(story, "unknown", "b", prompt=1_000, ttft_ms=5.0)
    assert story.state.speeds["b"].prefill_ms_per_token == 0
    assert story.state.speeds["b"].output_tokens == pytest.approx(100)


def test_a_restart_begins_afresh_and_the_state_carries_what_is_known() -> None:
    story = Story()
    story.instance("a")
    reports(story, "a", (12.0, 0.5), count=20)
    finished(story, "r", "a", prompt=1_000, ttft_ms=120.0)
    assert decode_state(encode_state(story.state)).speeds == story.state.speeds
    story.instance("a", incarnation=2)
    assert story.state.speeds == {}


def test_missing_blocks_cost_the_time_until_they_come_free() -> None:
    story = Story()
    story.instance("a", blocks=1000)
    for _ in range(10):
        story.load(owner("a"), running=10, blocks_free=0, step_ms=20.0)
    finished(story, "r", "a", prompt=1_000, ttft_ms=100.0, output=200)
    view, speed = story.state.instances["a"], story.state.speeds["a"]
    ttft, itl = predicted_ms(view, speed, InFlight(0, 0), 1_599)
    assert itl == pytest.approx(20.0 * (1 + UNKNOWN_GROWTH))
    assert ttft == pytest.approx(1_599 * 0.1 + itl + 100 / 1000 * 200 * itl)


def choice(story: Story, prompt: int) -> str:
    found = choose(story.state, DispatchWanted(request="r", prompt_tokens=prompt, output_tokens_max=100), {}, 0)
    assert found is not None
    assert "first token after" in found.reason
    return found.owner.instance


def test_a_slow_engine_gets_less_than_a_fast_one_with_more_to_do() -> None:
    story = Story()
    story.say("admin", PolicyConfigured(policies=SLO, actor="test"))
    for name, line in (("slow", (30.0, 1.0)), ("fast", (10.0, 0.3))):
        story.instance(name)
        reports(story, name, line)
    story.load(owner("slow"), running=4, blocks_free=900, step_ms=34.0)
    story.load(owner("fast"), running=12, blocks_free=700, step_ms=14.0)
    assert choice(story, 500) == "fast"
    story.load(owner("fast"), running=12, waiting=40, blocks_free=0, blocks_head=50, blocks_waiting=2_000, step_ms=14.0)
    assert choice(story, 500) == "slow"
