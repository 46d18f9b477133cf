"""Every state of a seat with every input: what an exploration met, crossed with all kinds of inputs."""

from __future__ import annotations

from itertools import product
from typing import Any

from midstream.control.commands import StartMigration
from midstream.control.ids import Owner
from midstream.migration.protocol import effects as fx
from midstream.migration.protocol import messages as msg
from midstream.migration.protocol import seat as inputs
from midstream.migration.protocol.holdings import CLOSED_MAX
from midstream.migration.protocol.seat import From, Seat, step
from midstream.migration.protocol.source import ABORTABLE
from midstream.migration.protocol.work import Reserved, RoundReport
from tests.migration.parts import A2, RULES, A, B, C, dispatch, final, met, prepare, run_state
from tests.migration.world import GATEWAY, REQUEST, node_of

ENGINE = fx.Submit | fx.Abort | fx.Reserve | fx.Adopt | fx.Freeze | fx.Thaw | fx.Copy | fx.SendFinal | fx.Record
"""Effects that a repeated message may not have."""


def every_message() -> list[From]:
    """All messages over a few epochs and moves."""
    messages: list[Any] = []
    for epoch in range(7):
        where = {"request": REQUEST, "epoch": epoch}
        messages += [msg.Acknowledge(**where, delivered=1), msg.Flipped(**where, delivered=1), msg.Drop(**where)]
        messages += [msg.Probe(**where), msg.Granted(request=REQUEST, from_epoch=epoch, epoch=epoch + 2)]
        messages += [dispatch(owner, epoch) for owner in (A, A2, B)]
        for migration, target in product(("m1", "m2"), (A, B)):
            messages += [prepare(epoch, migration=migration, target=target)]
            messages += [final(epoch, 10, migration=migration, target=target)]
            messages += [msg.Committed(**where, migration=migration)]
    for migration, owner in product(("m1", "m2"), (A, B)):
        messages += [msg.Cancel(request=REQUEST, migration=migration), _prepared(migration, owner)]
        messages += [msg.PrepareRefused(request=REQUEST, migration=migration, owner=owner, code="x", reason="")]
    return [From(sender, m) for sender, m in product((GATEWAY, node_of(B)), messages)]


def _prepared(migration: str, owner: Owner) -> msg.Prepared:
    return msg.Prepared(
        request=REQUEST,
        migration=migration,
        owner=owner,
        transfer="rpc",
        address="",
        handle="h",
        blocks_reserved=2,
        blocks_cached=0,
    )


def every_local_input() -> list[Any]:
    """All other inputs over the slots and moves that an exploration knows."""
    report = RoundReport(blocks=1, copied_bytes=1, duration_ms=1.0, next_block=1, blocks_left=1, tokens=0)
    reserved = Reserved(blocks=2, cached=0, transfer="rpc", address="", handle="h")
    found: list[Any] = [inputs.Nudge(), inputs.GatewayLost(GATEWAY), inputs.GatewayLost(node_of(B))]
    for migration in ("m1", "m2"):
        slot = f"{REQUEST}/{migration}"
        found += [_start(migration, epoch, target) for epoch, target in product((2, 3, 4), (A, B, C))]
        found += [
            inputs.ReserveDone(migration, slot, reserved),
            inputs.ReserveFailed(migration, "x", ""),
            inputs.RoundDone(migration, report, 1.0),
            inputs.WorkFailed(migration, "x", ""),
            inputs.AdoptDone(migration, slot, None),
            inputs.AdoptFailed(migration, "x", ""),
            inputs.Deadline(migration),
            inputs.LeaseExpired(migration),
        ]
        for run in (slot, f"{REQUEST}/2"):
            found += [inputs.FreezeDone(migration, run, run_state(10, blocks=2))]
    for slot in (f"{REQUEST}/2", f"{REQUEST}/m1", "unknown"):
        found += [inputs.RunEnded(slot), inputs.RunLost(slot)]
    return found


def _start(migration: str, epoch: int, target: Owner) -> inputs.Start:
    command = StartMigration(
        id=migration,
        instance="A",
        incarnation=1,
        deadline_ms=0,
        migration=migration,
        request=REQUEST,
        epoch=epoch,
        target=target,
        target_address="",
    )
    return inputs.Start(command, node_of(target))


def slots(seat: Seat) -> set[str]:
    """Slots of the engine that a seat holds."""
    return {held.slot for held in (seat.run, seat.reservation) if held is not None}


def check_seat(before: Seat, what: Any, after: Seat, effects: tuple[fx.Effect, ...]) -> None:
    assert (after.me, after.request) == (before.me, before.request)
    assert after.seen >= before.seen
    assert after.run is None or after.reservation is None
    assert len(after.closed) <= CLOSED_MAX
    run, held = after.run, after.reservation
    if run is not None:
        assert run.epoch <= after.seen
        assert run.acknowledged >= 0
        if run.move is not None:
            assert run.move.phase in (*ABORTABLE, "doubt")
            assert run.is_confirmed, "only a confirmed owner moves a request on"
            assert (run.move.state is not None) == (run.move.phase == "final")
            assert (run.move.prepared is not None) == (run.move.phase != "preparing")
    if held is not None:
        assert held.phase in ("reserving", "reserved", "adopting")
        assert (held.phase == "adopting") == (held.epoch <= after.seen)
    freed = {e.slot for e in effects if isinstance(e, fx.Abort)}
    lost = slots(before) - slots(after)
    if isinstance(what, inputs.ReserveFailed):
        assert lost <= {before.reservation.slot if before.reservation is not None else ""}
    else:
        assert lost <= freed, "what a seat lets go is freed in the engine"
    assert not freed & slots(after), "what a seat keeps is not freed"
    started = {e.slot for e in effects if isinstance(e, fx.Submit | fx.Reserve)}
    assert started == slots(after) - slots(before), "a slot is started when it is new, and then alone"


def test_P11_every_input_is_legal_in_every_state() -> None:
    _, seats, packets = met()
    heard = [From(p.sender, p.message) for p in packets if p.to is not None]
    assert len(seats) > 100
    for seat, what in product(seats, [*every_message(), *every_local_input(), *heard]):
        check_seat(seat, what, *step(seat, what, RULES))


def test_P18_every_message_twice_in_a_row_has_the_effect_of_once() -> None:
    _, seats, packets = met()
    heard = [From(p.sender, p.message) for p in packets if p.to is not None]
    for seat, message in product(seats, [*every_message(), *heard]):
        once, _ = step(seat, message, RULES)
        twice, effects = step(once, message, RULES)
        assert twice == once, message
        assert not [e for e in effects if isinstance(e, ENGINE)], message


def test_P08_P09_from_every_state_a_drop_of_its_epoch_leaves_nothing() -> None:
    _, seats, _ = met()
    for seat in seats:
        epoch = max((held.epoch for held in (seat.run, seat.reservation) if held is not None), default=0)
        after, _ = step(seat, From(GATEWAY, msg.Drop(request=REQUEST, epoch=epoch)), RULES)
        assert after.is_empty
