"""The seat of one request on one instance: its run, its reservation, and the move it takes part in.

`step` is total over every state and input and does no IO: it returns the next seat and effects in order.
Source and target of a move are both here, so that one table decides what an instance may do with a request.
An instance holds at most one run or one reservation of a request at a time.

Phases of a move at its source: `preparing` → `copying` → `freezing` → `final` (last copy) → `doubt`
(`Final` was sent). Until `Final` the source may resume by itself; afterwards only the gateway decides.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from midstream.control.commands import CancelMigration, StartMigration
from midstream.control.events import (
    CommandRefused,
    Event,
    MigrationAborted,
    MigrationAdopted,
    MigrationPrepared,
    MigrationReleased,
    MigrationStarted,
    RequestFrozen,
    ReservationEnded,
    RoundCopied,
)
from midstream.control.ids import Node, Owner
from midstream.migration.plan import PlanLimits, Progress, next_step, predicted_stop_ms
from midstream.migration.protocol.effects import (
    Abort,
    Adopt,
    Copy,
    Effect,
    Freeze,
    Record,
    ResendTokens,
    Reserve,
    Send,
    SendAdopted,
    SendFinal,
    SendPrepare,
    StopWork,
    Submit,
    Thaw,
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
    Reclaim,
    Rejected,
    RunState,
)
from midstream.migration.protocol.work import Reserved, RoundReport

ABORTABLE = ("preparing", "copying", "freezing", "final")
"""Phases in which the source may give the move up by itself."""

CLOSED_MAX = 8
"""Moves a seat remembers as over; a `Prepare` that is older than so many moves of one request has long expired."""


class Adoption(msgspec.Struct, frozen=True):
    """How an unconfirmed run came here; kept until the gateway's `Flipped`."""

    migration: str
    source: Node
    epoch: int
    first: int


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """The one open move of a run, at its source."""

    migration: str
    target: Owner
    node: Node
    phase: str = "preparing"
    prepared: Prepared | None = None
    next_block: int = 0
    progress: Progress = Progress()
    prepared_at_ms: float = 0.0
    state: RunState | None = None
    is_reclaiming: bool = False


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the request in this engine."""

    slot: str
    epoch: int
    gateway: Node
    acknowledged: int = 0
    is_finished: bool = False
    adoption: Adoption | None = None
    move: Move | None = None
    freezing: str | None = None
    """The move whose `Freeze` was not answered yet, given up or not: until then no other move may begin, or the
    thaw of this one would let the run go on behind the other's back."""

    @property
    def is_confirmed(self) -> bool:
        """Did the gateway name us its owner (by dispatch or flip)."""
        return self.adoption is None


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Room for a run that may arrive. `phase`: `reserving reserved adopting`."""

    migration: str
    slot: str
    epoch: int
    """The epoch the run would have: the source's + 1."""
    source: Node
    gateway: Node
    phase: str = "reserving"
    reserved: Reserved | None = None
    first: int = 0


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """All that one incarnation of an instance knows of one request."""

    me: Owner
    request: str
    seen: int = 0
    """Highest epoch known to have been given out: nothing at or below it starts again."""
    run: Run | None = None
    reservation: Reservation | None = None
    closed: tuple[str, ...] = ()
    """Moves that are over here as a target. None of them reserves again: its `Final` could otherwise meet blocks
    that nothing was copied into."""

    @property
    def is_empty(self) -> bool:
        """Nothing is held; the seat only remembers `seen`."""
        return self.run is None and self.reservation is None


# --- local inputs --------------------------------------------------------------------------------


class From(msgspec.Struct, frozen=True):
    """A message and who sent it."""

    sender: Node
    message: (
        Dispatch
        | Acknowledge
        | Flipped
        | Granted
        | Drop
        | Probe
        | Prepare
        | Prepared
        | PrepareRefused
        | Cancel
        | Final
        | Committed
    )


class Start(msgspec.Struct, frozen=True):
    """A command that passed the envelope checks (incarnation, deadline, id)."""

    command: StartMigration
    node: Node
    """The target's llumlet."""


