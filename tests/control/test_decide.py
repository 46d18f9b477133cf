"""Decisions: verdicts, answers to people, drains, stuck moves, and the limits that no policy can get around."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.control.codec import encode_state
from midstream.control.commands import StartMigration
from midstream.control.decide import Decision, decide
from midstream.control.decide.rng import SplitMix
from midstream.control.decide.verdicts import STUCK_GRACE_MS
from midstream.control.errors import UnknownThing
from midstream.control.events import (
    CommandRefused,
    ConnectionLost,
    ConnectionRestored,
    DrainRequested,
    InstanceDrained,
    InstanceLost,
    InstanceRestored,
    InstanceStopped,
    InstanceSuspected,
    MigrationAborted,
    MigrationCommitted,
    MoveDecided,
    MoveRejected,
    MoveRequested,
    PolicyConfigured,
    RequestFinished,
)
from midstream.control.state import PolicyChoice, PolicySettings
from tests.control.fixtures import GATEWAY, Story, fingerprint, owner

A, B, C = owner("a"), owner("b"), owner("c")
QUIET = PolicySettings(moves=(PolicyChoice("none"),))
TTL = QUIET.decision_ttl_ms


def kinds(decision: Decision) -> list[str]:
    return [type(event).__name__ for event in decision.events]


def moves(decision: Decision) -> list[MoveDecided]:
    return [event for event in decision.events if isinstance(event, MoveDecided)]


def configure(story: Story, **changes: Any) -> None:
    policies = msgspec.structs.replace(story.state.policies, **changes)
    story.say("admin", PolicyConfigured(policies=policies, actor="test"))


def ask(story: Story, request: str, target: str | None, operation: str = "o", mode: str = "live") -> None:
    story.say("admin", MoveRequested(operation=operation, request=request, target=target, actor="ann", mode=mode))


def drain(story: Story, instance: str) -> None:
    story.say("admin", DrainRequested(operation=f"drain-{instance}", instance=instance, actor="ann"))


def commit(story: Story, decision: Decision) -> None:
    story.tick()
    story.control(*decision.events)


@pytest.fixture
def story() -> Story:
    """Three instances that report; one request on `a`; no policy moves."""
    told = Story()
    for name in ("a", "b", "c"):
        told.instance(name)
    configure(told, moves=QUIET.moves)
    told.tick()
    told.alive()
    told.running("r", A)
    return told


# --- health ---------------------------------------------------------------------------------------


def quiet_for(story: Story, ms: int, *, silent: str) -> None:
    """Ticks go by in which every instance but one reports."""
    for _ in range(ms // 500):
        story.tick(500)
        for name in ("a", "b", "c"):
            if name != silent:
                story.load(owner(name), blocks_free=1000)


def test_P25_a_missed_report_kills_nothing(story: Story) -> None:
    quiet_for(story, 2_000, silent="b")
    assert decide(story.state, story.next_tick()).events == ()


def test_P25_silence_makes_suspect_and_takes_a_witness_to_make_lost(story: Story) -> None:
    quiet_for(story, 3_000, silent="b")
    decision = decide(story.state, story.next_tick())
    assert [type(e) for e in decision.events] == [InstanceSuspected]
    commit(story, decision)
    quiet_for(story, 20_000, silent="b")
    assert decide(story.state, story.next_tick()).events == ()
    story.say(GATEWAY, ConnectionLost(gateway="g0", owner=B))
    lost = decide(story.state, story.next_tick()).events
    assert [type(e) for e in lost] == [InstanceLost]
    assert isinstance(lost[0], InstanceLost)
    assert lost[0].witnesses == ("g0",)


def test_P25_a_witness_alone_makes_nothing_lost(story: Story) -> None:
    story.say(GATEWAY, ConnectionLost(gateway="g0", owner=B))
    quiet_for(story, 10_000, silent="nobody")
    assert decide(story.state, story.next_tick()).events == ()


@pytest.mark.parametrize("verdict", ["suspect", "lost"])
def test_P25_reports_of_the_same_incarnation_restore(story: Story, verdict: str) -> None:
    event = InstanceSuspected(owner=B, silent_ms=1)
    story.control(event if verdict == "suspect" else InstanceLost(owner=B, silent_ms=1, witnesses=("g0",)))
    quiet_for(story, 1_000, silent="nobody")
    assert decide(story.state, story.next_tick()).events == (InstanceRestored(owner=B),)


def test_P25_a_lost_instance_whose_witnesses_withdraw_is_only_suspect(story: Story) -> None:
    story.say(GATEWAY, ConnectionLost(gateway="g0", owner=B))
    quiet_for(story, 7_000, silent="b")
    commit(story, decide(story.state, story.next_tick()))
    assert story.state.instances["b"].health == "lost"
    story.say(GATEWAY, ConnectionRestored(gateway="g0", owner=B))
    commit(story, decide(story.state, story.next_tick()))
    assert story.state.instances["b"].health == "suspect"
    assert decide(story.state, story.next_tick()).events == ()


def test_P25_nobody_is_suspect_because_no_controller_looked(story: Story) -> None:
    assert decide(story.state, story.next_tick(after_ms=600_000)).events == ()
    story.tick(600_000)
    assert decide(story.state, story.next_tick()).events == ()


def test_a_source_with_a_wrong_clock_is_as_alive_as_any(story: Story) -> None:
    for _ in range(20):
        story.tick(500)
        now, story.now_ms = story.now_ms, 5
        story.alive()
        story.now_ms = now
    assert decide(story.state, story.next_tick()).events == ()


# --- moves by hand --------------------------------------------------------------------------------


def test_P18_a_move_asked_for_is_one_fact_and_one_command(story: Story) -> None:
    ask(story, "r", "b")
    tick = story.next_tick()
    decision = decide(story.state, tick)
    (move,) = moves(decision)
    assert (move.request, move.epoch, move.source, move.target, move.operation) == ("r", 1, A, B, "o")
    assert move.policy == "manual"
    assert move.decided_at == story.state.position
    assert decision.commands == (
        StartMigration(
            id=f"{move.migration}/start", instance="a", incarnation=1, deadline_ms=tick.now_ms + TTL,
            migration=move.migration, request="r", epoch=1, target=B, target_address="mem:b",
        ),
    )  # fmt: skip
    commit(story, decision)
    assert decide(story.state, story.next_tick()) == Decision((), ())


def test_P18_the_mode_asked_for_is_in_the_decision_and_its_command(story: Story) -> None:
    ask(story, "r", "b", mode="recompute")
    decision = decide(story.state, story.next_tick())
    assert [move.mode for move in moves(decision)] == ["recompute"]
    assert [command.mode for command in decision.commands if isinstance(command, StartMigration)] == ["recompute"]
    commit(story, decision)
    assert [move.mode for move in story.state.migrations.values()] == ["recompute"]


def test_a_move_without_a_target_goes_to_the_freest(story: Story) -> None:
    story.load(B, running=10, blocks_free=100)
    story.load(C, running=10, blocks_free=900)
    ask(story, "r", None)
    (move,) = moves(decide(story.state, story.next_tick()))
    assert move.target == C
    assert [name for name, _ in move.candidates] == ["c", "b"]


def down(story: Story) -> None:
    story.control(InstanceSuspected(owner=B, silent_ms=9))


def full(story: Story) -> None:
    story.load(B, blocks_free=17, running=1)


def no_slots(story: Story) -> None:
    story.load(B, blocks_free=900, running=64)


def unmovable(story: Story) -> None:
    story.progress("r", 160, is_movable=False)


def moving(story: Story) -> None:
    ask(story, "r", "c", "first")
    commit(story, decide(story.state, story.next_tick()))


def other_geometry(story: Story) -> None:
    story.instance("b", incarnation=2, fingerprint=fingerprint(dtype="int8", tensor_parallel=2))


def ended(story: Story) -> None:
    story.say(GATEWAY, RequestFinished(
        request="r", epoch=1, owner=A, finish_reason="stop", output_tokens=1, ttft_ms=1, gap_ms_mean=1, gap_ms_max=1,
    ))  # fmt: skip


def source_down(story: Story) -> None:
    story.instance("a", incarnation=2)


def everything_full(story: Story) -> None:
    for me in (B, C):
        story.load(me, blocks_free=0, running=5)


REJECTIONS = [
    ("unknown_request", lambda s: None, "nobody", "b", "nobody"),
    ("unknown_request", ended, "r", "b", "ended"),
    ("unknown_instance", lambda s: None, "r", "nowhere", "nowhere"),
    ("same_instance", lambda s: None, "r", "a", "on a already"),
    ("target_draining", lambda s: drain(s, "b"), "r", "b", "b is draining"),
    ("target_full", full, "r", "b", "17 blocks"),
    ("target_full", no_slots, "r", "b", "0 slots"),
    ("target_full", everything_full, "r", None, "no instance"),
    ("target_down", down, "r", "b", "b is suspect"),
    ("target_down", lambda s: s.say("llumlet/b", InstanceStopped(owner=B)), "r", "b", "b is stopped"),
    ("already_moving", moving, "r", "b", "open move"),
    ("not_movable", unmovable, "r", "b", "cannot be moved"),
    ("different_fingerprint", other_geometry, "r", "b", "dtype, tensor_parallel"),
    ("source_down", source_down, "r", "b", "a#1"),
]


@pytest.mark.parametrize(("code", "prepare", "request_id", "target", "words"), REJECTIONS)
def test_a_move_that_cannot_be_is_rejected_with_a_code_and_nothing_done(
    story: Story, code: str, prepare: Any, request_id: str, target: str | None, words: str
) -> None:
    prepare(story)
    ask(story, request_id, target)
    decision = decide(story.state, story.next_tick())
    rejected = [event for event in decision.events if isinstance(event, MoveRejected)]
    assert [(event.operation, event.code) for event in rejected] == [("o", code)]
    assert words in rejected[0].reason
    assert decision.commands == ()


def test_the_same_move_asked_for_twice_in_one_tick_is_ordered_once(story: Story) -> None:
    ask(story, "r", "b", "o1")
    ask(story, "r", "c", "o2")
    decision = decide(story.state, story.next_tick())
    assert kinds(decision) == ["MoveDecided", "MoveRejected"]
    assert len(decision.commands) == 1


def test_P24_two_moves_by_hand_do_not_share_the_same_last_blocks(story: Story) -> None:
    story.running("s", A)
    story.load(B, blocks_free=20, running=1)
    ask(story, "r", "b", "o1")
    ask(story, "s", "b", "o2")
    decision = decide(story.state, story.next_tick())
    assert kinds(decision) == ["MoveDecided", "MoveRejected"]


def test_a_move_by_hand_waits_while_its_instance_takes_part_in_as_many_as_it_may(story: Story) -> None:
    configure(story, moves_per_instance_max=1)
    story.running("s", A)
    ask(story, "r", "b", "o1")
    ask(story, "s", "c", "o2")
    first = decide(story.state, story.next_tick())
    assert kinds(first) == ["MoveDecided"]
    commit(story, first)
    assert decide(story.state, story.next_tick()).events == ()
    (move,) = moves(first)
    story.say(GATEWAY, MigrationCommitted(migration=move.migration, request="r", epoch=1, owner=B, tail_tokens=0))
    assert [m.request for m in moves(decide(story.state, story.next_tick()))] == ["s"]


def test_a_move_without_a_target_waits_while_every_target_takes_part_in_as_many_as_it_may(story: Story) -> None:
    configure(story, moves_per_instance_max=1)
    story.running("s", C)
    ask(story, "s", "b", "o1")
    first = decide(story.state, story.next_tick())
    commit(story, first)
    ask(story, "r", None, "o2")
    assert decide(story.state, story.next_tick()).events == ()
    (move,) = moves(first)
    story.say(GATEWAY, MigrationCommitted(migration=move.migration, request="s", epoch=1, owner=B, tail_tokens=0))
    assert [m.request for m in moves(decide(story.state, story.next_tick()))] == ["r"]


# --- drains ---------------------------------------------------------------------------------------


def test_P16_drained_is_said_only_when_nothing_is_left(story: Story) -> None:
    drain(story, "a")
    assert decide(story.state, story.next_tick()).events == ()
    ended(story)
    story.load(A, running=1, blocks_free=900)
    assert decide(story.state, story.next_tick()).events == ()
    story.load(A, blocks_reserved=3, blocks_free=900)
    assert decide(story.state, story.next_tick()).events == ()
    story.load(A, blocks_free=1000)
    decision = decide(story.state, story.next_tick())
    assert decision.events == (InstanceDrained(owner=A),)
    commit(story, decision)
    assert decide(story.state, story.next_tick()).events == ()


def test_P16_a_move_on_its_way_in_keeps_an_instance_from_being_drained(story: Story) -> None:
    ask(story, "r", "b")
    commit(story, decide(story.state, story.next_tick()))
    drain(story, "b")
    assert decide(story.state, story.next_tick()).events == ()


def test_P16_a_drain_moves_everything_running_and_waiting_and_spreads_it(story: Story) -> None:
    configure(story, moves=(PolicyChoice("drain"),), moves_per_instance_max=100, moves_per_tick_max=100)
    for index in range(9):
        story.running(f"r{index}", A)
    for index in range(10):
        story.dispatch(f"w{index}", A)
    drain(story, "a")
    decision = decide(story.state, story.next_tick())
    assert len(moves(decision)) == 20
    targets = [move.target.instance for move in moves(decision)]
    assert abs(targets.count("b") - targets.count("c")) <= 2
    assert {move.policy for move in moves(decision)} == {"drain"}


# --- stuck moves ----------------------------------------------------------------------------------


def stuck_codes(story: Story) -> list[str]:
    decision = decide(story.state, story.next_tick())
    return [event.code for event in decision.events if isinstance(event, MigrationAborted)]


@pytest.mark.parametrize(
    ("happened", "code"),
    [
        (lambda s: s.instance("a", incarnation=2), "source_lost"),
        (lambda s: s.say("llumlet/a", InstanceStopped(owner=A)), "source_lost"),
        (lambda s: s.instance("c", incarnation=2), "target_lost"),
        (lambda s: s.control(InstanceLost(owner=C, silent_ms=1, witnesses=("g0",))), "target_lost"),
        (ended, "request_ended"),
    ],
)
def test_P13_a_move_that_lost_a_side_is_closed_after_a_grace(story: Story, happened: Any, code: str) -> None:
    moving(story)
    happened(story)
    for _ in range(TTL // 500):
        assert stuck_codes(story) == []
        story.tick(500)
    assert stuck_codes(story) == [code]


def test_P13_a_move_of_which_nobody_says_anything_is_closed_in_the_end(story: Story) -> None:
    moving(story)
    for _ in range((TTL + STUCK_GRACE_MS) // 500):
        assert stuck_codes(story) == []
        story.tick(500)
        story.alive()
    assert stuck_codes(story) == ["no_answer"]


# --- limits ---------------------------------------------------------------------------------------


def test_P23_a_request_rests_after_a_move_and_does_not_come_straight_back(story: Story) -> None:
    configure(story, moves=(PolicyChoice("balance", {"request": "longest"}),), cooldown_ms=2_000)
    story.say(GATEWAY, MigrationCommitted(migration="m", request="r", epoch=1, owner=B, tail_tokens=0))
    story.progress("r", 1600)
    story.running("s", B, tokens=16)
    moved_at = story.state.last_tick_ms
    decided: list[tuple[int, str]] = []
    for _ in range(24):
        story.load(B, running=2, blocks_free=4)
        story.load(A, running=1, blocks_free=900)
        story.load(C, running=64, blocks_free=900)
        tick = story.next_tick()
        decided += [(tick.now_ms - moved_at, m.target.instance) for m in moves(decide(story.state, tick))
                    if m.request == "r"]  # fmt: skip
        story.tick()
    assert decided
    assert min(at for at, _ in decided) >= 2 * 2_000
    assert {target for _, target in decided} == {"a"}


@pytest.mark.parametrize("end", ["aborted", "refused"])
def test_P23_a_request_whose_move_came_to_nothing_rests_too(story: Story, end: str) -> None:
    configure(story, moves=(PolicyChoice("drain"),))
    migration = decide_move(story)
    drain(story, "a")
    story.say(
        "llumlet/a",
        MigrationAborted(migration=migration, request="r", stage="started", code="no_blocks", reason="full")
        if end == "aborted"
        else CommandRefused(migration=migration, owner=A, code="stale", reason="late"),
    )
    decided = []
    for _ in range(12):
        decision = decide(story.state, story.next_tick())
        decided.append(bool(moves(decision)))
        story.tick()
        story.alive()
    assert decided.index(True) == 7, "the cool-down is 2,000 ms, a tick 250 ms"


def test_P23_moves_per_tick_and_per_instance_are_bounded(story: Story) -> None:
    for index in range(30):
        story.running(f"r{index}", A)
    drain(story, "a")
    for per_tick, per_instance in ((5, 9), (9, 5)):
        configure(
            story,
            moves=(PolicyChoice("drain"),),
            moves_per_tick_max=per_tick,
            moves_per_instance_max=per_instance,
        )
        assert len(moves(decide(story.state, story.next_tick()))) == 5


def test_P26_a_policy_never_pairs_what_cannot_exchange_kv(story: Story) -> None:
    configure(story, moves=(PolicyChoice("drain"),))
    other_geometry(story)
    story.say("llumlet/a", MigrationAborted(migration="x", request="r", stage="copying", code="x", reason="x"))
    drain(story, "a")
    assert [m.target for m in moves(decide(story.state, story.next_tick()))] == [C]


def test_P26_an_excluded_pair_is_left_alone_until_its_time_is_up(story: Story) -> None:
    configure(story, moves=(PolicyChoice("drain"),), pair_backoff_ms=4_000)
    story.load(C, blocks_free=0, running=64)
    moving_to_b = decide_move(story)
    failed = MigrationAborted(migration=moving_to_b, request="r", stage="started", code="no_transfer", reason="refused")
    story.say("llumlet/a", failed)
    drain(story, "a")
    assert moves(decide(story.state, story.next_tick())) == []
    for _ in range(16):
        story.tick()
        story.alive()
    assert [m.target for m in moves(decide(story.state, story.next_tick()))] == [B]


def decide_move(story: Story) -> str:
    ask(story, "r", "b")
    decision = decide(story.state, story.next_tick())
    commit(story, decision)
    return moves(decision)[0].migration


# --- determinism ----------------------------------------------------------------------------------


def crowd(sizes: list[int], frees: list[int], draining: list[bool]) -> Story:
    told = Story()
    owners = [told.instance(f"i{index}", blocks=400) for index in range(len(sizes))]
    told.tick()
    for me, size, free, is_draining in zip(owners, sizes, frees, draining, strict=True):
        for index in range(size):
            told.running(f"{me.instance}-{index}", me, tokens=16 * (index + 1))
        told.load(me, running=size, blocks_free=free)
        if is_draining:
            drain(told, me.instance)
    return told


CROWDS = st.integers(2, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 12), min_size=n, max_size=n),
        st.lists(st.integers(0, 300), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
    )
)


@settings(deadline=None)
@given(CROWDS, st.integers(0, 2**63))
def test_P17_P24_any_decision_is_pure_and_within_every_limit(
    crowded: tuple[list[int], list[int], list[bool]], seed: int
) -> None:
    told = crowd(*crowded)
    before = encode_state(told.state)
    decision = decide(told.state, told.next_tick(seed=seed))
    assert encode_state(told.state) == before
    assert decide(told.state, told.next_tick(seed=seed)) == decision
    ordered = moves(decision)
    assert [c.migration for c in decision.commands if isinstance(c, StartMigration)] == [m.migration for m in ordered]
    assert len({m.request for m in ordered}) == len(ordered) <= told.state.policies.moves_per_tick_max
    for name, view in told.state.instances.items():
        assert sum(name in (m.source.instance, m.target.instance) for m in ordered) <= 4
        arriving = [m for m in ordered if m.target.instance == name]
        assert sum(m.blocks_needed for m in arriving) <= max(0, view.load.blocks_free)
        assert all(m.source != view.owner and not view.is_draining for m in arriving)


def test_P17_a_decision_is_the_same_in_every_process() -> None:
    program = (
        "from tests.control.test_decide import crowd, decide;"
        "told = crowd([12, 10, 0, 3, 0], [0, 5, 400, 100, 300], [False, False, False, True, False]);"
        "print(decide(told.state, told.next_tick()))"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(answers) == 1
    assert b"MoveDecided" in answers.pop()


def test_unknown_policies_are_an_error_and_not_silently_skipped(story: Story) -> None:
    configure(story, moves=(PolicyChoice("astrology"),))
    with pytest.raises(UnknownThing, match="known: balance, "):
        decide(story.state, story.next_tick())


def test_the_ticks_randomness_is_a_function_of_its_seed() -> None:
    first, again, other = SplitMix(3), SplitMix(3), SplitMix(4)
    drawn = [first.random() for _ in range(1000)]
    assert drawn == [again.random() for _ in range(1000)]
    assert drawn[:5] != [other.random() for _ in range(5)]
    assert all(0 <= x < 1 for x in drawn)
    assert 0.45 < sum(drawn) / 1000 < 0.55
