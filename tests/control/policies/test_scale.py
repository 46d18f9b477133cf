"""How many instances there should be: when some come, when one goes, and that it is never back and forth."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.control.decide import decide
from midstream.control.errors import BadInput
from midstream.control.events import (
    DrainCancelled,
    InstanceDrained,
    InstanceStopped,
    PolicyConfigured,
    ScaleDecided,
    ScaleEnded,
    ScaleFailed,
    WaitingReported,
)
from midstream.control.policies import scale_policy
from midstream.control.state import PolicyChoice, PolicySettings
from tests.control.fixtures import GATEWAY, Story, owner

PARAMS = {
    "instances_min": 1, "instances_max": 4, "low": 10.0, "high": 40.0, "out_after_ms": 2_000, "in_after_ms": 10_000,
    "boot_ms": 5_000, "trend_ms": 5_000,
}  # fmt: skip


class Cluster(Story):
    """A cluster whose controller decides at every tick."""

    def __init__(self, count: int, **params: Any) -> None:
        super().__init__()
        choice = PolicyChoice("scale_freeness", {**PARAMS, **params})
        self.say("admin", PolicyConfigured(policies=PolicySettings(scale=choice), actor="test"))
        for index in range(count):
            self.now_ms += 1
            self.instance(f"i{index}", blocks=1_000)

    def each(self, running: int, used: int, waiting: int = 0) -> None:
        """Every healthy instance reports the same load."""
        for view in tuple(self.state.instances.values()):
            if view.health == "up" and not view.is_draining:
                self.load(view.owner, running=running, blocks_free=1_000 - used, waiting=waiting)
            elif view.health == "up":
                self.load(view.owner, blocks_free=1_000)

    def seconds(self, count: int, **load: int) -> list[ScaleDecided]:
        """So many seconds under a load; what was decided."""
        made: list[ScaleDecided] = []
        for _ in range(count):
            self.each(**load)
            tick = self.next_tick(1_000)
            events = decide(self.state, tick).events
            self.now_ms += 1_000
            self.control(tick, *events)
            made += (event for event in events if isinstance(event, ScaleDecided))
        return made


CROWDED = {"running": 50, "used": 950}
EASY = {"running": 5, "used": 50}


def test_some_come_only_when_freeness_stays_low() -> None:
    cluster = Cluster(2)
    assert cluster.seconds(3, **EASY) == []
    assert cluster.seconds(1, **CROWDED) == []
    made = cluster.seconds(4, **CROWDED)
    assert made[0].action == "add" and made[0].freeness < 10
    assert len(made) == 2, "as many as it takes to get between the bounds, and no more while those start"


def test_what_starts_counts_as_there_and_is_done_when_it_is() -> None:
    cluster = Cluster(1)
    (made,) = cluster.seconds(6, running=50, used=700)
    view = cluster.state.scalings[made.scaling]
    assert (view.status, made.instance) == ("open", f"auto-{made.decided_at}-0")
    cluster.now_ms += 3_000
    cluster.tick()
    cluster.instance(made.instance, blocks=1_000)
    assert cluster.state.scalings[made.scaling].status == "done"
    assert cluster.state.boot_ms >= 3_000


def test_the_trend_brings_one_before_it_is_needed() -> None:
    def first(slope: int) -> int | None:
        cluster = Cluster(1)
        for second in range(30):
            if cluster.seconds(1, running=20, used=100 + slope * second):
                return second
        return None

    assert first(0) is None
    second = first(30)
    assert second is not None
    assert 100 + 30 * second < 800, "freeness is still over low when it is decided"


def test_a_queue_counts_also_at_the_gateway_and_while_blocks_are_free() -> None:
    cluster = Cluster(1)
    cluster.say(GATEWAY, WaitingReported(gateway="g0", requests=9, tokens=900))
    assert [event.action for event in cluster.seconds(4, **EASY)] == ["add"]


def test_one_goes_after_long_and_it_is_drained_first() -> None:
    cluster = Cluster(3, step_max=1)
    assert cluster.seconds(10, **EASY) == []
    (made,) = cluster.seconds(3, **EASY)
    assert (made.action, made.instance) == ("remove", "i2")
    assert cluster.state.instances["i2"].is_draining
    cluster.control(InstanceDrained(owner=owner("i2")))
    assert cluster.state.scalings[made.scaling].status == "open"
    cluster.say("llumlet/i2", InstanceStopped(owner=owner("i2")))
    assert cluster.state.scalings[made.scaling].status == "done"


def test_as_many_go_at_once_as_are_not_needed() -> None:
    cluster = Cluster(4)
    made = cluster.seconds(13, running=8, used=200)
    assert [(event.action, event.instance) for event in made] == [("remove", "i3"), ("remove", "i2")]
    assert made[0].freeness > made[1].freeness / 2 > 10
    assert cluster.seconds(20, running=16, used=400) == [], "the two that stay have as much as they need"


def test_a_load_that_varies_keeps_more_than_a_steady_one_with_the_same_mean() -> None:
    def removed(*used: int) -> int:
        cluster = Cluster(2, in_after_ms=30_000)
        return sum(len(cluster.seconds(1, running=8, used=used[second % 2])) for second in range(40))

    assert removed(300, 300) == 1
    assert removed(100, 500) == 0


def test_a_slope_that_may_be_noise_brings_nobody() -> None:
    """One sample out of line tilts it, but says nothing about where the load is going."""
    cluster = Cluster(1, trend_ms=20_000, boot_ms=60_000)
    made = [event for second in range(40) for event in cluster.seconds(1, running=9, used=300 + 150 * (second == 38))]
    assert made == []


def test_one_goes_after_longer_than_samples_are_kept() -> None:
    cluster = Cluster(2, in_after_ms=700_000)
    assert [event.action for event in cluster.seconds(720, **EASY)] == ["remove"]


def test_P23_none_goes_if_it_would_be_called_back() -> None:
    """Freeness is 60, over `high`; with one of the two less it would be 10, under low x margin."""
    cluster = Cluster(2)
    assert cluster.seconds(40, running=10, used=400) == []
    assert Cluster(2, margin=1.0).seconds(40, running=9, used=400) != [], "the bound decides"


@pytest.mark.parametrize("busy_at", [5, 15, 25])
def test_P23_a_few_busy_seconds_within_the_time_keep_all(busy_at: int) -> None:
    cluster = Cluster(2, in_after_ms=30_000, trend_ms=20_000)
    made = cluster.seconds(busy_at, **EASY)
    made += cluster.seconds(3, running=10, used=500)
    made += cluster.seconds(28 - busy_at, **EASY)
    assert made == []


def test_one_that_was_to_go_stays_when_load_returns() -> None:
    cluster = Cluster(2)
    (removed,) = cluster.seconds(14, **EASY)
    assert removed.action == "remove"
    cluster.dispatch("r", owner(removed.instance))
    made = cluster.seconds(3, running=50, used=950)
    assert [(event.action, event.instance) for event in made[:1]] == [("keep", removed.instance)]
    assert not cluster.state.instances[removed.instance].is_draining
    assert cluster.state.scalings[removed.scaling].status == "cancelled"


def test_bounds_hold() -> None:
    assert len(Cluster(1, instances_max=3, step_max=9).seconds(9, running=60, used=1_000, waiting=40)) == 2
    assert Cluster(1).seconds(40, **EASY) == []
    cluster = Cluster(1, instances_min=3)
    assert cluster.seconds(4, **EASY) == [], "others may be starting by themselves"
    assert [event.action for event in cluster.seconds(4, **EASY)] == ["add", "add"]


def test_a_dry_run_says_and_does_nothing() -> None:
    cluster = Cluster(1, is_dry_run=True)
    made = cluster.seconds(4, **CROWDED)
    assert made and all(event.is_dry_run for event in made)
    assert {view.status for view in cluster.state.scalings.values()} == {"dry_run"}
    cluster = Cluster(3, is_dry_run=True)
    (made_one, *_) = cluster.seconds(13, **EASY)
    assert made_one.action == "remove" and not cluster.state.instances[made_one.instance].is_draining


def test_a_failed_start_is_not_tried_again_at_once() -> None:
    cluster = Cluster(1, retry_ms=20_000, step_max=1)
    (made,) = cluster.seconds(4, **CROWDED)
    cluster.say("scaler/s", ScaleFailed(scaling=made.scaling, code="scaler_failed", reason="no quota"))
    assert cluster.state.scalings[made.scaling].detail == "no quota"
    assert cluster.seconds(10, **CROWDED) == []
    assert len(cluster.seconds(12, **CROWDED)) == 1


def test_what_never_comes_or_goes_ends_and_serves_again() -> None:
    cluster = Cluster(2)
    (removed,) = cluster.seconds(14, **EASY)
    cluster.each(**EASY)
    cluster.tick(900_000)
    tick = cluster.next_tick()
    ended = [event for event in decide(cluster.state, tick).events if isinstance(event, ScaleEnded)]
    assert [(event.scaling, event.code) for event in ended] == [(removed.scaling, "still_there")]
    cluster.control(*ended)
    assert not cluster.state.instances[removed.instance].is_draining


def test_an_operator_overrules_a_removal() -> None:
    cluster = Cluster(2)
    (removed,) = cluster.seconds(14, **EASY)
    cluster.say("admin", DrainCancelled(operation="o", instance=removed.instance, actor="ann"))
    assert cluster.state.scalings[removed.scaling].status == "cancelled"
    assert not cluster.state.instances[removed.instance].is_draining


@pytest.mark.parametrize("params", [{"low": 50.0}, {"instances_min": 0}, {"instances_min": 9}, {"lo": 1}])
def test_P29_bad_parameters_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        scale_policy("scale_freeness").params(params)


def test_without_a_policy_nothing_is_said() -> None:
    story = Story()
    story.load(story.instance("a", blocks=10), running=5, blocks_free=0)
    assert decide(story.state, story.next_tick()).events == ()