class Stop(msgspec.Struct, frozen=True):
    """A command to give a move up."""

    command: CancelMigration


class ReserveDone(msgspec.Struct, frozen=True):
    """The engine reserved."""

    migration: str
    slot: str
    reserved: Reserved


class ReserveFailed(msgspec.Struct, frozen=True):
    """The engine will not reserve."""

    migration: str
    code: str
    reason: str


class RoundDone(msgspec.Struct, frozen=True):
    """A copy arrived at the target. `now_ms` is the loop's time in milliseconds."""

    migration: str
    report: RoundReport
    now_ms: float


class WorkFailed(msgspec.Struct, frozen=True):
    """A copy or freeze for a move failed."""

    migration: str
    code: str
    reason: str


class FreezeDone(msgspec.Struct, frozen=True):
    """The run is out of its batch."""

    migration: str
    slot: str
    state: RunState


class AdoptDone(msgspec.Struct, frozen=True):
    """The reservation became a run. `freeze_to_adopt_ms` if both clocks are comparable."""

    migration: str
    slot: str
    freeze_to_adopt_ms: float | None


class AdoptFailed(msgspec.Struct, frozen=True):
    """The engine could not adopt."""

    migration: str
    code: str
    reason: str


class RunEnded(msgspec.Struct, frozen=True):
    """The engine finished the run: its last output is on its way to the gateway."""

    slot: str


class RunLost(msgspec.Struct, frozen=True):
    """The engine refused or lost the run: nothing is left of it here."""

    slot: str


class Deadline(msgspec.Struct, frozen=True):
    """A move has been in its present phase for too long (source), or waits too long for an answer (doubt)."""

    migration: str


class LeaseExpired(msgspec.Struct, frozen=True):
    """A reservation was neither adopted nor cancelled in time."""

    migration: str


class Nudge(msgspec.Struct, frozen=True):
    """Time to repeat what has not been answered."""


class GatewayLost(msgspec.Struct, frozen=True):
    """This incarnation of a gateway has not been heard for its lease (rule 11)."""

    gateway: Node


Input = (
    From
    | Start
    | Stop
    | ReserveDone
    | ReserveFailed
    | RoundDone
    | WorkFailed
    | FreezeDone
    | AdoptDone
    | AdoptFailed
    | RunEnded
    | RunLost
    | Deadline
    | LeaseExpired
    | Nudge
    | GatewayLost
)
Step = tuple[Seat, tuple[Effect, ...]]


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What `step` needs to know of its instance."""

    here: Node
    block_bytes: int
    limits: PlanLimits = PlanLimits()
    round_trip_ms: float = 1.0


replace = msgspec.structs.replace


def step(seat: Seat, what: Input, rules: Rules) -> Step:
    """The next seat and what to do, for any input in any state."""
    match what:
        case From():
            return _message(seat, what.sender, what)
        case Start():
            return _start(seat, what, rules)
        case Stop():
            return _give_up(seat, what.command.migration, "cancelled", "cancelled by command")
        case ReserveDone():
            return _reserve_done(seat, what)
        case ReserveFailed():
            return _reserve_failed(seat, what)
        case RoundDone():
            return _round_done(seat, what, rules)
        case WorkFailed():
            return _work_failed(seat, what)
        case FreezeDone():
            return _freeze_done(seat, what)
        case AdoptDone():
            return _adopt_done(seat, what)
        case AdoptFailed():
            return _adopt_failed(seat, what)
        case RunEnded():
            return _run_ended(seat, what.slot)
        case RunLost():
            return _run_lost(seat, what.slot)
        case Deadline():
            return _deadline(seat, what.migration)
        case LeaseExpired():
            return _lease_expired(seat, what.migration)
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
            return _flipped(seat, message)
        case Granted() as message:
            return _granted(seat, message)
        case Drop() as message:
            return _drop(seat, sender, message.epoch)
        case Probe() as message:
            return seat, (Send(sender, _probed(seat, message.epoch)),)
        case Prepare() as message:
            return _prepare(seat, sender, message)
        case Prepared() as message:
            return _prepared(seat, sender, message)
        case PrepareRefused() as message:
            return _prepare_refused(seat, message)
        case Cancel() as message:
            return _cancel(seat, message.migration)
        case Final() as message:
            return _final(seat, sender, message)
        case Committed() as message:
            return _committed(seat, message)


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
    seat, freed = _free(seat, what.epoch)
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
    seat, freed = _free(seat, epoch)
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
    return _give_up(seat, run.move.migration, "finished", "the request finished by itself")


def _run_lost(seat: Seat, slot: str) -> Step:
    run = seat.run
    if run is None or run.slot != slot:
        return seat, ()
    return _free(seat, run.epoch)


def _gateway_lost(seat: Seat, gateway: Node) -> Step:
    effects: tuple[Effect, ...] = ()
    if seat.run is not None and seat.run.gateway == gateway:
        seat, effects = _free(seat, seat.run.epoch)
    if seat.reservation is not None and seat.reservation.gateway == gateway:
        seat, more = _free_reservation(seat, "dropped")
        effects += more
    return seat, effects


def _free(seat: Seat, epoch: int) -> Step:
    """Free the run and the reservation if their epoch is not above `epoch`; close the run's move."""
    effects: tuple[Effect, ...] = ()
    if seat.run is not None and seat.run.epoch <= epoch:
        effects = _freed_run(seat, seat.run)
        seat = replace(seat, run=None)
    if seat.reservation is not None and seat.reservation.epoch <= epoch:
        seat, more = _free_reservation(seat, "dropped")
        effects += more
    return seat, effects


