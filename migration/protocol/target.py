"""The move at its target: reserve, adopt, be confirmed."""

from __future__ import annotations

from midstream.control.events import (
    MigrationAdopted,
)
from midstream.control.ids import Node
from midstream.migration.protocol.effects import (
    Abort,
    Adopt,
    Effect,
    Record,
    ResendTokens,
    Reserve,
    Send,
    SendAdopted,
)
from midstream.migration.protocol.freeing import closed, free_reservation
from midstream.migration.protocol.holdings import Adoption, Reservation, Run, Seat, Step, replace
from midstream.migration.protocol.inputs import AdoptDone, AdoptFailed, ReserveDone, ReserveFailed
from midstream.migration.protocol.messages import (
    Committed,
    Final,
    Flipped,
    Prepare,
    Prepared,
    PrepareRefused,
)
from midstream.migration.protocol.work import Reserved


def prepare(seat: Seat, source: Node, what: Prepare) -> Step:
    """Rule 3, at the target."""
    held = seat.reservation
    if what.target != seat.me:
        return seat, (_refuse(seat, source, what.migration, "wrong_incarnation", f"this is {seat.me}"),)
    if held is not None and held.migration == what.migration:
        return seat, _prepared_again(seat, held)
    if what.migration in seat.closed:
        return seat, (_refuse(seat, source, what.migration, "closed", "this move is over here"),)
    if not seat.is_empty:
        return seat, (_refuse(seat, source, what.migration, "busy", "the request is still here"),)
    if what.epoch + 1 <= seat.seen:
        return seat, (_refuse(seat, source, what.migration, "stale_epoch", f"epoch {seat.seen} was seen"),)
    slot = f"{seat.request}/{what.migration}"
    reservation = Reservation(
        migration=what.migration, slot=slot, epoch=what.epoch + 1, source=source, gateway=what.gateway
    )
    return replace(seat, seen=max(seat.seen, what.epoch), reservation=reservation), (Reserve(slot, what),)


def _refuse(seat: Seat, source: Node, migration: str, code: str, reason: str) -> Effect:
    refusal = PrepareRefused(request=seat.request, migration=migration, owner=seat.me, code=code, reason=reason)
    return Send(source, refusal)


def _prepared_again(seat: Seat, held: Reservation) -> tuple[Effect, ...]:
    if held.phase != "reserved" or held.reserved is None:
        return ()
    return (Send(held.source, _prepared_message(seat, held.migration, held.reserved)),)


def _prepared_message(seat: Seat, migration: str, reserved: Reserved) -> Prepared:
    return Prepared(
        request=seat.request,
        migration=migration,
        owner=seat.me,
        transfer=reserved.transfer,
        why=reserved.why,
        address=reserved.address,
        handle=reserved.handle,
        blocks_reserved=reserved.blocks,
        blocks_cached=reserved.cached,
    )


def _reserving(seat: Seat, migration: str) -> Reservation | None:
    held = seat.reservation
    return held if held is not None and held.migration == migration else None


def reserve_done(seat: Seat, what: ReserveDone) -> Step:
    held = _reserving(seat, what.migration)
    if held is None:
        return seat, _freed_stray(seat, what.slot)
    if held.phase != "reserving":
        return seat, ()
    held = replace(held, phase="reserved", reserved=what.reserved)
    prepared = _prepared_message(seat, what.migration, what.reserved)
    return replace(seat, reservation=held), (Send(held.source, prepared),)


def _freed_stray(seat: Seat, slot: str) -> tuple[Effect, ...]:
    """Free what came too late to belong to anything here."""
    return () if seat.run is not None and seat.run.slot == slot else (Abort(slot),)


def reserve_failed(seat: Seat, what: ReserveFailed) -> Step:
    held = _reserving(seat, what.migration)
    if held is None or held.phase != "reserving":
        return seat, ()
    refusal = _refuse(seat, held.source, what.migration, what.code, what.reason)
    return closed(replace(seat, reservation=None), what.migration), (refusal,)


def cancel(seat: Seat, migration: str) -> Step:
    """Only what has not adopted; an adopted run is the gateway's to drop. May overtake its `Prepare`."""
    held = _reserving(seat, migration)
    if held is None:
        return closed(seat, migration), ()
    if held.phase == "adopting":
        return seat, ()
    return free_reservation(seat, "cancelled")


def lease_expired(seat: Seat, migration: str) -> Step:
    held = _reserving(seat, migration)
    if held is None or held.phase == "adopting":
        return seat, ()
    return free_reservation(seat, "expired")


def final(seat: Seat, source: Node, what: Final) -> Step:
    """Rule 4, at the target: the reservation must be this very one, of this incarnation."""
    held = _reserving(seat, what.migration)
    if held is None or held.phase == "reserving" or what.target != seat.me or held.epoch != what.epoch + 1:
        adoption = seat.run.adoption if seat.run is not None else None
        if adoption is not None and adoption.migration == what.migration:
            return seat, ()
        return seat, (_refuse(seat, source, what.migration, "no_reservation", "nothing is reserved for it"),)
    if held.phase == "adopting" or held.epoch <= seat.seen:
        return seat, ()
    held = replace(held, phase="adopting", first=what.acknowledged)
    return replace(seat, reservation=held, seen=held.epoch), (Adopt(held.slot, what),)


def adopt_done(seat: Seat, what: AdoptDone) -> Step:
    held = _reserving(seat, what.migration)
    if held is None:
        return seat, _freed_stray(seat, what.slot)
    if held.phase != "adopting":
        return seat, ()
    adoption = Adoption(held.migration, held.source, held.epoch - 1, held.first)
    run = Run(slot=held.slot, epoch=held.epoch, gateway=held.gateway, acknowledged=held.first, adoption=adoption)
    fact = MigrationAdopted(
        migration=held.migration,
        request=seat.request,
        target=seat.me,
        freeze_to_adopt_ms=what.freeze_to_adopt_ms,
    )
    seat = replace(seat, reservation=None, run=run)
    return seat, (Record(fact), send_adopted(run, adoption))


def send_adopted(run: Run, adoption: Adoption) -> Effect:
    return SendAdopted(run.slot, adoption.migration, adoption.epoch, adoption.first)


def adopt_failed(seat: Seat, what: AdoptFailed) -> Step:
    held = _reserving(seat, what.migration)
    if held is None or held.phase != "adopting":
        return seat, ()
    refusal = _refuse(seat, held.source, what.migration, what.code, what.reason)
    seat, freed = free_reservation(seat, "failed")
    return seat, (*freed, refusal)


def flipped(seat: Seat, what: Flipped) -> Step:
    """Rule 6, at the target."""
    run = seat.run
    if run is None or run.epoch != what.epoch or run.adoption is None:
        return seat, ()
    adoption = run.adoption
    run = replace(run, adoption=None, acknowledged=max(run.acknowledged, what.delivered))
    committed = Committed(request=seat.request, migration=adoption.migration, epoch=adoption.epoch)
    return replace(seat, run=run), (Send(adoption.source, committed), ResendTokens(run.slot))
