"""State as a fold over the log: each fact changes the tables it speaks of, once. Pure.

Silence, cool-downs and the age of a move are measured in the log's own time, `State.last_tick_ms`: the clock of
the source that said a fact may be wrong and must not make anything older or younger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from midstream.control import codec
from midstream.control.events import (
    Entry,
    Event,
    Fact,
    FactsDropped,
    FactsMissed,
    GatewayStarted,
    ReservationEnded,
    StateCarried,
    TaskFailed,
)
from midstream.control.fold import cluster, instances, migrations, requests, scaling
from midstream.control.fold.cluster import UNWATCHED_MS
from midstream.control.ids import COMMIT_SOURCE
from midstream.control.state import SourceMark, State

__all__ = ["HANDLERS", "NO_EFFECT", "UNWATCHED_MS", "apply", "fold"]

UNCARRIED_MAX: Final = 200_000
"""Entries held between a generation's opening and its first commit; later ones count only for the old tables."""

Handler = Callable[[State, Fact, Any], None]


def _state_carried(state: State, fact: Fact, event: StateCarried) -> None:
    """The carried fold, brought up to here, replaces ours; where the log stands is the log's and stays."""
    carried = codec.decode_state(event.state)
    for entry in state.uncarried:
        if entry.position > carried.position:
            apply(carried, entry)
    carried.position = state.position
    carried.committed = state.committed
    carried.control_seq = state.control_seq
    carried.generation = state.generation
    carried.sources[fact.source] = state.sources[fact.source]
    carried.uncarried = []
    for field in State.__struct_fields__:
        setattr(state, field, getattr(carried, field))


HANDLERS: Final[dict[type[Event], Handler]] = {
    **cluster.HANDLERS,
    **instances.HANDLERS,
    **requests.HANDLERS,
    **migrations.HANDLERS,
    **scaling.HANDLERS,
    StateCarried: _state_carried,
}
"""What each kind of fact does to the state."""

NO_EFFECT: Final[frozenset[type[Event]]] = frozenset(
    {TaskFailed, FactsMissed, FactsDropped, ReservationEnded, GatewayStarted}
)
"""Kinds that are for people and the archive only; a start shows by its incarnation."""


def fold(entries: Iterable[Entry], state: State | None = None) -> State:
    """Apply entries in order, onto `state` (changed in place) or onto nothing."""
    state = State() if state is None else state
    for entry in entries:
        apply(state, entry)
    return state


def apply(state: State, entry: Entry) -> bool:
    """Let one entry change the state; `False` if its fact had been seen, came from the past, or is no fact.

    The position always moves on. Identity is (source, incarnation, source_seq): an older incarnation of a source is
    ignored, a newer one starts afresh, a jump in the numbers is counted in `gaps` and applied.
    """
    position, fact = entry.position, entry.fact
    state.position = max(state.position, position)
    is_uncarried = state.generation > 0 and not state.control_seq and fact.source != COMMIT_SOURCE
    if is_uncarried and len(state.uncarried) < UNCARRIED_MAX:
        state.uncarried.append(entry)
    mark = state.sources.get(fact.source)
    if mark is None:
        expected = 1
    elif mark.incarnation == fact.incarnation:
        expected = mark.seq + 1
    elif mark.incarnation > fact.incarnation:
        return False
    else:
        expected = 1
        requests.forget_gateway(state, fact.source)
    seq = fact.source_seq
    if seq != expected:
        if seq < expected:
            return False
        state.gaps += 1
    state.sources[fact.source] = SourceMark(fact.incarnation, seq)
    if fact.source == COMMIT_SOURCE:
        state.committed = position
        state.control_seq = seq
    handler = HANDLERS.get(type(fact.event))
    if handler is not None:
        handler(state, fact, fact.event)
    return True
