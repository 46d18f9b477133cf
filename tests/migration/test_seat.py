"""The seat, rule by rule (docs/protocol.md): the source's and the target's side of a move, and runs without one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from midstream.control.commands import StartMigration
from midstream.control.events import CommandRefused, MigrationAborted, MigrationReleased, ReservationEnded
from midstream.control.ids import Node, Owner
from midstream.migration.plan import BLOCKING, LIVE, RECOMPUTE
from midstream.migration.protocol import effects as fx
from midstream.migration.protocol import messages as msg
from midstream.migration.protocol import seat as inputs
from midstream.migration.protocol.holdings import CLOSED_MAX
from midstream.migration.protocol.seat import From, Seat, step
from midstream.migration.protocol.work import Reserved, RoundReport
from tests.migration.parts import A2, RULES, A, B, C, dispatch, final, prepare, run_state
from tests.migration.world import GATEWAY, REQUEST, node_of

replace = msgspec.structs.replace

SLOT = f"{REQUEST}/2"
ROOM = Reserved(blocks=4, cached=0, transfer="rpc", address="", handle="h")


def play(seat: Seat, *what: Any) -> tuple[Seat, tuple[fx.Effect, ...]]:
    """Several inputs in a row; the effects of the last."""
    effects: tuple[fx.Effect, ...] = ()
    for one in what:
        seat, effects = step(seat, one, RULES)
    return seat, effects


def said(effects: tuple[fx.Effect, ...], kind: type[Any]) -> list[Any]:
    """Messages of one kind among effects."""
    return [e.message for e in effects if isinstance(e, fx.Send) and isinstance(e.message, kind)]


def facts(effects: tuple[fx.Effect, ...], kind: type[Any]) -> list[Any]:
    """Facts of one kind among effects."""
    recorded = [e.event for e in effects if isinstance(e, fx.Record)]
    freed = [e.fact for e in effects if isinstance(e, fx.Abort) and e.fact is not None]
    return [event for event in (*recorded, *freed) if isinstance(event, kind)]


def slots_freed(effects: tuple[fx.Effect, ...]) -> list[str]:
    """Slots that effects free."""
    return [e.slot for e in effects if isinstance(e, fx.Abort)]


def by_gateway(message: Any) -> From:
    """From the request's gateway."""
    return From(GATEWAY, message)


def by(owner: Owner, message: Any) -> From:
    """From another instance."""
    return From(node_of(owner), message)


def start(migration: str = "m1", epoch: int = 2, target: Owner = B, mode: str = LIVE) -> inputs.Start:
    """The command that begins a move."""
    command = StartMigration(
        id=migration,
        instance="A",
        incarnation=1,
        deadline_ms=0,
        migration=migration,
        request=REQUEST,
        epoch=epoch,
        target=target,
        target_address=target.instance,
        mode=mode,
    )
    return inputs.Start(command, node_of(target))


def prepared(migration: str = "m1", blocks: int = 4) -> From:
    """The target's answer."""
    message = msg.Prepared(
        request=REQUEST,
        migration=migration,
        owner=B,
        transfer="rpc",
        address="",
        handle="h",
        blocks_reserved=blocks,
        blocks_cached=0,
    )
    return by(B, message)


def refused(code: str = "no_blocks") -> From:
    """The target's refusal."""
    return by(B, msg.PrepareRefused(request=REQUEST, migration="m1", owner=B, code=code, reason=""))


def copied(next_block: int, blocks_left: int) -> inputs.RoundDone:
    """A round's end."""
    report = RoundReport(
        blocks=1, copied_bytes=1, duration_ms=1.0, next_block=next_block, blocks_left=blocks_left, tokens=0
    )
    return inputs.RoundDone("m1", report, 1.0)


def granted(from_epoch: int = 2) -> From:
    """The gateway gives the request back."""
    return by_gateway(msg.Granted(request=REQUEST, from_epoch=from_epoch, epoch=from_epoch + 2))


def committed(epoch: int = 2, migration: str = "m1") -> From:
    """The target says that the gateway flipped."""
    return by(B, msg.Committed(request=REQUEST, migration=migration, epoch=epoch))


