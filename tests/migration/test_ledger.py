"""The ledger, rule by rule (docs/protocol.md), and as a table of every state and input."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.control.events import MigrationCommitted, MigrationReclaimed
from midstream.control.ids import Owner
from midstream.migration.protocol import messages as msg
from midstream.migration.protocol.effects import Deliver, Effect, Record, SeekOwner, SendDispatch, Tell
from midstream.migration.protocol.ledger import (
    EARLY_MAX,
    NOBODY,
    End,
    Input,
    Ledger,
    OwnerLost,
    Redispatch,
    answer_unknown,
    step,
)
from tests.migration.parts import A2, A, B, C, adopted, met, reclaim, running, tokens
from tests.migration.world import REQUEST

replace = msgspec.structs.replace

PHASES = {"new", "dispatching", "running", "seeking", "ended"}


def told(effects: tuple[Effect, ...], kind: type[Any]) -> list[tuple[Owner, Any]]:
    """Messages of one kind among effects, with their receivers."""
    return [(e.owner, e.message) for e in effects if isinstance(e, Tell) and isinstance(e.message, kind)]


def delivered(effects: tuple[Effect, ...]) -> tuple[int, ...]:
    """Token ids that effects give to the client."""
    return tuple(i for e in effects if isinstance(e, Deliver) for i in e.ids)


def drop(epoch: int) -> msg.Drop:
    """What the ledger says about this request's epoch."""
    return msg.Drop(request=REQUEST, epoch=epoch)


# --- the rules -----------------------------------------------------------------------------------


def test_P01_rule_1_dispatch_takes_the_epoch_two_up_and_drops_the_old_owner() -> None:
    ledger, _ = step(running(A, 7), tokens(A, 2, 2, 9))
    assert ledger.early
    ledger, effects = step(ledger, Redispatch(B))
    assert (ledger.phase, ledger.owner, ledger.epoch, ledger.early) == ("dispatching", B, 4, ())
    assert effects == (Tell(A, drop(2)), SendDispatch(B, 4))


def test_P01_rule_1_dispatch_to_the_same_owner_needs_no_drop() -> None:
    ledger, effects = step(running(A), Redispatch(A))
    assert (ledger.owner, ledger.epoch) == (A, 4)
    assert effects == (SendDispatch(A, 4),)


def test_P02_rule_2_tokens_of_the_owner_are_delivered_once_and_in_order() -> None:
    ledger, effects = step(running(A), tokens(A, 2, 1, 11))
    assert delivered(effects) == ()
    ledger, effects = step(ledger, tokens(A, 2, 0, 10))
    assert delivered(effects) == (10, 11)
    assert told(effects, msg.Acknowledge) == [(A, msg.Acknowledge(request=REQUEST, epoch=2, delivered=2))]
    ledger, effects = step(ledger, tokens(A, 2, 0, 10, 11))
    assert delivered(effects) == ()
    assert ledger.delivered == 2


@pytest.mark.parametrize("owner", [B, A2], ids=["another instance", "another start of the owner"])
def test_P01_rule_2_the_epoch_alone_does_not_make_an_owner(owner: Owner) -> None:
    ledger, effects = step(running(A), tokens(owner, 2, 0, 10))
    assert ledger == running(A)
    assert effects == (Tell(owner, drop(2)),)


def test_P01_rule_2_a_stale_run_is_dropped_but_never_at_the_owner() -> None:
    ledger, _ = step(running(A), reclaim(A, 2))
    assert step(ledger, tokens(A, 2, 0, 10)) == (ledger, ())
    assert step(ledger, tokens(B, 3, 0, 10)) == (ledger, (Tell(B, drop(3)),))


def test_P01_rule_2_a_future_epoch_is_ignored_and_not_dropped() -> None:
    ledger = running(A)
    assert step(ledger, tokens(B, 3, 0, 10)) == (ledger, ())


def test_P02_rule_2_the_finish_ends_the_request() -> None:
    ledger, effects = step(running(A), tokens(A, 2, 0, 10, finish="stop"))
    assert ledger.phase == "ended"
    assert effects == (Deliver((10,), (), "stop"), Tell(A, drop(2)))


