"""The move at its source.

Phases: `preparing` → `copying` → `freezing` → `final` (last copy) → `doubt` (`Final` was sent). Until `Final` the
source may resume by itself; afterwards only the gateway decides. A blocking move has no `copying`, one that
recomputes no `final` either: neither knows a state or an answer that a live move does not.
"""

from __future__ import annotations

from midstream.control.commands import StartMigration
from midstream.control.events import (
    CommandRefused,
    Event,
    MigrationPrepared,
    MigrationStarted,
    RequestFrozen,
    RoundCopied,
)
from midstream.control.ids import Node
from midstream.migration.plan import BLOCKING, MODES, RECOMPUTE, Progress, next_step, predicted_stop_ms
from midstream.migration.protocol.effects import (
    Copy,
    Effect,
    Freeze,
    Record,
    ResendTokens,
    Send,
    SendFinal,
    SendPrepare,
    StopWork,
    Thaw,
)
from midstream.migration.protocol.freeing import aborted, cancel_of, free
from midstream.migration.protocol.holdings import Move, Rules, Run, Seat, Step, replace
from midstream.migration.protocol.inputs import FreezeDone, RoundDone, Start, WorkFailed
from midstream.migration.protocol.messages import (
    Cancel,
    Committed,
    Granted,
    Prepared,
    PrepareRefused,
    Reclaim,
    RunState,
)

ABORTABLE = ("preparing", "copying", "freezing", "final")
"""Phases in which the source may give the move up by itself."""


def start(seat: Seat, what: Start, rules: Rules) -> Step:
    """Rule 3: only a confirmed owner with no open move."""
    order, run = what.command, seat.run
    refusal = _refusal(seat, order)
    if run is None or refusal is not None:
        code, reason = refusal or ("gone", "no such run here")
        if code == "repeated":
            return seat, ()
        fact = CommandRefused(migration=order.migration, owner=seat.me, code=code, reason=reason)
        return seat, (Record(fact),)
    move = Move(migration=order.migration, target=order.target, node=what.node, mode=order.mode)
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
    if order.mode not in MODES:
        return "unknown_mode", f"{order.mode!r} is none of {', '.join(MODES)}"
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


def prepared(seat: Seat, sender: Node, what: Prepared) -> Step:
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
        transfer_why=what.why,
    )
    move = replace(move, prepared=what, next_block=what.blocks_cached)
    if what.blocks_reserved == 0 or move.mode == BLOCKING:
        seat, freeze = _freeze(seat, run, move)
        return seat, (Record(fact), freeze)
    move = replace(move, phase="copying")
    return _with_move(seat, run, move), (Record(fact), Copy(run.slot, move.migration, move.next_block))


def prepare_refused(seat: Seat, what: PrepareRefused) -> Step:
    found = _moving(seat, what.migration)
    if found is None or found[1].target != what.owner:
        return seat, ()
    if found[1].phase == "doubt":
        return deadline(seat, what.migration)
    return give_up(seat, what.migration, what.code, what.reason, tell_target=False)


def round_done(seat: Seat, what: RoundDone, rules: Rules) -> Step:
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
    """Another round, freeze, or give up."""
    stop_ms = predicted_stop_ms(move.progress, rules.block_bytes, rules.round_trip_ms)
    room = move.prepared.blocks_reserved if move.prepared else 0
    if move.next_block + move.progress.blocks_left > room:
        seat, effects = give_up(seat, move.migration, "outgrew", f"the request outgrew {room} reserved blocks")
        return seat, (Record(fact), *effects)
    match next_step(move.progress, stop_ms, rules.limits):
        case "round":
            return seat, (Record(fact), Copy(run.slot, move.migration, move.next_block))
        case "freeze":
            seat, freeze = _freeze(seat, run, move)
            return seat, (Record(fact), freeze)
        case _:
            why = f"a stop of {stop_ms:.0f} ms is predicted after {move.progress.rounds} rounds"
            seat, effects = give_up(seat, move.migration, "no_convergence", why)
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