def drop(epoch: int) -> From:
    """The gateway ends an epoch."""
    return by_gateway(msg.Drop(request=REQUEST, epoch=epoch))


FROZEN = inputs.FreezeDone("m1", SLOT, run_state(10, 11))
CANCEL = by(A, msg.Cancel(request=REQUEST, migration="m1"))
RUN = (by_gateway(dispatch(A, 2)),)
PREPARING = (*RUN, start())
COPYING = (*PREPARING, prepared())
FREEZING = (*COPYING, copied(3, 1))
FINAL = (*FREEZING, FROZEN)
DOUBT = (*FINAL, copied(4, 0))
BEFORE_FINAL = {"preparing": PREPARING, "copying": COPYING, "freezing": FREEZING, "final": FINAL}

RESERVING = (by(A, prepare(2)),)
RESERVED = (*RESERVING, inputs.ReserveDone("m1", f"{REQUEST}/m1", ROOM))
ADOPTING = (*RESERVED, by(A, final(2, 10, 11, acknowledged=1)))
ADOPTED = (*ADOPTING, inputs.AdoptDone("m1", f"{REQUEST}/m1", None))
CONFIRMED = (*ADOPTED, by_gateway(msg.Flipped(request=REQUEST, epoch=3, delivered=2)))


def source(*what: Any) -> Seat:
    """A's seat after these inputs."""
    return play(Seat(me=A, request=REQUEST), *what)[0]


def target(*what: Any) -> Seat:
    """B's seat after these inputs."""
    return play(Seat(me=B, request=REQUEST), *what)[0]


# --- rule 1: dispatch ----------------------------------------------------------------------------


def test_P01_rule_1_a_dispatch_starts_a_run_and_frees_an_older_one() -> None:
    seat, effects = play(source(*RUN), by_gateway(dispatch(A, 4, 10)))
    assert seat.run is not None
    assert (seat.run.epoch, seat.run.acknowledged, seat.seen) == (4, 1, 4)
    assert [type(e) for e in effects] == [fx.Abort, fx.Submit, fx.Send]
    assert slots_freed(effects) == [SLOT]


def test_P01_rule_1_a_dispatch_frees_an_older_reservation() -> None:
    seat, effects = play(target(*RESERVED), by_gateway(dispatch(B, 4)))
    assert seat.reservation is None
    assert facts(effects, ReservationEnded)[0].cause == "dropped"


def test_P01_rule_1_a_dispatch_older_than_a_reservation_is_refused() -> None:
    """Two slots of one request: a late dispatch must not start a run beside the reservation of a newer move."""
    seat = target(by(A, prepare(6)))
    after, effects = play(seat, by_gateway(dispatch(B, 4)))
    assert after == seat
    assert [m.code for m in said(effects, msg.Rejected)] == ["gone"]


def test_P18_rule_1_a_dispatch_repeated_is_answered_and_starts_nothing() -> None:
    seat = source(*RUN)
    after, effects = play(seat, *RUN)
    assert after == seat
    assert [type(m) for m in (effects[0].message,)] == [msg.Accepted]  # type: ignore[attr-defined]


def test_P04_rule_1_a_dispatch_repeated_after_its_run_was_lost_says_so() -> None:
    seat, effects = play(source(*RUN, inputs.RunLost(SLOT)), *RUN)
    assert seat.is_empty
    assert [m.epoch for m in said(effects, msg.Rejected)] == [2]


def test_P18_M1_F12_a_dispatch_for_another_start_of_this_instance_is_ignored() -> None:
    assert play(Seat(me=A, request=REQUEST), by_gateway(dispatch(A2, 2))) == (Seat(me=A, request=REQUEST), ())


# --- rule 3: prepare -----------------------------------------------------------------------------


def test_P18_rule_3_only_a_confirmed_owner_may_begin_a_move() -> None:
    order = start(epoch=3, target=C)
    seat, effects = play(target(*ADOPTED), order)
    assert facts(effects, CommandRefused)[0].code == "unconfirmed"
    seat, effects = play(target(*CONFIRMED), order)
    assert seat.run is not None
    assert seat.run.move is not None