def test_P01_rule_5_adoption_flips_and_takes_the_missing_tail() -> None:
    ledger, effects = step(running(A, 10), adopted(B, 2, 0, 10, 11, 12))
    assert (ledger.owner, ledger.epoch, ledger.delivered) == (B, 3, 3)
    assert delivered(effects) == (11, 12)
    facts = [e.event for e in effects if isinstance(e, Record)]
    assert facts == [MigrationCommitted(migration="m1", request=REQUEST, epoch=2, owner=B, tail_tokens=2)]
    assert [owner for owner, _ in told(effects, msg.Flipped)] == [B]


def test_P01_rule_5_M5_F11_adoption_repeated_is_answered_the_same_and_flips_once() -> None:
    ledger, _ = step(running(A), adopted(B, 2, 0, 10))
    again, effects = step(ledger, adopted(B, 2, 0, 10))
    assert again == ledger
    assert effects == (Tell(B, msg.Flipped(request=REQUEST, epoch=3, delivered=1)),)


def test_P01_rule_5_M5_F12_adoption_after_a_reclaim_is_refused() -> None:
    ledger, _ = step(running(A), reclaim(A, 2))
    assert step(ledger, adopted(B, 2, 0)) == (ledger, (Tell(B, drop(3)),))


def test_P01_rule_5_an_adoption_with_a_hole_before_it_is_not_decided() -> None:
    """A `Drop` in answer could arrive after a later flip, and kill the owner."""
    ledger = running(A)
    assert step(ledger, adopted(B, 2, 1, 11)) == (ledger, ())
    ledger, _ = step(ledger, tokens(A, 2, 0, 10))
    assert step(ledger, adopted(B, 2, 1, 11))[0].owner == B


def test_P01_rule_5_a_late_adoption_does_not_drop_the_owner_that_waits_for_its_grant() -> None:
    """A to B at 2, B became the owner at 3 and got it back at 5: its own repeated `Adopted` must not kill it."""
    ledger, _ = step(running(A), adopted(B, 2, 0))
    ledger, _ = step(ledger, reclaim(B, 3))
    assert ledger.epoch == 5
    assert step(ledger, adopted(B, 2, 0)) == (ledger, ())


def test_P02_rule_5_M5_F8_a_target_that_finished_at_once_ends_the_request() -> None:
    ledger, effects = step(running(A), adopted(B, 2, 0, 10, finish="length"))
    assert ledger.phase == "ended"
    assert Deliver((10,), (), "length") in effects
    assert effects[-1] == Tell(B, drop(3))


def test_P01_rule_7_M4_F2_reclaim_is_granted_to_the_owner_and_repeated_to_it_alone() -> None:
    ledger, effects = step(running(A), reclaim(A, 2))
    assert (ledger.owner, ledger.epoch, ledger.granted_from) == (A, 4, 2)
    granted = Tell(A, msg.Granted(request=REQUEST, from_epoch=2, epoch=4))
    assert granted in effects
    assert [e.event for e in effects if isinstance(e, Record)] == [
        MigrationReclaimed(migration="m1", request=REQUEST, epoch=2, owner=A)
    ]
    assert step(ledger, reclaim(A, 2)) == (ledger, (granted,))
    assert step(ledger, reclaim(A2, 2)) == (ledger, (Tell(A2, drop(2)),))


def test_P01_rule_7_M4_F5_a_reclaim_after_the_flip_is_refused() -> None:
    ledger, _ = step(running(A), adopted(B, 2, 0))
    assert step(ledger, reclaim(A, 2)) == (ledger, (Tell(A, drop(2)),))


def test_P01_rule_7_a_reclaim_after_a_redispatch_is_refused() -> None:
    ledger, _ = step(running(A), Redispatch(B))
    assert step(ledger, reclaim(A, 2)) == (ledger, (Tell(A, drop(2)),))


def test_P01_rule_7_a_grant_is_forgotten_once_the_owner_changed() -> None:
    ledger, _ = step(running(A), reclaim(A, 2))
    ledger, _ = step(ledger, Redispatch(A))
    assert ledger.granted_from is None
    assert step(ledger, reclaim(A, 2)) == (ledger, (Tell(A, drop(2)),))


def test_P01_rule_10_an_owner_without_the_run_is_replaced_but_not_while_a_dispatch_is_in_flight() -> None:
    gone = msg.Gone(request=REQUEST, owner=A, epoch=2)
    dispatching, _ = step(Ledger(request=REQUEST), Redispatch(A))
    assert step(dispatching, gone) == (dispatching, ())
    seeking, effects = step(running(A), gone)
    assert (seeking.phase, effects) == ("seeking", (SeekOwner("gone", A),))
    assert step(seeking, gone) == (seeking, ())
    assert step(running(A), msg.Gone(request=REQUEST, owner=A, epoch=1)) == (running(A), ())