def _freed_run(seat: Seat, run: Run) -> tuple[Effect, ...]:
    move = run.move
    if move is None:
        return (Abort(run.slot),)
    if move.phase == "doubt":
        return (Abort(run.slot, MigrationReleased(migration=move.migration, blocks_freed=0)),)
    fact = _aborted(seat, move, "dropped", "the run was dropped")
    return (StopWork(move.migration), Abort(run.slot), Record(fact), Send(move.node, _cancel_of(seat, move)))


# --- the move at its source ----------------------------------------------------------------------


def _start(seat: Seat, what: Start, rules: Rules) -> Step:
    """Rule 3: only a confirmed owner with no open move."""
    order, run = what.command, seat.run
    refusal = _refusal(seat, order)
    if run is None or refusal is not None:
        code, reason = refusal or ("gone", "no such run here")
        if code == "repeated":
            return seat, ()
        fact = CommandRefused(migration=order.migration, owner=seat.me, code=code, reason=reason)
        return seat, (Record(fact),)
    move = Move(migration=order.migration, target=order.target, node=what.node)
    started = MigrationStarted(
        migration=order.migration, request=seat.request, epoch=run.epoch, source=seat.me, target=order.target
    )
    seat = replace(seat, run=replace(run, move=move))
    return seat, (Record(started), SendPrepare(run.slot, order.migration))


def _refusal(seat: Seat, order: StartMigration) -> tuple[str, str] | None:
    run = seat.run
    if run is None or run.is_finished:
        return "gone", "no such run here"
    if run.move is not None:
        is_same = run.move.migration == order.migration
        return ("repeated", "") if is_same else ("busy", f"{run.move.migration} is open")
    if run.freezing is not None:
        return "busy", f"{run.freezing} is not thawed yet"
    if run.epoch != order.epoch:
        return "stale_epoch", f"the run is at epoch {run.epoch}, the command at {order.epoch}"
    if not run.is_confirmed:
        return "unconfirmed", "the gateway has not confirmed this owner yet"
    if order.target.instance == seat.me.instance:
        return "same_instance", "source and target are the same"
    return None


def _moving(seat: Seat, migration: str) -> tuple[Run, Move] | None:
    """The run and its move, if that is the open one."""
    run = seat.run
    if run is None or run.move is None or run.move.migration != migration:
        return None
    return run, run.move


def _with_move(seat: Seat, run: Run, move: Move | None) -> Seat:
    return replace(seat, run=replace(run, move=move))