@pytest.mark.parametrize(
    ("seat", "order", "code"),
    [
        (Seat(me=A, request=REQUEST), start(), "gone"),
        (source(*RUN, inputs.RunEnded(SLOT)), start(), "gone"),
        (source(*PREPARING), start("m2"), "busy"),
        (source(*RUN), start(epoch=1), "stale_epoch"),
        (source(*RUN), start(target=A2), "same_instance"),
        (source(*RUN), start(mode="teleport"), "unknown_mode"),
    ],
    ids=["no run", "finished", "busy", "stale", "to itself", "unknown mode"],
)
def test_P18_rule_3_a_command_that_cannot_be_followed_is_refused_with_a_fact(
    seat: Seat, order: inputs.Start, code: str
) -> None:
    after, effects = play(seat, order)
    assert after == seat
    assert [f.code for f in facts(effects, CommandRefused)] == [code]


def test_P18_M1_F11_a_command_repeated_does_nothing() -> None:
    seat = source(*COPYING)
    assert play(seat, start()) == (seat, ())


def test_P18_M1_F11_prepare_repeated_keeps_one_reservation_and_answers_again() -> None:
    seat = target(*RESERVED)
    after, effects = play(seat, *RESERVING)
    assert after == seat
    assert [type(e) for e in effects] == [fx.Send]
    assert play(target(*RESERVING), *RESERVING)[1] == ()


def test_P05_rule_3_prepare_repeated_after_the_lease_reserves_nothing() -> None:
    """Else `Final` would be adopted on blocks that nothing was copied into."""
    seat = target(*RESERVED, inputs.LeaseExpired("m1"))
    after, effects = play(seat, *RESERVING)
    assert after == seat
    assert [m.code for m in said(effects, msg.PrepareRefused)] == ["closed"]
    assert [m.code for m in said(play(after, by(A, final(2)))[1], msg.PrepareRefused)] == ["no_reservation"]


def test_P08_M1_F12_cancel_may_overtake_its_prepare() -> None:
    seat, effects = play(target(CANCEL), *RESERVING)
    assert seat.reservation is None
    assert said(effects, msg.PrepareRefused)


def test_P28_a_seat_remembers_a_bounded_number_of_closed_moves() -> None:
    cancels = [by(A, msg.Cancel(request=REQUEST, migration=f"m{i}")) for i in range(CLOSED_MAX + 5)]
    assert len(target(*cancels).closed) == CLOSED_MAX


def test_P08_M1_F12_prepare_for_another_start_or_of_a_seen_epoch_is_refused() -> None:
    assert said(play(target(), by(A, prepare(2, target=Owner("B", 2))))[1], msg.PrepareRefused)[0].code == (
        "wrong_incarnation"
    )
    assert said(play(target(drop(3)), *RESERVING)[1], msg.PrepareRefused)[0].code == "stale_epoch"
    assert said(play(target(by_gateway(dispatch(B, 1))), *RESERVING)[1], msg.PrepareRefused)[0].code == "busy"


def test_P08_M1_F10_a_reservation_the_engine_refuses_leaves_nothing() -> None:
    seat, effects = play(target(*RESERVING), inputs.ReserveFailed("m1", "no_blocks", "0 of 4 free"))
    assert seat.is_empty
    assert [(m.code, m.reason) for m in said(effects, msg.PrepareRefused)] == [("no_blocks", "0 of 4 free")]


@pytest.mark.parametrize("phase", [RESERVING, RESERVED], ids=["reserving", "reserved"])
@pytest.mark.parametrize("what", [CANCEL, inputs.LeaseExpired("m1"), drop(3)], ids=["cancel", "lease", "drop"])
def test_P08_M2_F10_a_reservation_can_end_at_any_time_before_it_adopts(phase: tuple[Any, ...], what: Any) -> None:
    seat, effects = play(target(*phase), what)
    assert seat.is_empty
    assert slots_freed(effects) == [f"{REQUEST}/m1"]
    assert len(facts(effects, ReservationEnded)) == 1


def test_P08_a_reservation_that_comes_after_its_end_is_freed() -> None:
    _, effects = play(target(*RESERVING, CANCEL), RESERVED[-1])
    assert slots_freed(effects) == [f"{REQUEST}/m1"]


