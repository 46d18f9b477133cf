"""What can happen to a seat: messages, commands that passed their checks, engine answers, timers."""

from __future__ import annotations

import msgspec

from midstream.control.commands import StartMigration
from midstream.control.ids import Node
from midstream.migration.protocol.messages import (
    Acknowledge,
    Cancel,
    Committed,
    Dispatch,
    Drop,
    Final,
    Flipped,
    Granted,
    Prepare,
    Prepared,
    PrepareRefused,
    Probe,
    RunState,
)
from midstream.migration.protocol.work import Reserved, RoundReport


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
