"""What one incarnation of an instance holds of one request: a run, a reservation, its part in a move."""

from __future__ import annotations

import msgspec

from midstream.control.ids import Node, Owner
from midstream.migration.plan import LIVE, PlanLimits, Progress
from midstream.migration.protocol.effects import (
    Effect,
)
from midstream.migration.protocol.messages import (
    Prepared,
    RunState,
)
from midstream.migration.protocol.work import Reserved

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
    mode: str = LIVE
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


Step = tuple[Seat, tuple[Effect, ...]]

replace = msgspec.structs.replace


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What `step` needs to know of its instance."""

    here: Node
    block_bytes: int
    limits: PlanLimits = PlanLimits()
    round_trip_ms: float = 1.0