def test_P08_M1_F6_a_late_prepared_is_cancelled_at_once() -> None:
    _, effects = play(source(*PREPARING, inputs.Deadline("m1")), prepared())
    assert effects == (fx.Send(node_of(B), msg.Cancel(request=REQUEST, migration="m1")),)


# --- the modes -----------------------------------------------------------------------------------


def test_P32_a_blocking_move_freezes_first_and_then_copies_everything_once() -> None:
    seat, effects = play(source(*RUN, start(mode=BLOCKING)), prepared())
    assert fx.Freeze(SLOT, "m1") in effects
    seat, effects = play(seat, FROZEN)
    assert fx.Copy(SLOT, "m1", 0) in effects
    _, effects = play(seat, copied(4, 0))
    assert [e.state.blocks for e in effects if isinstance(e, fx.SendFinal)] == [4]


def test_P32_a_recomputing_move_copies_nothing_and_hands_over_a_run_without_kv() -> None:
    seat, effects = play(source(*RUN, start(mode=RECOMPUTE)), prepared(blocks=0))
    assert fx.Freeze(SLOT, "m1") in effects
    _, effects = play(seat, FROZEN)
    assert not [e for e in effects if isinstance(e, fx.Copy)]
    handed = [e.state for e in effects if isinstance(e, fx.SendFinal)]
    assert [(state.outputs, state.computed, state.blocks) for state in handed] == [((10, 11), 0, 0)]


def test_P10_a_recomputing_move_that_is_reclaimed_goes_on_with_the_kv_it_kept() -> None:
    seat, effects = play(source(*RUN, start(mode=RECOMPUTE), prepared(blocks=0), FROZEN), granted())
    assert fx.Thaw(SLOT) in effects
    assert slots_freed(effects) == []
    assert seat.run is not None
    assert seat.run.move is None


# --- the source, before Final --------------------------------------------------------------------


@pytest.mark.parametrize("phase", BEFORE_FINAL.values(), ids=BEFORE_FINAL)
@pytest.mark.parametrize(
    "what",
    [
        inputs.Deadline("m1"),
        inputs.WorkFailed("m1", "transfer_failed", ""),
    ],
    ids=["deadline", "work failed"],
)
def test_P10_M3_F5_before_final_the_source_gives_up_by_itself_and_goes_on(phase: tuple[Any, ...], what: Any) -> None:
    seat, effects = play(source(*phase), what)
    assert seat.run is not None
    assert seat.run.move is None
    assert seat.run.epoch == 2
    assert len(facts(effects, MigrationAborted)) == 1
    assert said(effects, msg.Cancel)
    assert slots_freed(effects) == []
    assert isinstance(effects[0], fx.StopWork | fx.Thaw)


def test_P10_M4_F6_a_frozen_run_is_thawed_when_its_move_is_given_up() -> None:
    assert fx.Thaw(SLOT) in play(source(*FINAL), inputs.Deadline("m1"))[1]


def test_P10_M3_F2_a_freeze_that_ends_after_its_move_was_given_up_is_undone() -> None:
    seat, effects = play(source(*FREEZING, inputs.Deadline("m1")), FROZEN)
    assert effects == (fx.Thaw(SLOT),)
    assert seat == replace(source(*RUN), run=seat.run)


def test_P10_M3_F6_a_freeze_that_failed_by_being_too_slow_is_undone_too() -> None:
    seat, effects = play(source(*FREEZING), inputs.WorkFailed("m1", "too_slow", ""))
    assert fx.Thaw(SLOT) in effects
    assert seat.run is not None
    assert seat.run.freezing is None


def test_P01_M4_F12_no_move_begins_before_the_freeze_of_the_last_one_was_answered() -> None:
    """Else the thaw that undoes it lets the run go on while the next move has it frozen."""
    waiting = source(*FREEZING, inputs.Deadline("m1"))
    after, effects = play(waiting, start("m2"))
    assert after == waiting
    assert [f.code for f in facts(effects, CommandRefused)] == ["busy"]
    after, effects = play(waiting, FROZEN, start("m2"))
    assert not facts(effects, CommandRefused)


def test_P10_M1_F2_a_refusal_ends_the_move_without_a_word_to_the_target() -> None:
    seat, effects = play(source(*PREPARING), refused())
    assert seat == source(*RUN)
    assert facts(effects, MigrationAborted)[0].code == "no_blocks"
    assert not said(effects, msg.Cancel)