def _prepared(seat: Seat, sender: Node, what: Prepared) -> Step:
    """Rule 3, at the source. What a given-up move reserved is freed at once, not after its lease."""
    found = _moving(seat, what.migration)
    if found is None:
        return seat, (Send(sender, Cancel(request=seat.request, migration=what.migration)),)
    if found[1].phase != "preparing" or found[1].target != what.owner:
        return seat, ()
    run, move = found
    fact = MigrationPrepared(
        migration=move.migration,
        blocks_reserved=what.blocks_reserved,
        blocks_cached=what.blocks_cached,
        transfer=what.transfer,
    )
    if what.blocks_reserved == 0:
        seat, freeze = _freeze(seat, run, replace(move, prepared=what))
        return seat, (Record(fact), freeze)
    move = replace(move, phase="copying", prepared=what, next_block=what.blocks_cached)
    return _with_move(seat, run, move), (Record(fact), Copy(run.slot, move.migration, move.next_block))


def _prepare_refused(seat: Seat, what: PrepareRefused) -> Step:
    found = _moving(seat, what.migration)
    if found is None or found[1].target != what.owner:
        return seat, ()
    if found[1].phase == "doubt":
        return _deadline(seat, what.migration)
    return _give_up(seat, what.migration, what.code, what.reason, tell_target=False)


def _round_done(seat: Seat, what: RoundDone, rules: Rules) -> Step:
    found = _moving(seat, what.migration)
    if found is None or found[1].phase not in ("copying", "final"):
        return seat, ()
    run, move = found
    report, before = what.report, move.progress
    started = move.prepared_at_ms or what.now_ms - report.duration_ms
    progress = Progress(
        rounds=before.rounds + 1,
        copied_bytes=before.copied_bytes + report.copied_bytes,
        copying_ms=before.copying_ms + report.duration_ms,
        elapsed_ms=what.now_ms - started,
        blocks_left=report.blocks_left,
        blocks_left_before=before.blocks_left if before.rounds else None,
    )
    is_final = move.phase == "final"
    fact = RoundCopied(
        migration=move.migration,
        round=progress.rounds,
        blocks=report.blocks,
        copied_bytes=report.copied_bytes,
        duration_ms=report.duration_ms,
        is_final=is_final,
    )
    move = replace(move, progress=progress, next_block=report.next_block, prepared_at_ms=started)
    seat = _with_move(seat, run, move)
    if is_final:
        return _send_final(seat, run, move, Record(fact))
    return _after_round(seat, run, move, fact, rules)


def _after_round(seat: Seat, run: Run, move: Move, fact: Event, rules: Rules) -> Step:
    """Step 3 of DESIGN 7: another round, freeze, or give up."""
    stop_ms = predicted_stop_ms(move.progress, rules.block_bytes, rules.round_trip_ms)
    room = move.prepared.blocks_reserved if move.prepared else 0
    if move.next_block + move.progress.blocks_left > room:
        seat, effects = _give_up(seat, move.migration, "outgrew", f"the request outgrew {room} reserved blocks")
        return seat, (Record(fact), *effects)
    match next_step(move.progress, stop_ms, rules.limits):
        case "round":
            return seat, (Record(fact), Copy(run.slot, move.migration, move.next_block))
        case "freeze":
            seat, freeze = _freeze(seat, run, move)
            return seat, (Record(fact), freeze)
        case _:
            why = f"a stop of {stop_ms:.0f} ms is predicted after {move.progress.rounds} rounds"
            seat, effects = _give_up(seat, move.migration, "no_convergence", why)
            return seat, (Record(fact), *effects)


def _freeze(seat: Seat, run: Run, move: Move) -> tuple[Seat, Effect]:
    run = replace(run, freezing=move.migration)
    return _with_move(seat, run, replace(move, phase="freezing")), Freeze(run.slot, move.migration)


def _freeze_over(seat: Seat, migration: str) -> Seat:
    """The engine answered a `Freeze`."""
    run = seat.run
    if run is None or run.freezing != migration:
        return seat
    return replace(seat, run=replace(run, freezing=None))


