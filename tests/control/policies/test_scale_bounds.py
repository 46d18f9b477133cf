"""That the bounds hold: through restarts, late starts and pauses, and for each model and what it needs."""

from __future__ import annotations

import pytest

from midstream.control.events import (
    DrainRequested,
    InstanceDrained,
    InstanceStopped,
    ScaleDecided,
    WaitingReported,
)
from midstream.control.policies.scale_bounds import who_may_go
from tests.control.fixtures import GATEWAY, Story, fingerprint, owner
from tests.control.policies.test_scale import CROWDED, EASY, PARAMS, Cluster

BOOT_S = int(PARAMS["boot_ms"]) // 1_000


def actions(made: list[ScaleDecided]) -> list[str]:
    return [event.action for event in made]


def two_of_two() -> Cluster:
    cluster = Cluster(2, instances_min=2, instances_max=2)
    assert cluster.seconds(10, **EASY) == []
    return cluster


def stop(cluster: Cluster, name: str) -> None:
    cluster.say(f"llumlet/{name}", InstanceStopped(owner=cluster.state.instances[name].owner))


@pytest.mark.parametrize("load", [EASY, CROWDED])
def test_P23_an_instance_that_restarts_is_not_replaced(load: dict[str, int]) -> None:
    cluster = two_of_two()
    stop(cluster, "i1")
    assert cluster.seconds(BOOT_S - 2, **load) == []
    cluster.instance("i1", incarnation=2, blocks=1_000)
    assert cluster.seconds(60, **load) == []


def test_one_that_does_not_come_back_is_made_up_for() -> None:
    cluster = two_of_two()
    stop(cluster, "i1")
    made = cluster.seconds(BOOT_S + 3, **EASY)
    assert actions(made) == ["add"]
    cluster.instance(made[0].instance, blocks=1_000)
    cluster.instance("i1", incarnation=2, blocks=1_000)
    (late,) = cluster.seconds(20, running=20, used=500)
    assert (late.action, late.reason) == ("remove", "3 are there, of at most 2"), "back after all, and busy"
    cluster.control(InstanceDrained(owner=cluster.state.instances[late.instance].owner))
    stop(cluster, late.instance)
    assert cluster.seconds(300, running=20, used=500) == []


def test_those_that_register_late_are_waited_for() -> None:
    cluster = Cluster(0, instances_min=2, instances_max=2)
    cluster.say(GATEWAY, WaitingReported(gateway="g0", requests=9, tokens=900))
    assert cluster.seconds(BOOT_S - 2, **EASY) == []
    cluster.instance("i0", blocks=1_000)
    assert actions(cluster.seconds(4, **EASY)) == ["add"], "but not for longer than a start takes"


def test_a_cluster_that_is_stopped_decides_nothing_nor_when_it_starts_again() -> None:
    cluster = two_of_two()
    cluster.seconds(3, **CROWDED)
    for name in ("i0", "i1"):
        stop(cluster, name)
        assert cluster.seconds(1, **EASY) == []
    cluster.tick(3_600_000)
    assert cluster.seconds(3, **EASY) == []
    for name in ("i0", "i1"):
        cluster.instance(name, incarnation=2, blocks=1_000)
    assert cluster.seconds(60, **EASY) == []


def test_what_was_seen_before_a_pause_decides_nothing() -> None:
    cluster = Cluster(2)
    assert cluster.seconds(9, **EASY) == [], "an easy time, nearly long enough that one goes"
    cluster.tick(3_600_000)
    assert cluster.seconds(9, **EASY) == []
    assert actions(cluster.seconds(4, **EASY)) == ["remove"]
    cluster = Cluster(1)
    assert cluster.seconds(2, **CROWDED) == []
    cluster.tick(3_600_000)
    assert cluster.seconds(10, running=0, used=0) == [], "it was crowded an hour ago"


def test_the_time_of_a_start_is_not_learned_through_a_pause() -> None:
    cluster = Cluster(1)
    (made, *_) = cluster.seconds(4, **CROWDED)
    cluster.tick(600_000)
    assert cluster.seconds(1, **EASY) == []
    cluster.instance(made.instance, blocks=1_000)
    assert (cluster.state.scalings[made.scaling].status, cluster.state.boot_ms) == ("done", 0)


def test_too_many_are_brought_down_to_the_most_once_that_lasts() -> None:
    cluster = Cluster(4, instances_min=1, instances_max=2)
    assert cluster.seconds(2, **CROWDED) == []
    made = cluster.seconds(2, **CROWDED)
    assert [(event.action, event.instance) for event in made] == [("remove", "i3"), ("remove", "i2")]
    assert cluster.seconds(10, **CROWDED) == []


def test_one_that_an_operator_drains_counts_until_it_has_been_gone_for_long() -> None:
    cluster = two_of_two()
    cluster.say("admin", DrainRequested(operation="o", instance="i1", actor="ann"))
    assert cluster.seconds(60, **EASY) == []
    stop(cluster, "i1")
    assert cluster.seconds(BOOT_S - 2, **EASY) == []
    assert actions(cluster.seconds(4, **EASY)) == ["add"]


def test_one_that_was_removed_does_not_count_as_if_it_came_back() -> None:
    cluster = Cluster(2, instances_max=2)
    (removed,) = cluster.seconds(13, **EASY)
    cluster.control(InstanceDrained(owner=owner(removed.instance)))
    stop(cluster, removed.instance)
    assert actions(cluster.seconds(4, **CROWDED)) == ["add"]


ROLES = [
    ("d0 decode m, d1 decode m, p0 prefill m", ["d0"]),
    ("m0 mixed m, d0 decode m, p0 prefill m", ["m0"]),
    ("d0 decode m, m0 mixed m, p0 prefill m", ["d0", "p0"]),
    ("a0 mixed m, a1 mixed m, b0 mixed small", ["a0"]),
    ("b0 mixed small, a0 prefill m, a1 decode m", []),
    ("p0 prefill m, p1 prefill m", ["p0"]),
]


@pytest.mark.parametrize(("there", "gone"), ROLES)
def test_a_model_keeps_who_computes_its_prompts_and_who_makes_its_tokens(there: str, gone: list[str]) -> None:
    story = Story()
    for line in there.split(", "):
        name, role, model = line.split()
        story.instance(name, role=role, fingerprint=fingerprint(model=model))
    assert [view.owner.instance for view in who_may_go(list(story.state.instances.values()))] == gone


def test_the_only_one_for_prompts_stays_however_idle() -> None:
    cluster = Cluster(0)
    for name, role in (("d0", "decode"), ("d1", "decode"), ("p0", "prefill")):
        cluster.now_ms += 1
        cluster.instance(name, blocks=1_000, role=role)
    removed = []
    for _ in range(4):
        for event in cluster.seconds(30, running=0, used=0):
            removed.append(event.instance)
            cluster.control(InstanceDrained(owner=owner(event.instance)))
            stop(cluster, event.instance)
    assert removed == ["d1"]
