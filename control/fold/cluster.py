"""What facts about the log and the cluster as a whole do to the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from midstream.control.events import Event, Fact, GenerationOpened, PolicyConfigured, TickElapsed
from midstream.control.ids import START
from midstream.control.state import State

UNWATCHED_MS: Final = 2_500
"""Two ticks further apart than this mean that no controller watched: the time between counts for nobody's silence."""


def _generation_opened(state: State, fact: Fact, event: GenerationOpened) -> None:
    if event.generation > state.generation:
        state.generation = event.generation
        state.committed = START
        state.control_seq = 0
        state.uncarried = []


def _policy_configured(state: State, fact: Fact, event: PolicyConfigured) -> None:
    state.policies = event.policies


def _tick_elapsed(state: State, fact: Fact, event: TickElapsed) -> None:
    gap = event.now_ms - state.last_tick_ms
    if gap > UNWATCHED_MS:
        _excuse(state, gap)
    state.last_tick_ms = max(state.last_tick_ms, event.now_ms)


def _excuse(state: State, gap_ms: int) -> None:
    """Instances and open moves are not to blame for a time in which no controller listened."""
    for name, view in state.instances.items():
        state.instances[name] = replace(view, reported_at_ms=view.reported_at_ms + gap_ms)
    for migration, move in state.migrations.items():
        if move.is_open:
            state.migrations[migration] = replace(move, stage_at_ms=move.stage_at_ms + gap_ms)


HANDLERS: Final[dict[type[Event], Callable[[State, Fact, Any], None]]] = {
    GenerationOpened: _generation_opened,
    PolicyConfigured: _policy_configured,
    TickElapsed: _tick_elapsed,
}