def work_failed(seat: Seat, what: WorkFailed) -> Step:
    """A copy or a freeze failed; one that was too slow may have frozen the run all the same."""
    thaw = (Thaw(seat.run.slot),) if seat.run is not None and seat.run.freezing == what.migration else ()
    seat, effects = give_up(_freeze_over(seat, what.migration), what.migration, what.code, what.reason)
    return seat, (*thaw, *effects)


def freeze_done(seat: Seat, what: FreezeDone, rules: Rules) -> Step:
    seat = _freeze_over(seat, what.migration)
    found = _moving(seat, what.migration)
    if found is None:
        return seat, (Thaw(what.slot),)
    run, move = found
    if move.phase != "freezing" or move.prepared is None:
        return seat, ()
    state, room = handed_over(what.state, move.mode), move.prepared.blocks_reserved
    left = state.blocks - move.next_block
    move = replace(move, phase="final", state=state)
    seat = _with_move(seat, run, move)
    if state.blocks > room:
        return give_up(seat, move.migration, "outgrew", f"the request outgrew {room} reserved blocks")
    progress = replace(move.progress, blocks_left=max(left, 0))
    fact = RequestFrozen(
        migration=move.migration,
        tokens=len(state.spec.prompt) + len(state.outputs),
        blocks_left=max(left, 0),
        predicted_stop_ms=predicted_stop_ms(progress, rules.block_bytes, rules.round_trip_ms),
    )
    if left <= 0:
        return _send_final(seat, run, move, Record(fact))
    return seat, (Record(fact), Copy(run.slot, move.migration, move.next_block))


def handed_over(state: RunState, mode: str) -> RunState:
    """What the target is given of a frozen run: without KV it goes on as one that was preempted."""
    return replace(state, computed=0, blocks=0) if mode == RECOMPUTE else state


def _send_final(seat: Seat, run: Run, move: Move, *before: Effect) -> Step:
    """Rule 4: from here on only the gateway decides."""
    assert move.state is not None
    seat = _with_move(seat, run, replace(move, phase="doubt", state=None))
    return seat, (*before, SendFinal(run.slot, move.migration, move.state))


def deadline(seat: Seat, migration: str) -> Step:
    found = _moving(seat, migration)
    if found is None:
        return seat, ()
    run, move = found
    if move.phase != "doubt":
        return give_up(seat, migration, "no_answer", f"too long in {move.phase}")
    move = replace(move, is_reclaiming=True)
    return _with_move(seat, run, move), (Send(run.gateway, reclaim_of(seat, run, move)),)


def give_up(seat: Seat, migration: str, code: str, reason: str, *, tell_target: bool = True) -> Step:
    """End a move at the source and let the request go on, as long as that is the source's to decide."""
    found = _moving(seat, migration)
    if found is None or found[1].phase not in ABORTABLE:
        return seat, ()
    run, move = found
    effects: list[Effect] = [StopWork(migration)]
    if move.phase == "final":
        effects.append(Thaw(run.slot))
    effects.append(Record(aborted(seat, move, code, reason)))
    if tell_target:
        effects.append(Send(move.node, cancel_of(seat, move)))
    return _with_move(seat, run, None), tuple(effects)


def reclaim_of(seat: Seat, run: Run, move: Move) -> Reclaim:
    return Reclaim(request=seat.request, owner=seat.me, epoch=run.epoch, migration=move.migration)


def granted(seat: Seat, what: Granted) -> Step:
    """Rule 8."""
    run = seat.run
    if run is None or run.epoch != what.from_epoch or run.move is None or run.move.phase != "doubt":
        return seat, ()
    move = run.move
    seat = replace(seat, seen=max(seat.seen, what.epoch), run=replace(run, epoch=what.epoch, move=None))
    fact = aborted(seat, move, "reclaimed", "no answer from the target; the gateway gave the request back")
    return seat, (
        Thaw(run.slot),
        ResendTokens(run.slot),
        Record(fact),
        Send(move.node, cancel_of(seat, move)),
    )


def committed(seat: Seat, what: Committed) -> Step:
    """Rule 6, at the source: release."""
    found = _moving(seat, what.migration)
    if found is None or found[1].phase != "doubt" or found[0].epoch != what.epoch:
        return seat, ()
    return free(seat, what.epoch)