def test_P10_M3_F8_a_request_that_finishes_by_itself_is_never_shipped() -> None:
    seat, effects = play(source(*FREEZING), inputs.RunEnded(SLOT))
    assert seat.run is not None
    assert seat.run.is_finished
    assert facts(effects, MigrationAborted)[0].code == "finished"
    assert said(effects, msg.Cancel)


def test_P10_M3_F10_a_request_that_outgrew_its_reservation_stays() -> None:
    assert facts(play(source(*COPYING), copied(3, 2))[1], MigrationAborted)[0].code == "outgrew"
    grown = inputs.FreezeDone("m1", SLOT, run_state(10, blocks=5))
    _, effects = play(source(*FREEZING), grown)
    assert facts(effects, MigrationAborted)[0].code == "outgrew"
    assert fx.Thaw(SLOT) in effects


def test_a_waiting_request_moves_without_a_copy() -> None:
    seat, effects = play(source(*PREPARING), prepared(blocks=0))
    assert effects[-1] == fx.Freeze(SLOT, "m1")
    seat, effects = play(seat, inputs.FreezeDone("m1", SLOT, run_state(blocks=0)))
    assert isinstance(effects[-1], fx.SendFinal)
    assert seat.run is not None
    assert seat.run.move is not None
    assert seat.run.move.phase == "doubt"


def test_P10_a_waiting_request_that_began_to_run_meanwhile_stays() -> None:
    seat, effects = play(source(*PREPARING, prepared(blocks=0)), inputs.FreezeDone("m1", SLOT, run_state(blocks=1)))
    assert facts(effects, MigrationAborted)[0].code == "outgrew"
    assert fx.Thaw(SLOT) in effects
    assert seat.run is not None
    assert seat.run.move is None


@pytest.mark.parametrize("phase", BEFORE_FINAL.values(), ids=BEFORE_FINAL)
def test_P09_M3_F7_an_abort_before_final_frees_both_sides(phase: tuple[Any, ...]) -> None:
    seat, effects = play(source(*phase), drop(2))
    assert seat.is_empty
    assert slots_freed(effects) == [SLOT]
    assert said(effects, msg.Cancel)
    assert said(effects, msg.Gone)


# --- rules 4 to 6: hand-over ---------------------------------------------------------------------


def test_P01_rule_4_final_is_sent_once_and_then_the_source_cannot_go_on_by_itself() -> None:
    seat, effects = play(source(*FINAL), copied(4, 0))
    assert [type(e) for e in effects] == [fx.Record, fx.SendFinal]
    for what in (inputs.Deadline("m1"), inputs.WorkFailed("m1", "x", ""), inputs.RunEnded(SLOT), inputs.Nudge()):
        after, effects = play(seat, what)
        assert not [e for e in effects if isinstance(e, fx.Thaw | fx.SendFinal | fx.Abort)]
        assert after.run is not None
        assert after.run.move is not None
        assert after.run.move.phase == "doubt"


def test_P01_rule_4_the_target_adopts_on_this_very_reservation_only() -> None:
    seat, effects = play(target(*RESERVED), by(A, final(2, 10)))
    assert [type(e) for e in effects] == [fx.Adopt]
    assert seat.seen == 3
    for held, late in (
        (Seat(me=B, request=REQUEST), final(2)),
        (target(*RESERVING), final(2)),
        (target(*RESERVED), final(2, migration="m2")),
        (target(*RESERVED), final(2, target=Owner("B", 2))),
        (target(*RESERVED), final(4)),
    ):
        after, effects = play(held, by(A, late))
        assert after == held
        assert [m.code for m in said(effects, msg.PrepareRefused)] == ["no_reservation"]


@pytest.mark.parametrize("phase", [ADOPTING, ADOPTED], ids=["adopting", "adopted"])
def test_P18_M4_F11_final_repeated_adopts_once(phase: tuple[Any, ...]) -> None:
    seat = target(*phase)
    assert play(seat, by(A, final(2, 10, 11, acknowledged=1))) == (seat, ())


