"""What facts about moves do to the state: how far each came, and who owns the request now.

Facts of source, target and gateway reach the log in any order, so a move only ever goes forward; the gateway's
`MigrationCommitted` alone changes the owner, and overrules an abort that was presumed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from midstream.control.events import (
    CommandRefused,
    DowntimeMeasured,
    Event,
    Fact,
    MigrationAborted,
    MigrationAdopted,
    MigrationCommitted,
    MigrationPrepared,
    MigrationReclaimed,
    MigrationReleased,
    MigrationStarted,
    MoveDecided,
    MoveRejected,
    MoveRequested,
    RequestFrozen,
    RoundCopied,
)
from midstream.control.fold import operations
from midstream.control.fold.instances import change, current
from midstream.control.fold.requests import place, unplace
from midstream.control.state import MigrationView, State

PAIR_CODES: Final = frozenset({"transfer_failed", "no_connection", "no_transfer"})
"""Ends of a move that say its pair cannot connect (P26)."""

_RANK: Final = {
    stage: rank for rank, stage in enumerate(("decided", "started", "prepared", "copying", "frozen", "adopted"))
}


def _requested(state: State, fact: Fact, event: MoveRequested) -> None:
    operations.accept(
        state,
        fact,
        event.operation,
        kind="move",
        actor=event.actor,
        subject=event.request,
        target=event.target,
        mode=event.mode,
    )


def _rejected(state: State, fact: Fact, event: MoveRejected) -> None:
    operations.fail(state, event.operation, event.code, event.reason)


def _decided(state: State, fact: Fact, event: MoveDecided) -> None:
    state.migrations[event.migration] = MigrationView(
        migration=event.migration,
        request=event.request,
        epoch=event.epoch,
        source=event.source,
        target=event.target,
        policy=event.policy,
        reason=event.reason,
        decided_at_ms=fact.at_ms,
        decided_at=event.decided_at,
        stage_at_ms=state.last_tick_ms,
        blocks_needed=event.blocks_needed,
        operation=event.operation,
        mode=event.mode,
    )
    operations.forget_closed(state.migrations, lambda move: move.is_open)
    view = state.requests.get(event.request)
    if view is not None and view.epoch == event.epoch:
        state.requests[event.request] = replace(view, migration=event.migration)
    operations.run(state, event.operation, event.migration)


def _started(state: State, fact: Fact, event: MigrationStarted) -> None:
    _advance(state, event.migration, "started")


def _prepared(state: State, fact: Fact, event: MigrationPrepared) -> None:
    _advance(state, event.migration, "prepared")


def _round_copied(state: State, fact: Fact, event: RoundCopied) -> None:
    move = state.migrations.get(event.migration)
    if move is not None:
        state.migrations[event.migration] = replace(
            move,
            rounds=move.rounds + 1,
            copied_blocks=move.copied_blocks + event.blocks,
            copied_bytes=move.copied_bytes + event.copied_bytes,
        )
        _advance(state, event.migration, "copying")


def _frozen(state: State, fact: Fact, event: RequestFrozen) -> None:
    _advance(state, event.migration, "frozen")


def _adopted(state: State, fact: Fact, event: MigrationAdopted) -> None:
    _advance(state, event.migration, "adopted")


def _advance(state: State, migration: str, stage: str) -> None:
    """Mark progress of an open move, never backwards."""
    move = state.migrations.get(migration)
    if move is not None and move.is_open:
        later = max(stage, move.stage, key=_RANK.__getitem__)
        state.migrations[migration] = replace(move, stage=later, stage_at_ms=state.last_tick_ms)


def _committed(state: State, fact: Fact, event: MigrationCommitted) -> None:
    view = state.requests.get(event.request)
    if view is not None and view.epoch == event.epoch:
        unplace(state, view)
        moved = replace(
            view,
            owner=event.owner,
            epoch=event.epoch + 1,
            migration=None,
            moved_at_ms=state.last_tick_ms,
            moved_from=view.owner.instance,
            moves=view.moves + 1,
        )
        place(state, moved)
    move = state.migrations.get(event.migration)
    if move is not None:
        _close(state, move, "committed")
        _readmit_pair(state, move)


def _reclaimed(state: State, fact: Fact, event: MigrationReclaimed) -> None:
    view = state.requests.get(event.request)
    if view is not None and view.epoch == event.epoch and view.owner == event.owner:
        state.requests[event.request] = replace(view, epoch=event.epoch + 2, migration=None)
    move = state.migrations.get(event.migration)
    if move is not None and move.is_open:
        _close(state, move, "aborted", "reclaimed", "the gateway gave the request back to its source")


def _released(state: State, fact: Fact, event: MigrationReleased) -> None:
    """The source freed its copy. Only the gateway's word tells whether the move succeeded, and it may come later: until
    then the move stays open, as epoch and owner of the request are still those of before.
    """
    move = state.migrations.get(event.migration)
    if move is not None and move.stage == "committed":
        state.migrations[move.migration] = replace(move, stage="released", stage_at_ms=state.last_tick_ms)


def _aborted(state: State, fact: Fact, event: MigrationAborted) -> None:
    move = state.migrations.get(event.migration)
    if move is not None and move.is_open:
        _close(state, move, "aborted", event.code, event.reason)
        if event.code in PAIR_CODES:
            _exclude_pair(state, move)


def _refused(state: State, fact: Fact, event: CommandRefused) -> None:
    move = state.migrations.get(event.migration)
    if move is not None and move.is_open:
        _close(state, move, "refused", event.code, event.reason)


def _downtime_measured(state: State, fact: Fact, event: DowntimeMeasured) -> None:
    move = state.migrations.get(event.migration)
    if move is not None:
        state.migrations[event.migration] = replace(move, downtime_ms=event.downtime_ms)


def _close(state: State, move: MigrationView, stage: str, code: str | None = None, detail: str | None = None) -> None:
    state.migrations[move.migration] = replace(
        move, stage=stage, stage_at_ms=state.last_tick_ms, code=code, detail=detail
    )
    view = state.requests.get(move.request)
    if view is not None and view.migration == move.migration:
        state.requests[move.request] = replace(view, migration=None)
    if code is None:
        operations.succeed(state, move.operation)
    else:
        operations.fail(state, move.operation, code, detail)


def _exclude_pair(state: State, move: MigrationView) -> None:
    source = current(state, move.source)
    if source is not None:
        now, target = state.last_tick_ms, move.target.instance
        kept = tuple(pair for pair in source.pair_failures if pair[0] != target and pair[1] > now)
        until = now + state.policies.pair_backoff_ms
        change(state, move.source, pair_failures=(*kept, (target, until)))


def _readmit_pair(state: State, move: MigrationView) -> None:
    source = current(state, move.source)
    if source is not None and source.pair_failures:
        kept = tuple(pair for pair in source.pair_failures if pair[0] != move.target.instance)
        change(state, move.source, pair_failures=kept)


HANDLERS: Final[dict[type[Event], Callable[[State, Fact, Any], None]]] = {
    MoveRequested: _requested,
    MoveRejected: _rejected,
    MoveDecided: _decided,
    CommandRefused: _refused,
    MigrationStarted: _started,
    MigrationPrepared: _prepared,
    RoundCopied: _round_copied,
    RequestFrozen: _frozen,
    MigrationAdopted: _adopted,
    MigrationCommitted: _committed,
    DowntimeMeasured: _downtime_measured,
    MigrationReleased: _released,
    MigrationAborted: _aborted,
    MigrationReclaimed: _reclaimed,
}
