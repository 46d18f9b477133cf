"""The limits of every move, seen by a policy that has none of its own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from midstream.control.decide import decide
from midstream.control.events import (
    DrainRequested,
    MigrationAborted,
    MigrationCommitted,
    MoveDecided,
    MoveRejected,
    MoveRequested,
    PolicyConfigured,
)
from midstream.control.policies import MOVES
from midstream.control.policies.base import Proposal
from midstream.control.policies.room import Problem, Room
from midstream.control.state import PolicyChoice, PolicySettings
from tests.control.fixtures import GATEWAY, Story, fingerprint, owner
from tests.control.policies.scenes import scene


class Seen:
    """A watch that keeps all."""

    def __init__(self) -> None:
        self.moves: list[tuple[str, str]] = []
        self.no: dict[tuple[str, str], str] = {}

    def ordered(self, move: MoveDecided, room: Room) -> None:
        self.moves.append((move.request, move.target.instance))

    def refused(self, proposal: Proposal, policy: str, problem: Problem) -> None:
        self.no.setdefault((proposal.request, proposal.target), problem[0])


@pytest.fixture(autouse=True)
def _greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOVES, "greedy", "tests.control.policies.moves_greedy")


def watch(story: Story, **settings: Any) -> Seen:
    fields: dict[str, Any] = {"moves_per_tick_max": 100, "moves_per_instance_max": 100} | settings
    policies = PolicySettings(moves=(PolicyChoice("greedy"),), **fields)
    story.say("admin", PolicyConfigured(policies=policies, actor="test"))
    seen = Seen()
    decision = decide(story.state, story.next_tick(), seen)
    assert decision == decide(story.state, story.next_tick()), "looking on changes nothing"
    return seen


def test_P24_blocks_and_slots_are_given_once() -> None:
    story = scene(1000, a=([200, 200, 200], []), b=([550], []))
    seen = watch(story)
    assert seen.moves[:2] == [("a0", "b"), ("a1", "b")]
    assert seen.no[("a2", "b")] == "target_full"
    full = watch(scene(1000, a=([1] * 2, []), b=([1] * 63, [])))
    assert Counter(target for _, target in full.moves)["b"] == 1


def test_P23_bounded_by_tick_and_by_instance() -> None:
    story = scene(1000, a=([10] * 9, []), b=([10], []), c=([10], []))
    assert len(watch(story, moves_per_tick_max=2).moves) == 2
    seen = watch(story, moves_per_instance_max=3)
    parts = Counter(name for request, target in seen.moves for name in (request[0], target))
    assert max(parts.values()) == 3
    assert set(seen.no.values()) >= {"source_busy", "target_busy"}


def test_P26_where_kv_cannot_go_nothing_goes() -> None:
    story = scene(1000, a=([10], []))
    story.instance("z", fingerprint=fingerprint(dtype="bfloat16"))
    story.instance("d")
    story.say("admin", DrainRequested(operation="o", instance="d", actor="ann"))
    seen = watch(story)
    assert seen.moves == []
    assert seen.no == {
        ("a0", "a"): "same_instance", ("a0", "z"): "different_fingerprint", ("a0", "d"): "target_draining",
        ("nobody", "nowhere"): "unknown",
    }  # fmt: skip


def test_what_cannot_be_moved_or_moves_already_stays() -> None:
    story = scene(1000, a=([10, 10], []), b=([10], []))
    story.progress("a1", 160, is_movable=False)
    seen = watch(story)
    assert seen.no[("a1", "b")] == "not_movable"
    assert ("a0", "b") in seen.moves
    assert seen.no[("b0", "b")] == "already_moving", "it was just sent to a"


def test_P23_a_request_rests_and_does_not_come_straight_back() -> None:
    story = scene(1000, a=([10], []), b=([10], []))
    committed = MigrationCommitted(migration="m", request="a0", epoch=1, owner=owner("b"), tail_tokens=0)
    story.say(GATEWAY, committed)
    assert watch(story).no[("a0", "a")] == "cooling_down"
    for _ in range(9):
        story.tick()
        story.alive()
    assert watch(story).no[("a0", "a")] == "ping_pong"
    for _ in range(8):
        story.tick()
        story.alive()
    assert ("a0", "a") in watch(story).moves


def test_P26_a_pair_that_could_not_connect_is_left_alone_and_only_that() -> None:
    story = scene(1000, a=([10], []), b=([], []), c=([], []))
    seen = watch(story)
    assert seen.moves == [("a0", "b")]
    decision = decide(story.state, story.next_tick())
    story.tick()
    story.control(*decision.events)
    (move,) = [event for event in decision.events if isinstance(event, MoveDecided)]
    failed = MigrationAborted(
        migration=move.migration, request="a0", stage="started", code="no_transfer", reason="refused"
    )
    story.say("llumlet/a", failed)
    seen = watch(story, cooldown_ms=0)
    assert seen.no[("a0", "b")] == "pair_excluded"
    assert seen.moves == [("a0", "c")]


def test_a_request_goes_only_where_it_can_also_end() -> None:
    story = scene(1000, a=([10], []))
    story.load(story.instance("tiny", blocks=40), blocks_free=40)
    assert watch(story).no[("a0", "tiny")] == "too_small", "it may grow to 1,160 tokens"
    story.say("admin", MoveRequested(operation="o", request="a0", target="tiny", actor="ann"))
    story.say("admin", MoveRequested(operation="p", request="a0", target=None, actor="ann"))
    story.say("admin", PolicyConfigured(policies=PolicySettings(moves=()), actor="test"))
    rejected = decide(story.state, story.next_tick()).events
    assert [(e.operation, e.code) for e in rejected if isinstance(e, MoveRejected)] == [
        ("o", "too_small"), ("p", "no_target"),
    ]  # fmt: skip


def test_silence_found_in_this_very_tick_counts() -> None:
    story = scene(1000, a=([10], []), b=([10], []))
    for _ in range(14):
        story.tick()
        story.load(owner("a"), running=1, blocks_free=990)
    seen = watch(story)
    assert (seen.moves, seen.no[("a0", "b")], seen.no[("b0", "a")]) == ([], "target_down", "source_down")
