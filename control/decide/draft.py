"""A decision while it is being made: facts and the commands they cause, in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from midstream.control.commands import Command, StartMigration
from midstream.control.events import Event, MoveDecided, TickElapsed
from midstream.control.ids import migration_id
from midstream.control.policies.base import CANDIDATES_MAX, Proposal, finite
from midstream.control.policies.room import Problem, Room
from midstream.control.state import State
from midstream.migration.plan import LIVE


class Decision(msgspec.Struct, frozen=True):
    """What one tick leads to, besides the tick itself: to be committed in one atomic step, or not at all."""

    events: tuple[Event, ...]
    commands: tuple[Command, ...]


class Watch(Protocol):
    """Is told how a decision comes about, for explanations. What it does has no influence."""

    def ordered(self, move: MoveDecided, room: Room) -> None:
        """A move was ordered; `room` does not count it yet."""
        ...

    def refused(self, proposal: Proposal, policy: str, problem: Problem) -> None:
        """The limits refused what a policy wanted."""
        ...


class Draft:
    """Collects one tick's facts and commands; an ordered move is counted in `room` at once."""

    def __init__(self, state: State, tick: TickElapsed, room: Room, watch: Watch | None = None) -> None:
        self.tick = tick
        self._state = state
        self._room = room
        self._watch = watch
        self._events: list[Event] = []
        self._commands: list[Command] = []

    def say(self, events: Iterable[Event]) -> None:
        """Add facts that need no command."""
        self._events.extend(events)

    def order(
        self,
        proposal: Proposal,
        *,
        policy: str,
        version: int,
        params: msgspec.Struct,
        operation: str | None = None,
        mode: str = LIVE,
    ) -> None:
        """Add a move: one fact and its one command (P18). Request and target must exist."""
        view = self._state.requests[proposal.request]
        target = self._state.instances[proposal.target]
        migration = migration_id(self.tick.decided_at, len(self._commands))
        move = MoveDecided(
            migration=migration,
            request=view.request,
            epoch=view.epoch,
            source=view.owner,
            target=target.owner,
            policy=policy,
            policy_version=version,
            params=_plain(params),
            candidates=tuple((name, finite(score)) for name, score in proposal.candidates[:CANDIDATES_MAX]),
            reason=proposal.reason,
            decided_at=self.tick.decided_at,
            blocks_needed=proposal.blocks_needed,
            operation=operation,
            mode=mode,
        )
        self._events.append(move)
        self._commands.append(
            StartMigration(
                id=f"{migration}/start",
                instance=view.owner.instance,
                incarnation=view.owner.incarnation,
                deadline_ms=self.tick.now_ms + self._state.policies.decision_ttl_ms,
                migration=migration,
                request=view.request,
                epoch=view.epoch,
                target=target.owner,
                target_address=target.address,
                mode=mode,
            )
        )
        if self._watch is not None:
            self._watch.ordered(move, self._room)
        self._room.take(view, proposal.target, proposal.blocks_needed)

    def refuse(self, proposal: Proposal, *, policy: str, problem: Problem) -> None:
        """Order nothing. That is no fact: deciding again tells it."""
        if self._watch is not None:
            self._watch.refused(proposal, policy, problem)

    def decision(self) -> Decision:
        """All of it."""
        return Decision(tuple(self._events), tuple(self._commands))


def _plain(params: msgspec.Struct) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(params)
    return plain