def test_P25_a_false_suspicion_heals_when_the_owner_is_heard() -> None:
    seeking, _ = step(running(A), OwnerLost(A))
    assert step(seeking, msg.Holding(request=REQUEST, owner=A, epoch=2))[0].phase == "running"
    healed, effects = step(seeking, tokens(A, 2, 0, 10))
    assert healed.phase == "running"
    assert delivered(effects) == (10,)
    assert step(running(A), OwnerLost(A2)) == (running(A), ())


def test_P04_a_refused_dispatch_seeks_another_instance() -> None:
    dispatching, _ = step(Ledger(request=REQUEST), Redispatch(A))
    refusal = msg.Rejected(request=REQUEST, owner=A, epoch=2, code="no_blocks", reason="")
    assert step(dispatching, refusal)[1] == (SeekOwner("refused", A),)
    assert step(dispatching, replace(refusal, epoch=1)) == (dispatching, ())


def test_P09_rule_11_an_ended_request_answers_everything_with_drop() -> None:
    ended, effects = step(running(A), End())
    assert effects == (Tell(A, drop(2)),)
    assert step(ended, End()) == (ended, ())
    for late, epoch in ((tokens(A, 2, 0, 10), 2), (adopted(B, 2, 0), 3), (reclaim(A, 2), 2)):
        assert step(ended, late) == (ended, (Tell(late.owner, drop(epoch)),))
        assert answer_unknown(late) == (Tell(late.owner, drop(epoch)),)
    assert step(ended, Redispatch(B)) == (ended, ())


def test_P09_M4_F7_the_end_before_the_flip_frees_both_sides() -> None:
    ended, effects = step(running(A, 10), End())
    assert effects == (Tell(A, drop(2)),)
    assert step(ended, adopted(B, 2, 0, 10, 11)) == (ended, (Tell(B, drop(3)),))


def test_P09_M4_F7_the_end_after_the_flip_goes_to_the_new_owner() -> None:
    ledger, _ = step(running(A), adopted(B, 2, 0))
    assert step(ledger, End())[1] == (Tell(B, drop(3)),)


def test_P09_the_end_of_a_request_never_dispatched_tells_nobody() -> None:
    assert step(Ledger(request=REQUEST), End()) == (Ledger(request=REQUEST, phase="ended"), ())


def test_P02_M7_F11_the_first_of_two_different_tokens_at_an_index_is_kept() -> None:
    _, effects = step(running(A, 10), tokens(A, 2, 0, 99, 11))
    assert delivered(effects) == (11,)


def test_P28_M7_F6_early_chunks_are_bounded_and_come_again() -> None:
    ledger = running(A)
    for index in range(1, EARLY_MAX + 20):
        ledger, _ = step(ledger, tokens(A, 2, index, 100 + index))
        assert len(ledger.early) <= EARLY_MAX
    everything = tuple(100 + i for i in range(EARLY_MAX + 20))
    ledger, effects = step(ledger, tokens(A, 2, 0, *everything))
    assert delivered(effects) == everything
    assert ledger.early == ()


# --- every state and every input -----------------------------------------------------------------


def every_input() -> list[Input]:
    """All inputs over a few owners and epochs."""
    inputs: list[Input] = [End(), *(Redispatch(o) for o in (A, B)), *(OwnerLost(o) for o in (A, A2, B))]
    for owner, epoch in product((A, A2, B, C), range(8)):
        where = {"request": REQUEST, "owner": owner, "epoch": epoch}
        inputs += [msg.Accepted(**where), msg.Holding(**where), msg.Gone(**where), reclaim(owner, epoch)]
        inputs += [msg.Rejected(**where, code="full", reason="")]
        for first, finish in product((0, 1, 3), (None, "stop")):
            inputs += [tokens(owner, epoch, first, 7, 8, finish=finish), adopted(owner, epoch, first, 7, finish=finish)]
    return inputs