@pytest.mark.parametrize("what", [CANCEL, inputs.LeaseExpired("m1")], ids=["cancel", "lease"])
@pytest.mark.parametrize("phase", [ADOPTING, ADOPTED], ids=["adopting", "adopted"])
def test_P01_rule_4_the_target_frees_nothing_by_itself_once_it_adopts(phase: tuple[Any, ...], what: Any) -> None:
    _, effects = play(target(*phase), what)
    assert slots_freed(effects) == []


def test_P08_M4_F10_an_adoption_that_fails_frees_the_reservation_and_says_so() -> None:
    seat, effects = play(target(*ADOPTING), inputs.AdoptFailed("m1", "checksum", ""))
    assert seat.is_empty
    assert slots_freed(effects) == [f"{REQUEST}/m1"]
    assert said(effects, msg.PrepareRefused)
    assert said(play(source(*DOUBT), refused("checksum"))[1], msg.Reclaim)


def test_P09_an_adoption_that_ends_after_an_abort_is_freed() -> None:
    seat, _ = play(target(*ADOPTING), drop(3))
    assert slots_freed(play(seat, ADOPTED[-1])[1]) == [f"{REQUEST}/m1"]


def test_P02_rule_5_the_target_tells_its_adoption_from_the_first_unacknowledged_token_until_answered() -> None:
    seat, effects = play(target(*ADOPTING), ADOPTED[-1])
    adoption = fx.SendAdopted(f"{REQUEST}/m1", "m1", 2, 1)
    assert effects[-1] == adoption
    assert play(seat, inputs.Nudge())[1] == (adoption,)
    assert play(target(*CONFIRMED), inputs.Nudge())[1] == ()


def test_P01_rule_6_flipped_confirms_and_only_then_the_source_may_release() -> None:
    seat, effects = play(target(*ADOPTED), CONFIRMED[-1])
    assert seat.run is not None
    assert seat.run.is_confirmed
    assert seat.run.acknowledged == 2
    assert effects[0] == fx.Send(node_of(A), msg.Committed(request=REQUEST, migration="m1", epoch=2))
    assert play(seat, CONFIRMED[-1]) == (seat, ())
    assert play(target(*ADOPTED), by_gateway(msg.Flipped(request=REQUEST, epoch=5, delivered=0)))[1] == ()


def test_P01_rule_6_committed_releases_the_source() -> None:
    seat, effects = play(source(*DOUBT), committed())
    assert seat.is_empty
    assert slots_freed(effects) == [SLOT]
    assert len(facts(effects, MigrationReleased)) == 1
    assert play(seat, committed()) == (seat, ())


@pytest.mark.parametrize("late", [committed(migration="m0"), committed(epoch=0)], ids=["move", "epoch"])
def test_P01_rule_6_committed_of_another_move_releases_nothing(late: From) -> None:
    seat = source(*DOUBT)
    assert play(seat, late) == (seat, ())


# --- rules 7 to 9: doubt -------------------------------------------------------------------------


def test_P01_rule_7_M4_F5_in_doubt_the_source_asks_again_and_again() -> None:
    seat, effects = play(source(*DOUBT), inputs.Deadline("m1"))
    question = fx.Send(GATEWAY, msg.Reclaim(request=REQUEST, owner=A, epoch=2, migration="m1"))
    assert effects == (question,)
    assert play(seat, inputs.Nudge())[1] == (question,)
    assert play(source(*DOUBT), inputs.Nudge())[1] == ()


def test_P01_rule_8_a_grant_thaws_under_the_new_epoch_and_cancels_the_target() -> None:
    seat, effects = play(source(*DOUBT, inputs.Deadline("m1")), granted())
    assert seat.run is not None
    assert (seat.run.epoch, seat.run.move, seat.seen) == (4, None, 4)
    assert [type(e) for e in effects] == [fx.Thaw, fx.ResendTokens, fx.Record, fx.Send]
    assert said(effects, msg.Cancel)
    assert play(seat, granted()) == (seat, ())


@pytest.mark.parametrize("what", [(), PREPARING[1:], FINAL[1:]], ids=["no move", "preparing", "final"])
def test_P01_rule_8_a_grant_counts_only_in_doubt(what: tuple[Any, ...]) -> None:
    seat = source(*RUN, *what)
    assert play(seat, granted()) == (seat, ())


