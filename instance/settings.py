"""The timers and bounds of a llumlet, and the relations that must hold between them."""

from __future__ import annotations

from typing import Literal

import msgspec

from midstream.control.errors import BadInput
from midstream.migration.plan import PlanLimits


class LlumletSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times in milliseconds unless the name says otherwise. Start values: docs/protocol.md."""

    plan: PlanLimits = PlanLimits()
    checksum: bool = False
    role: Literal["mixed", "prefill", "decode"] = "mixed"
    """What new requests it gets: all; all, until their first token; none, but those of the others then."""
    prepare_ms: float = 1_000
    freeze_ms: float = 1_000
    decision_ms: float = 300
    """Silence after `Final` before the source asks the gateway to reclaim."""
    lease_ms: float = 15_000
    """Life of a reservation that is neither adopted nor cancelled."""
    gateway_lease_ms: float = 10_000
    """Silence of a gateway after which its runs are dropped."""
    engine_ms: float = 5_000
    """Bound on any single engine call besides copies."""
    repeat_ms: float = 200
    resend_ms: float = 300
    housekeeping_ms: float = 50
    report_min_ms: float = 100
    report_max_ms: float = 1_000
    round_trip_ms: float = 1.0
    command_wait_ms: int = 1_000
    seat_memory_ms: float = 120_000
    """How long an empty seat remembers the epochs it has seen."""

    def __post_init__(self) -> None:
        longest = self.prepare_ms + self.plan.copy_max_ms + self.freeze_ms + self.plan.stop_max_ms
        if longest >= self.lease_ms:
            raise BadInput(
                f"a move may take {longest:.0f} ms, longer than the reservation's lease of {self.lease_ms:.0f} ms"
            )
        if self.plan.stop_max_ms >= self.decision_ms:
            raise BadInput("the pause budget (plan.stop_max_ms) must be shorter than decision_ms")
        if self.lease_ms >= self.seat_memory_ms:
            raise BadInput("a seat must remember the epochs it has seen (seat_memory_ms) for longer than lease_ms")
        if self.decision_ms >= self.lease_ms:
            raise BadInput("decision_ms must be shorter than lease_ms")


SEATS_MAX = 20_000
"""Seats remembered; the oldest empty ones go first."""

COMMANDS_SEEN_MAX = 4_096
"""Command ids remembered to refuse repeats."""
