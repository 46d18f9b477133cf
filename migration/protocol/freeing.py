"""Giving back what a seat holds; both sides of a move end here."""

from __future__ import annotations

from midstream.control.events import (
    MigrationAborted,
    MigrationReleased,
    ReservationEnded,
)
from midstream.migration.protocol.effects import (
    Abort,
    Effect,
    Record,
    Send,
    StopWork,
)
from midstream.migration.protocol.holdings import (
    CLOSED_MAX,
    Move,
    Run,
    Seat,
    Step,
    replace,
)
from midstream.migration.protocol.messages import (
    Cancel,
)


def free(seat: Seat, epoch: int) -> Step:
    """Free the run and the reservation if their epoch is not above `epoch`; close the run's move."""
    effects: tuple[Effect, ...] = ()
    if seat.run is not None and seat.run.epoch <= epoch:
        effects = _freed_run(seat, seat.run)
        seat = replace(seat, run=None)
    if seat.reservation is not None and seat.reservation.epoch <= epoch:
        seat, more = free_reservation(seat, "dropped")
        effects += more
    return seat, effects


def _freed_run(seat: Seat, run: Run) -> tuple[Effect, ...]:
    move = run.move
    if move is None:
        return (Abort(run.slot),)
    if move.phase == "doubt":
        return (Abort(run.slot, MigrationReleased(migration=move.migration, blocks_freed=0)),)
    fact = aborted(seat, move, "dropped", "the run was dropped")
    return (StopWork(move.migration), Abort(run.slot), Record(fact), Send(move.node, cancel_of(seat, move)))


def aborted(seat: Seat, move: Move, code: str, reason: str) -> MigrationAborted:
    return MigrationAborted(migration=move.migration, request=seat.request, stage=move.phase, code=code, reason=reason)


def cancel_of(seat: Seat, move: Move) -> Cancel:
    return Cancel(request=seat.request, migration=move.migration)


def free_reservation(seat: Seat, cause: str) -> Step:
    held = seat.reservation
    assert held is not None
    fact = ReservationEnded(migration=held.migration, owner=seat.me, cause=cause, blocks_freed=0)
    return closed(replace(seat, reservation=None), held.migration), (Abort(held.slot, fact),)


def closed(seat: Seat, migration: str) -> Seat:
    """Remember that a move is over here."""
    if migration in seat.closed:
        return seat
    return replace(seat, closed=(*seat.closed, migration)[-CLOSED_MAX:])