def check_ledger(before: Ledger, what: Input, after: Ledger, effects: tuple[Effect, ...]) -> None:
    assert after.phase in PHASES
    assert after.request == before.request
    assert after.epoch >= before.epoch
    assert after.owner == before.owner or after.epoch > before.epoch
    assert before.phase != "ended" or after == before
    assert (after.owner == NOBODY) == (after.epoch == 0)
    assert len(after.early) <= EARLY_MAX
    assert all(chunk.first > after.delivered for chunk in after.early)
    assert after.delivered == before.delivered + len(delivered(effects))
    assert not (before.phase == "ended" and any(isinstance(e, Deliver) for e in effects))
    if isinstance(what, msg.Tokens) and delivered(effects):
        assert (what.owner, what.epoch) == (before.owner, before.epoch)
    is_flip = any(isinstance(e, Record) and isinstance(e.event, MigrationCommitted) for e in effects)
    assert is_flip == (isinstance(what, msg.Adopted) and after.epoch == before.epoch + 1)
    for owner, message in told(effects, msg.Drop):
        if owner == after.owner and after.phase != "ended":
            assert message.epoch < after.epoch, "the owner's own run is never dropped"


def test_P11_every_input_is_legal_in_every_state() -> None:
    ledgers, _, packets = met()
    heard = [p.message for p in packets if p.to is None]
    assert len(ledgers) > 30
    assert {ledger.phase for ledger in ledgers} == PHASES - {"new"}
    for ledger, what in product((Ledger(request=REQUEST), *ledgers), [*every_input(), *heard]):
        check_ledger(ledger, what, *step(ledger, what))


def test_P18_every_message_twice_in_a_row_has_the_effect_of_once() -> None:
    ledgers, _, packets = met()
    messages = [w for w in every_input() if isinstance(w, msg.Message)] + [p.message for p in packets if p.to is None]
    for ledger, message in product(ledgers, messages):
        once, _ = step(ledger, message)
        twice, effects = step(once, message)
        assert twice == once, message
        assert all(isinstance(e, Tell) for e in effects), "a repeat is only answered"


# --- any order, any repetition -------------------------------------------------------------------

REFERENCE = tuple(range(100, 112))


@st.composite
def chunks(draw: st.DrawFn) -> list[msg.Tokens]:
    """Tokens of the owner in pieces that overlap, repeat and are shuffled, mixed with those of other runs."""
    cuts = draw(st.lists(st.tuples(st.integers(0, 11), st.integers(1, 5)), max_size=25))
    pieces = [tokens(A, 2, first, *REFERENCE[first : first + size]) for first, size in cuts]
    pieces += [tokens(A, 2, first, *REFERENCE[first : first + 3]) for first in range(0, 12, 3)]
    strangers = draw(
        st.lists(st.tuples(st.sampled_from([A, A2, B]), st.integers(0, 5), st.integers(0, 11)), max_size=10)
    )
    pieces += [tokens(o, e, first, 999) for o, e, first in strangers if (o, e) != (A, 2)]
    return draw(st.permutations(pieces))


@settings(max_examples=200, deadline=None)
@given(chunks())
def test_P02_any_order_and_repetition_of_chunks_gives_the_reference(pieces: list[msg.Tokens]) -> None:
    ledger, got = running(A), []
    for piece in pieces:
        ledger, effects = step(ledger, piece)
        got += delivered(effects)
    assert tuple(got) == REFERENCE
    assert ledger.delivered == len(REFERENCE)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_P02_moves_in_mid_stream_keep_the_order(data: st.DataObject) -> None:
    """Owners change at random; each sends what it must, some of it lost, late tokens of earlier owners in between."""
    ledger, got, owners = running(A), [], [A, B]
    late: list[Any] = []
    for _ in range(data.draw(st.integers(1, 4))):
        owner, epoch = ledger.owner, ledger.epoch
        made = data.draw(st.integers(ledger.delivered, len(REFERENCE)))
        said = [tokens(owner, epoch, i, REFERENCE[i]) for i in range(ledger.delivered, made)]
        late += said
        heard = data.draw(st.permutations(said))[: data.draw(st.integers(0, len(said)))]
        target = owners[owners[0] == owner]
        flip = adopted(target, epoch, ledger.delivered, *REFERENCE[ledger.delivered : made])
        for what in (*heard, flip, *data.draw(st.permutations(late))[:3]):
            ledger, effects = step(ledger, what)
            got += delivered(effects)
        assert ledger.owner == target
        assert tuple(got) == REFERENCE[: len(got)]
        assert len(got) == made
