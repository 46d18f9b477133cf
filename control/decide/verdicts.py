"""What a controller says of instances and moves: suspect, lost, restored, drained, stuck."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from midstream.control.events import (
    Event,
    InstanceDrained,
    InstanceLost,
    InstanceRestored,
    InstanceSuspected,
    MigrationAborted,
)
from midstream.control.fold import UNWATCHED_MS
from midstream.control.ids import Owner
from midstream.control.policies.room import Room
from midstream.control.state import InstanceView, MigrationView, State

STUCK_GRACE_MS: Final = 30_000
"""Besides the command's time to live, how long a move may show no progress; above every limit of the move itself."""

Verdict = InstanceSuspected | InstanceLost | InstanceRestored


def health(state: State, now_ms: int) -> list[Verdict]:
    """Verdicts on health. One missed report kills nothing: loss takes long silence and a gateway's word (P25)."""
    return [verdict for view in state.instances.values() for verdict in _judge(state, view, now_ms)]


def is_down_verdict(verdict: Verdict) -> bool:
    """Does it take the instance out of use."""
    return not isinstance(verdict, InstanceRestored)


def silent_ms(state: State, view: InstanceView, now_ms: int) -> int:
    """How long an instance has not reported, in the log's time; time in which no controller watched is left out."""
    last = state.last_tick_ms
    if view.reported_at_ms >= last:
        return 0
    watched_until = now_ms if now_ms - last <= UNWATCHED_MS else last
    return watched_until - view.reported_at_ms


def _judge(state: State, view: InstanceView, now_ms: int) -> Iterator[Verdict]:
    if view.health == "stopped":
        return
    silent = silent_ms(state, view, now_ms)
    is_silent = silent >= state.policies.suspect_after_ms
    if view.health == "up":
        if is_silent:
            yield _worst(state, view, silent)
    elif not is_silent:
        yield InstanceRestored(owner=view.owner)
    elif view.health == "suspect":
        verdict = _worst(state, view, silent)
        if isinstance(verdict, InstanceLost):
            yield verdict
    elif not view.witnesses:
        yield InstanceRestored(owner=view.owner)
        yield InstanceSuspected(owner=view.owner, silent_ms=silent)


def _worst(state: State, view: InstanceView, silent: int) -> InstanceSuspected | InstanceLost:
    if silent >= state.policies.lost_after_ms and view.witnesses:
        return InstanceLost(owner=view.owner, silent_ms=silent, witnesses=view.witnesses)
    return InstanceSuspected(owner=view.owner, silent_ms=silent)


def drained(state: State, room: Room) -> list[Event]:
    """Draining instances that have nothing left: no request, no queue, no reservation, no move on its way (P16)."""
    return [
        InstanceDrained(owner=view.owner)
        for name, view in state.instances.items()
        if view.is_draining and not view.is_drained and _is_empty(state, view) and room.is_idle(name)
    ]


def _is_empty(state: State, view: InstanceView) -> bool:
    load = view.load
    return (
        view.health in ("up", "suspect")
        and not state.placed.get(view.owner.instance)
        and load.running == 0
        and load.waiting == 0
        and load.blocks_reserved == 0
    )


def stuck(state: State, now_ms: int) -> list[Event]:
    """Ends of moves that nobody else will end, because a side died or no word came for long.

    A presumed end is harmless: should the gateway have flipped after all, its fact overrules this one.
    """
    return [
        MigrationAborted(migration=move.migration, request=move.request, stage=move.stage, code=code, reason=reason)
        for move in state.migrations.values()
        if move.is_open
        for code, reason in _end(state, move, now_ms - move.stage_at_ms)
    ]


def _end(state: State, move: MigrationView, still_ms: int) -> Iterator[tuple[str, str]]:
    ttl = state.policies.decision_ttl_ms
    if still_ms < ttl:
        return
    if not _is_there(state, move.source):
        yield "source_lost", f"{move.source} is gone; the move stood still for {still_ms} ms"
    elif not _is_there(state, move.target):
        yield "target_lost", f"{move.target} is gone; the move stood still for {still_ms} ms"
    elif move.request not in state.requests:
        yield "request_ended", f"{move.request} has ended; the move stood still for {still_ms} ms"
    elif still_ms >= ttl + STUCK_GRACE_MS:
        yield "no_answer", f"nobody said anything of the move for {still_ms} ms"


def _is_there(state: State, owner: Owner) -> bool:
    view = state.instances.get(owner.instance)
    return view is not None and view.owner == owner and view.health in ("up", "suspect")
