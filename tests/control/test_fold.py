"""The fold: every kind of fact, each once, whatever is repeated, old, late or missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.control import codec
from midstream.control.codec import UnknownEvent, decode_fact, digest, encode_fact, encode_state
from midstream.control.events import (
    EVENTS,
    CommandRefused,
    ConnectionLost,
    ConnectionRestored,
    DowntimeMeasured,
    DrainCancelled,
    DrainRequested,
    Entry,
    Fact,
    GenerationOpened,
    InstanceDrained,
    InstanceLost,
    InstanceStopped,
    InstanceSuspected,
    LoadReported,
    MigrationAborted,
    MigrationAdopted,
    MigrationCommitted,
    MigrationReclaimed,
    MigrationReleased,
    MigrationStarted,
    MoveDecided,
    MoveRejected,
    MoveRequested,
    RequestCancelled,
    RequestFinished,
    RequestsReported,
    RoundCopied,
    StateCarried,
    TickElapsed,
)
from midstream.control.fold import HANDLERS, NO_EFFECT, apply, fold
from midstream.control.fold.instances import INSTANCES_GONE_MAX
from midstream.control.ids import COMMIT_SOURCE, START, Owner, Position
from midstream.control.state import CLOSED_MAX, Load, RequestLoad, SourceMark, State
from tests.control.fixtures import GATEWAY, Story, owner

GOLDEN = Path(__file__).parent / "golden" / "facts.jsonl"
GOLDEN_FACTS = [decode_fact(line) for line in GOLDEN.read_bytes().splitlines()]
A, B = owner("a"), owner("b")


def decided(migration: str, request: str, *, epoch: int = 1, operation: str | None = None) -> MoveDecided:
    return MoveDecided(
        migration=migration,
        request=request,
        epoch=epoch,
        source=A,
        target=B,
        policy="balance",
        policy_version=1,
        params={},
        candidates=(("b", 1.0),),
        reason="test",
        decided_at=Position(1, 1),
        blocks_needed=7,
        operation=operation,
    )


def committed(migration: str, request: str, epoch: int = 1, to: Owner = B) -> MigrationCommitted:
    return MigrationCommitted(migration=migration, request=request, epoch=epoch, owner=to, tail_tokens=0)


def aborted(migration: str, request: str, code: str = "gone") -> MigrationAborted:
    return MigrationAborted(migration=migration, request=request, stage="copying", code=code, reason="why not")


def finished(request: str, epoch: int = 1) -> RequestFinished:
    return RequestFinished(
        request=request, epoch=epoch, owner=A, finish_reason="stop", output_tokens=1, ttft_ms=1, gap_ms_mean=1,
        gap_ms_max=1,
    )  # fmt: skip


@pytest.fixture
def pair() -> Story:
    """Two instances, one request that runs on `a`."""
    story = Story()
    story.instance("a")
    story.instance("b")
    story.tick()
    story.running("r", A)
    return story


# --- every fact, once -----------------------------------------------------------------------------


def test_every_kind_of_fact_has_an_effect_or_is_listed_as_having_none() -> None:
    assert set(HANDLERS) | NO_EFFECT == set(EVENTS.values())
    assert not set(HANDLERS) & NO_EFFECT


def test_the_position_always_moves_on_and_a_seen_fact_changes_nothing_else(pair: Story) -> None:
    before = encode_state(pair.state)
    again = Entry(Position(1, len(pair.entries)), pair.entries[-1].fact)
    assert apply(pair.state, again) is False
    assert pair.state.position == again.position
    pair.state.position = pair.entries[-1].position
    assert encode_state(pair.state) == before


def test_an_entry_delivered_again_does_not_turn_the_position_back(pair: Story) -> None:
    last = pair.state.position
    assert apply(pair.state, pair.entries[0]) is False
    assert pair.state.position == last


def test_P19_a_jump_in_a_sources_numbers_is_counted_and_applied(pair: Story) -> None:
    mark = pair.state.sources["llumlet/a"]
    event = LoadReported(owner=A, load=Load(running=3))
    pair.put(Fact("llumlet/a", 1, mark.seq + 5, 0, event))
    assert pair.state.gaps == 1
    assert pair.state.instances["a"].load.running == 3
    assert pair.state.sources["llumlet/a"] == SourceMark(1, mark.seq + 5)


def test_a_fact_of_an_older_incarnation_of_its_source_is_ignored(pair: Story) -> None:
    pair.instance("a", incarnation=2)
    pair.put(Fact("llumlet/a", 1, 900, 0, LoadReported(owner=owner("a", 2), load=Load(running=9))))
    assert pair.state.instances["a"].load.running == 0
    assert pair.state.sources["llumlet/a"] == SourceMark(2, 1)


def test_what_this_build_does_not_know_only_moves_the_position_and_the_source(pair: Story) -> None:
    event = UnknownEvent(kind="MoonRose", version=1, payload=msgspec.Raw(b"{}"))
    before = pair.state.sources["llumlet/a"].seq
    assert apply(pair.state, Entry(Position(1, 500), Fact("llumlet/a", 1, before + 1, 0, event))) is True
    assert pair.state.sources["llumlet/a"].seq == before + 1


def test_bytes_that_were_no_fact_are_nobodys() -> None:
    state = State()
    entry = Entry(Position(1, 3), codec.decode_stored(b"\xff not json"))
    assert apply(state, entry) is False
    assert state == State(position=Position(1, 3))


# --- the log itself -------------------------------------------------------------------------------


def test_commits_are_known_by_their_source_and_a_generation_starts_afresh(pair: Story) -> None:
    assert pair.state.committed > START
    assert pair.state.control_seq == 1
    opened = GenerationOpened(generation=2, cause="restart", opened_by="x")
    apply(pair.state, Entry(Position(2, 0), Fact("log", 2, 1, 0, opened)))
    assert (pair.state.generation, pair.state.committed, pair.state.control_seq) == (2, START, 0)
    assert "r" in pair.state.requests


def test_a_carried_state_replaces_the_tables_and_keeps_where_the_log_stands(pair: Story) -> None:
    text = encode_state(pair.state)
    event = StateCarried(state=text.decode(), digest=digest(text))
    other = State(generation=2, position=Position(2, 7), gaps=4)
    apply(other, Entry(Position(2, 8), Fact(COMMIT_SOURCE, 2, 1, 0, event)))
    assert (other.position, other.committed, other.control_seq, other.generation) == (
        Position(2, 8), Position(2, 8), 1, 2,
    )  # fmt: skip
    assert other.requests == pair.state.requests
    assert other.instances == pair.state.instances
    assert other.gaps == pair.state.gaps
    assert other.sources == {**pair.state.sources, COMMIT_SOURCE: SourceMark(2, 1)}


def test_P25_time_in_which_no_controller_ticked_is_not_silence(pair: Story) -> None:
    silent_since = pair.state.last_tick_ms - pair.state.instances["b"].reported_at_ms
    pair.control(decided("m", "r"))
    pair.tick(after_ms=60_000)
    assert pair.state.last_tick_ms - pair.state.instances["b"].reported_at_ms == silent_since
    assert pair.state.migrations["m"].stage_at_ms == pair.state.last_tick_ms


# --- instances ------------------------------------------------------------------------------------


def test_P21_a_load_report_of_an_older_incarnation_is_ignored(pair: Story) -> None:
    pair.instance("a", incarnation=2)
    pair.say("someone", LoadReported(owner=A, load=Load(running=50)))
    pair.say("someone", RequestsReported(owner=owner("a", 2), requests=(RequestLoad("r", 1, 999, 99, False, True),)))
    assert pair.state.instances["a"].load == Load(blocks_free=1000)
    assert pair.state.requests["r"].tokens == 160


def test_requests_stay_placed_at_an_incarnation_that_is_gone_until_their_gateway_moves_them(pair: Story) -> None:
    pair.instance("a", incarnation=2)
    assert list(pair.state.placed["a"]) == ["r"]
    assert pair.state.requests["r"].owner == A
    pair.dispatch("r", B, epoch=3, cause="lost", delivered_tokens=5)
    assert (list(pair.state.placed["a"]), list(pair.state.placed["b"])) == ([], ["r"])
    assert pair.state.requests["r"].tokens == 69


def test_witnesses_are_sorted_and_withdraw(pair: Story) -> None:
    for gateway in ("g2", "g1", "g2"):
        pair.say(f"gateway/{gateway}", ConnectionLost(gateway=gateway, owner=A))
    assert pair.state.instances["a"].witnesses == ("g1", "g2")
    pair.say("gateway/g1", ConnectionRestored(gateway="g1", owner=A))
    assert pair.state.instances["a"].witnesses == ("g2",)
    pair.say("gateway/g3", ConnectionLost(gateway="g3", owner=owner("a", 9)))
    assert pair.state.instances["a"].witnesses == ("g2",)


def test_P27_a_gateway_that_starts_again_takes_its_requests_and_its_testimony_with_it(pair: Story) -> None:
    pair.say(GATEWAY, ConnectionLost(gateway="g0", owner=A))
    pair.say(GATEWAY, ConnectionRestored(gateway="g0", owner=B), incarnation=2)
    assert pair.state.requests == {}
    assert pair.state.placed["a"] == {}
    assert pair.state.instances["a"].witnesses == ()


def test_verdicts_change_health_and_new_registration_heals(pair: Story) -> None:
    pair.control(InstanceSuspected(owner=A, silent_ms=3000))
    assert pair.state.instances["a"].health == "suspect"
    pair.control(InstanceLost(owner=A, silent_ms=7000, witnesses=("g0",)))
    assert pair.state.instances["a"].health == "lost"
    pair.instance("a", incarnation=2)
    assert pair.state.instances["a"].health == "up"
    pair.control(InstanceLost(owner=A, silent_ms=7000, witnesses=("g0",)))
    assert pair.state.instances["a"].health == "up"


def test_instances_that_are_gone_are_forgotten_in_the_end() -> None:
    story = Story()
    for index in range(INSTANCES_GONE_MAX + 20):
        me = story.instance(f"i{index}")
        story.say(f"llumlet/i{index}", InstanceStopped(owner=me))
    assert len(story.state.instances) <= INSTANCES_GONE_MAX + 1
    assert "i0" not in story.state.instances
    assert "i0" not in story.state.placed


# --- drains ---------------------------------------------------------------------------------------


def drain(operation: str = "o", instance: str = "a") -> DrainRequested:
    return DrainRequested(operation=operation, instance=instance, actor="ann")


def test_P16_a_drain_takes_effect_with_its_fact_and_ends_with_the_verdict(pair: Story) -> None:
    pair.say("admin", drain())
    assert not pair.state.instances["a"].is_dispatchable
    assert pair.state.operations["o"].status == "accepted"
    pair.control(InstanceDrained(owner=A))
    assert pair.state.instances["a"].is_drained
    assert pair.state.operations["o"].status == "succeeded"


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        (DrainCancelled(operation="o2", instance="a", actor="bob"), "failed", "cancelled"),
        (InstanceLost(owner=A, silent_ms=1, witnesses=("g",)), "failed", "instance_lost"),
        (InstanceStopped(owner=A), "succeeded", None),
    ],
    ids=["cancelled", "lost", "stopped"],
)
def test_every_drain_has_an_outcome(pair: Story, end: Any, status: str, code: str | None) -> None:
    pair.say("admin", drain())
    pair.say("someone", end)
    assert (pair.state.operations["o"].status, pair.state.operations["o"].code) == (status, code)


def test_a_drain_of_nobody_or_of_the_dead_fails_at_once(pair: Story) -> None:
    pair.say("admin", drain("o1", "nobody"))
    pair.say("llumlet/b", InstanceStopped(owner=B))
    pair.say("admin", drain("o2", "b"))
    codes = [pair.state.operations[name].code for name in ("o1", "o2")]
    assert codes == ["unknown_instance", "instance_down"]


def test_a_request_that_arrives_late_makes_a_drained_instance_undrained(pair: Story) -> None:
    pair.say("admin", drain("o", "b"))
    pair.control(InstanceDrained(owner=B))
    pair.dispatch("late", B)
    assert not pair.state.instances["b"].is_drained


# --- requests and moves ---------------------------------------------------------------------------


def test_P01_a_dispatch_of_a_lower_or_equal_epoch_is_stale(pair: Story) -> None:
    for epoch in (0, 1):
        pair.dispatch("r", B, epoch=epoch)
    assert pair.state.requests["r"].owner == A
    pair.dispatch("r", B, epoch=2)
    assert pair.state.requests["r"].owner == B


@pytest.mark.parametrize("end", [finished("r"), RequestCancelled(request="r", epoch=1, output_tokens=0)])
def test_P04_a_request_that_ended_is_gone_from_every_table(pair: Story, end: Any) -> None:
    pair.say(GATEWAY, end)
    assert pair.state.requests == {}
    assert pair.state.placed["a"] == {}


def test_a_committed_move_changes_the_owner_and_the_epoch(pair: Story) -> None:
    pair.control(decided("m", "r"))
    assert pair.state.requests["r"].migration == "m"
    pair.say("llumlet/a", MigrationStarted(migration="m", request="r", epoch=1, source=A, target=B))
    pair.say("llumlet/a", RoundCopied(migration="m", round=1, blocks=9, copied_bytes=90, duration_ms=1.5))
    pair.say("llumlet/b", MigrationAdopted(migration="m", request="r", target=B))
    pair.say(GATEWAY, committed("m", "r"))
    view, move = pair.state.requests["r"], pair.state.migrations["m"]
    assert (view.owner, view.epoch, view.migration, view.moved_from, view.moves) == (B, 2, None, "a", 1)
    assert view.moved_at_ms == pair.state.last_tick_ms
    assert (list(pair.state.placed["a"]), list(pair.state.placed["b"])) == ([], ["r"])
    assert (move.stage, move.rounds, move.copied_blocks, move.copied_bytes) == ("committed", 1, 9, 90)
    pair.say(GATEWAY, DowntimeMeasured(migration="m", gap_ms=30, normal_gap_ms=25, downtime_ms=5))
    pair.say("llumlet/a", MigrationReleased(migration="m", blocks_freed=9))
    assert pair.state.migrations["m"].stage == "released"
    assert pair.state.migrations["m"].downtime_ms == 5


def test_P18_a_request_whose_source_released_it_before_the_gateways_word_is_not_moved_again(pair: Story) -> None:
    pair.control(decided("m", "r"))
    pair.say("llumlet/a", MigrationReleased(migration="m", blocks_freed=9))
    view = pair.state.requests["r"]
    assert (view.owner, view.epoch, view.migration) == (A, 1, "m")
    assert pair.state.migrations["m"].is_open, "freed is not moved: the request may have ended instead"
    pair.say(GATEWAY, committed("m", "r"))
    view = pair.state.requests["r"]
    assert (view.owner, view.epoch, view.migration) == (B, 2, None)
    assert pair.state.migrations["m"].stage == "committed"


def test_facts_of_a_move_in_any_order_never_reopen_it(pair: Story) -> None:
    pair.control(decided("m", "r"))
    pair.say("llumlet/b", MigrationAdopted(migration="m", request="r", target=B))
    pair.say("llumlet/a", RoundCopied(migration="m", round=1, blocks=9, copied_bytes=90, duration_ms=1.5))
    assert pair.state.migrations["m"].stage == "adopted"
    pair.say(GATEWAY, committed("m", "r"))
    pair.say("llumlet/b", MigrationAdopted(migration="m", request="r", target=B))
    pair.say("llumlet/a", aborted("m", "r"))
    assert pair.state.migrations["m"].stage == "committed"


def test_P01_the_gateways_commit_overrules_an_abort_that_was_presumed(pair: Story) -> None:
    pair.say("admin", MoveRequested(operation="o", request="r", target="b", actor="ann"))
    pair.control(decided("m", "r", operation="o"), aborted("m", "r", "no_answer"))
    assert pair.state.operations["o"].code == "no_answer"
    pair.say(GATEWAY, committed("m", "r"))
    assert pair.state.requests["r"].owner == B
    assert pair.state.migrations["m"].stage == "committed"
    assert (pair.state.operations["o"].status, pair.state.operations["o"].code) == ("succeeded", None)


def test_P01_a_commit_of_a_stale_epoch_moves_nothing(pair: Story) -> None:
    pair.dispatch("r", A, epoch=3)
    pair.say(GATEWAY, committed("m", "r", epoch=1))
    assert (pair.state.requests["r"].owner, pair.state.requests["r"].epoch) == (A, 3)


def test_a_commit_of_a_move_that_is_not_remembered_still_moves_the_request(pair: Story) -> None:
    pair.say(GATEWAY, committed("forgotten", "r"))
    assert (pair.state.requests["r"].owner, pair.state.requests["r"].epoch) == (B, 2)


def test_a_reclaimed_request_stays_at_its_source_two_epochs_up(pair: Story) -> None:
    pair.control(decided("m", "r"))
    pair.say(GATEWAY, MigrationReclaimed(migration="m", request="r", epoch=1, owner=A))
    view = pair.state.requests["r"]
    assert (view.owner, view.epoch, view.migration) == (A, 3, None)
    assert (pair.state.migrations["m"].stage, pair.state.migrations["m"].code) == ("aborted", "reclaimed")


@pytest.mark.parametrize(
    ("end", "stage", "code"),
    [
        (aborted("m", "r", "gone"), "aborted", "gone"),
        (CommandRefused(migration="m", owner=A, code="expired", reason="late"), "refused", "expired"),
    ],
)
def test_P10_a_move_that_ends_badly_frees_the_request_for_another(pair: Story, end: Any, stage: str, code: str) -> None:
    pair.say("admin", MoveRequested(operation="o", request="r", target="b", actor="ann"))
    pair.control(decided("m", "r", operation="o"))
    assert pair.state.operations["o"].status == "running"
    pair.say("llumlet/a", end)
    assert pair.state.requests["r"].migration is None
    assert pair.state.migrations["m"].stage == stage
    operation = pair.state.operations["o"]
    assert (operation.status, operation.code, operation.migration) == ("failed", code, "m")


def test_a_rejected_move_fails_its_operation(pair: Story) -> None:
    pair.say("admin", MoveRequested(operation="o", request="r", target="b", actor="ann"))
    pair.control(MoveRejected(operation="o", code="target_full", reason="no room"))
    assert (pair.state.operations["o"].status, pair.state.operations["o"].code) == ("failed", "target_full")


@pytest.mark.parametrize("code", ["transfer_failed", "no_transfer"])
def test_P26_a_pair_that_cannot_connect_is_excluded_alone_and_readmitted(pair: Story, code: str) -> None:
    pair.control(decided("m", "r"))
    pair.say("llumlet/a", aborted("m", "r", code))
    until = pair.state.last_tick_ms + pair.state.policies.pair_backoff_ms
    assert pair.state.instances["a"].pair_failures == (("b", until),)
    assert pair.state.instances["b"].pair_failures == ()
    pair.control(decided("m2", "r"))
    pair.say(GATEWAY, committed("m2", "r"))
    assert pair.state.instances["a"].pair_failures == ()


def test_P26_an_end_that_is_not_the_links_fault_excludes_nobody(pair: Story) -> None:
    pair.control(decided("m", "r"))
    pair.say("llumlet/a", aborted("m", "r", "no_blocks"))
    assert pair.state.instances["a"].pair_failures == ()


def test_P28_closed_moves_and_operations_are_bounded_and_open_ones_are_kept(pair: Story) -> None:
    pair.control(decided("open", "r"))
    for index in range(CLOSED_MAX + 50):
        pair.say("admin", MoveRequested(operation=f"o{index}", request="x", target=None, actor="ann"))
        pair.control(decided(f"m{index}", "x", operation=f"o{index}"), aborted(f"m{index}", "x"))
    assert len(pair.state.migrations) == CLOSED_MAX
    assert len(pair.state.operations) == CLOSED_MAX
    assert "open" in pair.state.migrations
    assert f"m{CLOSED_MAX + 49}" in pair.state.migrations
    assert "m0" not in pair.state.migrations


# --- properties -----------------------------------------------------------------------------------


def numbered(picks: list[tuple[int, int]]) -> list[Entry]:
    """Facts of every kind, from the golden file, said by three sources in a made-up order."""
    seqs: dict[str, int] = {}
    entries = []
    for index, (pick, who) in enumerate(picks):
        event = GOLDEN_FACTS[pick % len(GOLDEN_FACTS)].event
        source = (COMMIT_SOURCE, "gateway/g0", "llumlet/a")[who]
        seqs[source] = seqs.get(source, 0) + 1
        entries.append(Entry(Position(1, index), Fact(source, 1, seqs[source], 1000 + index, event)))
    return entries


carried = next(i for i, fact in enumerate(GOLDEN_FACTS) if isinstance(fact.event, StateCarried))
PICKS = st.lists(
    st.tuples(st.integers(0, len(GOLDEN_FACTS) - 1).filter(lambda i: i != carried), st.integers(0, 2)), max_size=60
)


def seen(state: State) -> bytes:
    """A state apart from where its last entry stood."""
    state.position = START
    return encode_state(state)


@given(PICKS, st.data())
def test_P19_a_repeated_fact_has_no_effect(picks: list[tuple[int, int]], data: st.DataObject) -> None:
    entries = numbered(picks)
    repeated: list[Entry] = []
    for entry in entries:
        repeated.append(entry)
        if data.draw(st.booleans()):
            repeated.append(data.draw(st.sampled_from(repeated)))
    assert seen(fold(repeated)) == seen(fold(entries))


@given(PICKS, st.integers(0, 60))
def test_a_fold_goes_on_from_a_snapshot_as_if_it_had_read_everything(picks: list[tuple[int, int]], cut: int) -> None:
    entries = numbered(picks)
    snapshot = encode_state(fold(entries[:cut]))
    assert encode_state(fold(entries[cut:], codec.decode_state(snapshot))) == encode_state(fold(entries))


def test_P17_a_fold_is_the_same_in_every_process() -> None:
    program = (
        "import sys; from midstream.control.codec import decode_fact, digest, encode_state;"
        "from midstream.control.events import Entry; from midstream.control.fold import fold;"
        "from midstream.control.ids import Position;"
        "lines = sys.stdin.buffer.read().splitlines();"
        "print(digest(encode_state(fold(Entry(Position(1, i), decode_fact(l)) for i, l in enumerate(lines)))))"
    )
    story = busy_story()
    text = b"\n".join(encode_fact(entry.fact) for entry in story.entries)
    digests = set()
    for seed in ("0", "1", "4711"):
        result = subprocess.run(
            [sys.executable, "-c", program], input=text, capture_output=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        digests.add(result.stdout.strip().decode())
    assert digests == {digest(encode_state(story.state))}


def busy_story() -> Story:
    story = Story()
    owners = [story.instance(f"i{index}") for index in range(8)]
    for index in range(40):
        story.running(f"r{index}", owners[index % 8], tokens=100 + index)
        story.say(f"gateway/g{index % 5}", ConnectionLost(gateway=f"g{index % 5}", owner=owners[index % 3]))
    story.tick()
    story.say("admin", drain("o", "i1"))
    return story


def test_the_story_told_in_these_tests_has_no_gaps() -> None:
    assert busy_story().state.gaps == 0
    assert isinstance(busy_story().entries[-2].fact.event, TickElapsed)


def test_P17_facts_between_a_carried_state_and_its_place_in_the_log_are_applied_to_it() -> None:
    """A busy log lets nobody commit at its very end: what came between is not lost to anybody's fold."""
    opened = Entry(Position(2, 0), Fact("log", 2, 1, 1, GenerationOpened(generation=2, cause="t", opened_by="t")))
    between = [
        Entry(
            Position(2, seq), Fact(f"admin{seq}", 1, 1, 1, DrainRequested(operation=f"o{seq}", instance="a", actor="x"))
        )
        for seq in (1, 2)
    ]
    carrier = fold([opened, between[0]])
    text = encode_state(carrier)
    event = StateCarried(state=text.decode(), digest=digest(text))
    carried = Entry(Position(2, 3), Fact(COMMIT_SOURCE, 2, 1, 1, event))
    other = State(operations=fold(between).operations | {"lost": fold(between).operations["o1"]})
    live, other = fold([opened, *between, carried]), fold([opened, *between, carried], other)
    assert list(live.operations) == ["o1", "o2"]
    assert encode_state(live) == encode_state(other)
    assert live.uncarried == []