def test_P01_rule_9_drop_frees_up_to_its_epoch_and_nothing_newer() -> None:
    seat = source(by_gateway(dispatch(A, 4)))
    after, effects = play(seat, drop(3))
    assert after == seat
    assert slots_freed(effects) == []
    after, effects = play(seat, drop(4))
    assert after.is_empty
    assert said(effects, msg.Gone)[0].epoch == 4
    assert play(after, drop(4))[1] == (fx.Send(GATEWAY, msg.Gone(request=REQUEST, owner=A, epoch=4)),)


def test_P01_rule_9_drop_forbids_its_epoch_for_ever() -> None:
    seat = Seat(me=A, request=REQUEST)
    after, effects = play(seat, drop(4), by_gateway(dispatch(A, 4)))
    assert after.is_empty
    assert not [e for e in effects if isinstance(e, fx.Submit)]


def test_P01_M6_F12_late_words_of_a_first_move_do_not_touch_a_request_that_came_back() -> None:
    """A to B at 2, B back to A at 3: A owns it at 4 and hears late words about the first move."""
    back = (
        by(B, prepare(3, migration="m2", source=B, target=A)),
        inputs.ReserveDone("m2", f"{REQUEST}/m2", ROOM),
        by(B, final(3, 10, migration="m2", target=A)),
        inputs.AdoptDone("m2", f"{REQUEST}/m2", None),
        by_gateway(msg.Flipped(request=REQUEST, epoch=4, delivered=1)),
    )
    seat = source(*DOUBT, committed(), *back)
    assert seat.run is not None
    assert seat.run.epoch == 4
    for late in (committed(), drop(2), drop(3), granted(), refused(), *RUN):
        after, effects = play(seat, late)
        assert after == seat
        assert not slots_freed(effects)


# --- rules 10 and 11 -----------------------------------------------------------------------------


def test_P01_rule_10_a_frozen_run_that_waits_for_its_grant_counts_as_there() -> None:
    def answer(seat: Seat, epoch: int) -> type[Any]:
        _, effects = play(seat, by_gateway(msg.Probe(request=REQUEST, epoch=epoch)))
        return type(effects[0].message)  # type: ignore[attr-defined]

    assert answer(source(*RUN), 2) is msg.Holding
    assert answer(source(*RUN), 4) is msg.Gone
    assert answer(source(*DOUBT), 4) is msg.Holding
    assert answer(source(*FINAL), 4) is msg.Gone
    assert answer(Seat(me=A, request=REQUEST), 2) is msg.Gone


@pytest.mark.parametrize("phase", [RUN, *BEFORE_FINAL.values(), DOUBT], ids=["run", *BEFORE_FINAL, "doubt"])
def test_P09_rule_11_M4_F4_a_lost_gateway_frees_the_source_in_every_phase(phase: tuple[Any, ...]) -> None:
    seat, effects = play(source(*phase), inputs.GatewayLost(GATEWAY))
    assert seat.is_empty
    assert slots_freed(effects) == [SLOT]


@pytest.mark.parametrize("phase", [RESERVING, RESERVED, ADOPTING, ADOPTED, CONFIRMED])
def test_P09_rule_11_M4_F4_a_lost_gateway_frees_the_target_in_every_phase(phase: tuple[Any, ...]) -> None:
    seat, effects = play(target(*phase), inputs.GatewayLost(GATEWAY))
    assert seat.is_empty
    assert slots_freed(effects) == [f"{REQUEST}/m1"]


def test_rule_11_another_gateway_that_is_lost_frees_nothing() -> None:
    seat = source(*RUN)
    assert play(seat, inputs.GatewayLost(Node("gateway/g", 2, "g"))) == (seat, ())


@pytest.mark.parametrize("phase", [RUN, *BEFORE_FINAL.values(), DOUBT], ids=["run", *BEFORE_FINAL, "doubt"])
def test_P09_an_abort_twice_has_the_effect_of_once(phase: tuple[Any, ...]) -> None:
    seat, _ = play(source(*phase), drop(2))
    after, effects = play(seat, drop(2))
    assert after == seat
    assert slots_freed(effects) == []
