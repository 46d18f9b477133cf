"""Facts about moves, one per transition. `epoch` is always the epoch the move starts from.

Said by: the admin API (`MoveRequested`), controllers (`MoveDecided`, `MoveRejected`), source and target
llumlets, and the gateway, whose `MigrationCommitted` is the only proof that ownership changed.
"""

from __future__ import annotations

from typing import Any

from midstream.control.events.base import Event, event
from midstream.control.ids import Owner, Position


@event
class MoveRequested(Event, frozen=True, kw_only=True):
    """Somebody asked for a move by hand. Without a target the controller chooses one."""

    operation: str
    request: str
    target: str | None
    actor: str
    mode: str = "live"
    """`live`: KV is copied while the request decodes on. `blocking`: once it is frozen. `recompute`: not at all."""


@event
class MoveRejected(Event, frozen=True, kw_only=True):
    """The controller will not order a move somebody asked for; nothing happened."""

    operation: str
    code: str
    reason: str


@event
class MoveDecided(Event, frozen=True, kw_only=True):
    """The controller ordered a move; the command was appended in the same atomic step."""

    migration: str
    request: str
    epoch: int
    source: Owner
    target: Owner
    policy: str
    policy_version: int
    params: dict[str, Any]
    candidates: tuple[tuple[str, float], ...]
    """(instance, score) weighed as targets, best first, at most 8."""
    reason: str
    decided_at: Position
    """The decision is a function of the fold up to here and the tick."""
    blocks_needed: int
    """Blocks the target must have: counted against it until the move closes."""
    operation: str | None = None
    mode: str = "live"
    """How, as in `MoveRequested`."""


@event
class CommandRefused(Event, frozen=True, kw_only=True):
    """A llumlet refused a command before doing anything. `code` is for machines."""

    migration: str
    owner: Owner
    code: str
    reason: str


@event
class MigrationStarted(Event, frozen=True, kw_only=True):
    """The source asked the target to prepare."""

    migration: str
    request: str
    epoch: int
    source: Owner
    target: Owner


@event
class MigrationPrepared(Event, frozen=True, kw_only=True):
    """The target reserved blocks (said by the source when it learns of it)."""

    migration: str
    blocks_reserved: int
    blocks_cached: int
    """Leading blocks the target already holds in its prefix cache; they are not sent."""
    transfer: str
    """Transfer backend agreed on."""
    transfer_why: str = ""
    """Why this one and no better: what both ends have. `@place` behind a name: only within that place."""


@event
class RoundCopied(Event, frozen=True, kw_only=True):
    """One round of full blocks arrived while the source decoded on. The final round has `is_final`."""

    migration: str
    round: int
    blocks: int
    copied_bytes: int
    duration_ms: float
    is_final: bool = False


@event
class RequestFrozen(Event, frozen=True, kw_only=True):
    """The source took the request out of its batch: the client's pause starts."""

    migration: str
    tokens: int
    blocks_left: int
    predicted_stop_ms: float


@event
class MigrationAdopted(Event, frozen=True, kw_only=True):
    """The target runs the request at epoch + 1; nobody has confirmed it yet."""

    migration: str
    request: str
    target: Owner
    freeze_to_adopt_ms: float | None = None
    """Wall time from freeze to adoption, where both clocks are one machine's."""


@event
class MigrationCommitted(Event, frozen=True, kw_only=True):
    """The gateway's ledger flipped: the target owns the request at `epoch` + 1."""

    migration: str
    request: str
    epoch: int
    owner: Owner
    """The new owner."""
    tail_tokens: int
    """Tokens the gateway took from the hand-over instead of the source's stream."""


@event
class DowntimeMeasured(Event, frozen=True, kw_only=True):
    """The gap at the seam as the gateway saw it."""

    migration: str
    gap_ms: float
    normal_gap_ms: float
    """The request's mean gap before the move."""
    downtime_ms: float
    """gap_ms - normal_gap_ms, not below 0."""


@event
class MigrationReleased(Event, frozen=True, kw_only=True):
    """The source freed its copy."""

    migration: str
    blocks_freed: int


@event
class MigrationAborted(Event, frozen=True, kw_only=True):
    """The move ended without a change of owner; the request goes on at the source or ended there."""

    migration: str
    request: str
    stage: str
    code: str
    reason: str


@event
class MigrationReclaimed(Event, frozen=True, kw_only=True):
    """The gateway gave a request in doubt back to its source, at `epoch` + 2."""

    migration: str
    request: str
    epoch: int
    owner: Owner


@event
class ReservationEnded(Event, frozen=True, kw_only=True):
    """The target freed a reservation that was not adopted. `cause`: `cancelled expired dropped failed`."""

    migration: str
    owner: Owner
    cause: str
    blocks_freed: int
