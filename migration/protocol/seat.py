"""The seat of one request on one instance: its run, its reservation, and the move it takes part in.

`step` is total over every state and input and does no IO: it returns the next seat and effects in order.
Source and target of a move are both behind it, so that one table decides what an instance may do with a request.
An instance holds at most one run or one reservation of a request at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

from midstream.control.ids import Node
from midstream.migration.protocol.effects import (
    Effect,
    Send,
    SendPrepare,
    Submit,
)
from midstream.migration.protocol.freeing import free, free_reservation
from midstream.migration.protocol.holdings import Adoption, Move, Reservation, Rules, Run, Seat, Step, replace
from midstream.migration.protocol.inputs import (
    AdoptDone,
    AdoptFailed,
    Deadline,
    FreezeDone,
    From,
    GatewayLost,
    Input,
    LeaseExpired,
    Nudge,
    ReserveDone,
    ReserveFailed,
    RoundDone,
    RunEnded,
    RunLost,
    Start,
    WorkFailed,
)
from midstream.migration.protocol.messages import (
    Accepted,
    Acknowledge,
    Cancel,
    Committed,
    Dispatch,
    Drop,
    Final,
    Flipped,
    Gone,
    Granted,
    Holding,
    Prepare,
    Prepared,
    PrepareRefused,
    Probe,
    Rejected,
)
from midstream.migration.protocol.source import (
    committed,
    deadline,
    freeze_done,
    give_up,
    granted,
    prepare_refused,
    prepared,
    reclaim_of,
    round_done,
    start,
    work_failed,
)
from midstream.migration.protocol.target import (
    adopt_done,
    adopt_failed,
    cancel,
    final,
    flipped,
    lease_expired,
    prepare,
    reserve_done,
    reserve_failed,
    send_adopted,
)

__all__ = [
    "AdoptDone",
    "AdoptFailed",
    "Adoption",
    "Deadline",
    "FreezeDone",
    "From",
    "GatewayLost",
    "Input",
    "LeaseExpired",
    "Move",
    "Nudge",
    "Reservation",
    "ReserveDone",
    "ReserveFailed",
    "RoundDone",
    "Rules",
    "Run",
    "RunEnded",
    "RunLost",
    "Seat",
    "Start",
    "Step",
    "WorkFailed",
    "step",
]


def step(seat: Seat, what: Input, rules: Rules) -> Step:
    """The next seat and what to do, for any input in any state."""
    match what:
        case From():
            return _message(seat, what.sender, what)
        case Start():
            return start(seat, what, rules)
        case ReserveDone():
            return reserve_done(seat, what)
        case ReserveFailed():
            return reserve_failed(seat, what)
        case RoundDone():
            return round_done(seat, what, rules)
        case WorkFailed():
            return work_failed(seat, what)
        case FreezeDone():
            return freeze_done(seat, what, rules)
        case AdoptDone():
            return adopt_done(seat, what)
        case AdoptFailed():
            return adopt_failed(seat, what)
        case RunEnded():
            return _run_ended(seat, what.slot)
        case RunLost():
            return _run_lost(seat, what.slot)
        case Deadline():
            return deadline(seat, what.migration)
        case LeaseExpired():
            return lease_expired(seat, what.migration)
        case Nudge():
            return seat, tuple(_repeats(seat))
        case GatewayLost():
            return _gateway_lost(seat, what.gateway)


def _message(seat: Seat, sender: Node, what: From) -> Step:
    match what.message:
        case Dispatch() as message:
            return _dispatch(seat, sender, message)
        case Acknowledge() as message:
            return _acknowledge(seat, message)
        case Flipped() as message:
            return flipped(seat, message)
        case Granted() as message:
            return granted(seat, message)
        case Drop() as message:
            return _drop(seat, sender, message.epoch)
        case Probe() as message:
            return seat, (Send(sender, _probed(seat, message.epoch)),)
        case Prepare() as message:
            return prepare(seat, sender, message)
        case Prepared() as message:
            return prepared(seat, sender, message)
        case PrepareRefused() as message:
            return prepare_refused(seat, message)
        case Cancel() as message:
            return cancel(seat, message.migration)
        case Final() as message:
            return final(seat, sender, message)
        case Committed() as message:
            return committed(seat, message)


# --- runs ----------------------------------------------------------------------------------------


def _dispatch(seat: Seat, gateway: Node, what: Dispatch) -> Step:
    """Rule 1. A repeated dispatch is answered again: its run is here, or it was and is lost."""
    if what.owner != seat.me:
        return seat, ()
    run = seat.run
    if run is not None and run.epoch == what.epoch:
        return seat, (Send(gateway, Accepted(request=seat.request, owner=seat.me, epoch=what.epoch)),)
    if what.epoch <= seat.seen:
        refusal = Rejected(
            request=seat.request, owner=seat.me, epoch=what.epoch, code="gone", reason="not here any more"
        )
        return seat, (Send(gateway, refusal),)
    seat, freed = free(seat, what.epoch)
    slot = f"{seat.request}/{what.epoch}"
    run = Run(slot=slot, epoch=what.epoch, gateway=gateway, acknowledged=len(what.delivered))
    accepted = Accepted(request=seat.request, owner=seat.me, epoch=what.epoch)
    return replace(seat, seen=what.epoch, run=run), (*freed, Submit(slot, what, gateway), Send(gateway, accepted))


def _acknowledge(seat: Seat, what: Acknowledge) -> Step:
    run = seat.run
    if run is None or run.epoch != what.epoch or what.delivered <= run.acknowledged:
        return seat, ()
    return replace(seat, run=replace(run, acknowledged=what.delivered)), ()


def _drop(seat: Seat, sender: Node, epoch: int) -> Step:
    """Rule 9, answered so that the gateway need not repeat it."""
    seat, freed = free(seat, epoch)
    gone = Gone(request=seat.request, owner=seat.me, epoch=epoch)
    return replace(seat, seen=max(seat.seen, epoch)), (*freed, Send(sender, gone))


def _probed(seat: Seat, epoch: int) -> Holding | Gone:
    """Rule 10: a frozen run that waits for its grant counts as there."""
    run = seat.run
    is_here = run is not None and (
        run.epoch == epoch or (run.move is not None and run.move.phase == "doubt" and run.epoch + 2 == epoch)
    )
    answer = Holding if is_here else Gone
    return answer(request=seat.request, owner=seat.me, epoch=epoch)


def _run_ended(seat: Seat, slot: str) -> Step:
    run = seat.run
    if run is None or run.slot != slot:
        return seat, ()
    seat = replace(seat, run=replace(run, is_finished=True))
    if run.move is None:
        return seat, ()
    return give_up(seat, run.move.migration, "finished", "the request finished by itself")


def _run_lost(seat: Seat, slot: str) -> Step:
    run = seat.run
    if run is None or run.slot != slot:
        return seat, ()
    return free(seat, run.epoch)


def _gateway_lost(seat: Seat, gateway: Node) -> Step:
    effects: tuple[Effect, ...] = ()
    if seat.run is not None and seat.run.gateway == gateway:
        seat, effects = free(seat, seat.run.epoch)
    if seat.reservation is not None and seat.reservation.gateway == gateway:
        seat, more = free_reservation(seat, "dropped")
        effects += more
    return seat, effects


# --- repetition ----------------------------------------------------------------------------------


def _repeats(seat: Seat) -> Iterable[Effect]:
    """What may have been lost: asking again is always safe."""
    run = seat.run
    if run is None:
        return
    if run.adoption is not None:
        yield send_adopted(run, run.adoption)
    if run.move is not None and run.move.phase == "preparing":
        yield SendPrepare(run.slot, run.move.migration)
    if run.move is not None and run.move.is_reclaiming:
        yield Send(run.gateway, reclaim_of(seat, run, run.move))