def _work_failed(seat: Seat, what: WorkFailed) -> Step:
    """A copy or a freeze failed; one that was too slow may have frozen the run all the same."""
    thaw = (Thaw(seat.run.slot),) if seat.run is not None and seat.run.freezing == what.migration else ()
    seat, effects = _give_up(_freeze_over(seat, what.migration), what.migration, what.code, what.reason)
    return seat, (*thaw, *effects)


def _freeze_done(seat: Seat, what: FreezeDone) -> Step:
    seat = _freeze_over(seat, what.migration)
    found = _moving(seat, what.migration)
    if found is None:
        return seat, (Thaw(what.slot),)
    run, move = found
    if move.phase != "freezing" or move.prepared is None:
        return seat, ()
    state, room = what.state, move.prepared.blocks_reserved
    left = state.blocks - move.next_block
    move = replace(move, phase="final", state=state)
    seat = _with_move(seat, run, move)
    if state.blocks > room:
        return _give_up(seat, move.migration, "outgrew", f"the request outgrew {room} reserved blocks")
    fact = RequestFrozen(
        migration=move.migration,
        tokens=len(state.spec.prompt) + len(state.outputs),
        blocks_left=max(left, 0),
        predicted_stop_ms=0.0,
    )
    if left <= 0:
        return _send_final(seat, run, move, Record(fact))
    return seat, (Record(fact), Copy(run.slot, move.migration, move.next_block))


def _send_final(seat: Seat, run: Run, move: Move, *before: Effect) -> Step:
    """Rule 4: from here on only the gateway decides."""
    assert move.state is not None
    seat = _with_move(seat, run, replace(move, phase="doubt", state=None))
    return seat, (*before, SendFinal(run.slot, move.migration, move.state))


def _deadline(seat: Seat, migration: str) -> Step:
    found = _moving(seat, migration)
    if found is None:
        return seat, ()
    run, move = found
    if move.phase != "doubt":
        return _give_up(seat, migration, "no_answer", f"too long in {move.phase}")
    move = replace(move, is_reclaiming=True)
    return _with_move(seat, run, move), (Send(run.gateway, _reclaim_of(seat, run, move)),)


def _give_up(seat: Seat, migration: str, code: str, reason: str, *, tell_target: bool = True) -> Step:
    """End a move at the source and let the request go on, as long as that is the source's to decide."""
    found = _moving(seat, migration)
    if found is None or found[1].phase not in ABORTABLE:
        return seat, ()
    run, move = found
    effects: list[Effect] = [StopWork(migration)]
    if move.phase == "final":
        effects.append(Thaw(run.slot))
    effects.append(Record(_aborted(seat, move, code, reason)))
    if tell_target:
        effects.append(Send(move.node, _cancel_of(seat, move)))
    return _with_move(seat, run, None), tuple(effects)


def _aborted(seat: Seat, move: Move, code: str, reason: str) -> MigrationAborted:
    return MigrationAborted(migration=move.migration, request=seat.request, stage=move.phase, code=code, reason=reason)


def _cancel_of(seat: Seat, move: Move) -> Cancel:
    return Cancel(request=seat.request, migration=move.migration)


def _reclaim_of(seat: Seat, run: Run, move: Move) -> Reclaim:
    return Reclaim(request=seat.request, owner=seat.me, epoch=run.epoch, migration=move.migration)


def _granted(seat: Seat, what: Granted) -> Step:
    """Rule 8."""
    run = seat.run
    if run is None or run.epoch != what.from_epoch or run.move is None or run.move.phase != "doubt":
        return seat, ()
    move = run.move
    seat = replace(seat, seen=max(seat.seen, what.epoch), run=replace(run, epoch=what.epoch, move=None))
    fact = _aborted(seat, move, "reclaimed", "no answer from the target; the gateway gave the request back")
    return seat, (
        Thaw(run.slot),
        ResendTokens(run.slot),
        Record(fact),
        Send(move.node, _cancel_of(seat, move)),
    )


def _committed(seat: Seat, what: Committed) -> Step:
    """Rule 6, at the source: release."""
    found = _moving(seat, what.migration)
    if found is None or found[1].phase != "doubt" or found[0].epoch != what.epoch:
        return seat, ()
    return _free(seat, what.epoch)


# --- the move at its target ----------------------------------------------------------------------


def _prepare(seat: Seat, source: Node, what: Prepare) -> Step:
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
        address=reserved.address,
        handle=reserved.handle,
        blocks_reserved=reserved.blocks,
        blocks_cached=reserved.cached,
    )


def _reserving(seat: Seat, migration: str) -> Reservation | None:
    held = seat.reservation
    return held if held is not None and held.migration == migration else None


def _reserve_done(seat: Seat, what: ReserveDone) -> Step:
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


def _reserve_failed(seat: Seat, what: ReserveFailed) -> Step:
    held = _reserving(seat, what.migration)
    if held is None or held.phase != "reserving":
        return seat, ()
    refusal = _refuse(seat, held.source, what.migration, what.code, what.reason)
    return _closed(replace(seat, reservation=None), what.migration), (refusal,)


def _closed(seat: Seat, migration: str) -> Seat:
    """Remember that a move is over here."""
    if migration in seat.closed:
        return seat
    return replace(seat, closed=(*seat.closed, migration)[-CLOSED_MAX:])


def _cancel(seat: Seat, migration: str) -> Step:
    """Only what has not adopted; an adopted run is the gateway's to drop. May overtake its `Prepare`."""
    held = _reserving(seat, migration)
    if held is None:
        return _closed(seat, migration), ()
    if held.phase == "adopting":
        return seat, ()
    return _free_reservation(seat, "cancelled")


def _lease_expired(seat: Seat, migration: str) -> Step:
    held = _reserving(seat, migration)
    if held is None or held.phase == "adopting":
        return seat, ()
    return _free_reservation(seat, "expired")


def _free_reservation(seat: Seat, cause: str) -> Step:
    held = seat.reservation
    assert held is not None
    fact = ReservationEnded(migration=held.migration, owner=seat.me, cause=cause, blocks_freed=0)
    return _closed(replace(seat, reservation=None), held.migration), (Abort(held.slot, fact),)


def _final(seat: Seat, source: Node, what: Final) -> Step:
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


def _adopt_done(seat: Seat, what: AdoptDone) -> Step:
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
    return seat, (Record(fact), _send_adopted(run, adoption))


def _send_adopted(run: Run, adoption: Adoption) -> Effect:
    return SendAdopted(run.slot, adoption.migration, adoption.epoch, adoption.first)


def _adopt_failed(seat: Seat, what: AdoptFailed) -> Step:
    held = _reserving(seat, what.migration)
    if held is None or held.phase != "adopting":
        return seat, ()
    refusal = _refuse(seat, held.source, what.migration, what.code, what.reason)
    seat, freed = _free_reservation(seat, "failed")
    return seat, (*freed, refusal)


def _flipped(seat: Seat, what: Flipped) -> Step:
    """Rule 6, at the target."""
    run = seat.run
    if run is None or run.epoch != what.epoch or run.adoption is None:
        return seat, ()
    adoption = run.adoption
    run = replace(run, adoption=None, acknowledged=max(run.acknowledged, what.delivered))
    committed = Committed(request=seat.request, migration=adoption.migration, epoch=adoption.epoch)
    return replace(seat, run=run), (Send(adoption.source, committed), ResendTokens(run.slot))


# --- repetition ----------------------------------------------------------------------------------


def _repeats(seat: Seat) -> Iterable[Effect]:
    """What may have been lost: asking again is always safe."""
    run = seat.run
    if run is None:
        return
    if run.adoption is not None:
        yield _send_adopted(run, run.adoption)
    if run.move is not None and run.move.phase == "preparing":
        yield SendPrepare(run.slot, run.move.migration)
    if run.move is not None and run.move.is_reclaiming:
        yield Send(run.gateway, _reclaim_of(seat, run, run.move))
