"""The limits and timers of a gateway."""

from __future__ import annotations

import msgspec


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times in milliseconds."""

    requests_max: int = 4_096
    """Requests in flight; more are refused as overloaded."""
    tenant_waiting_max: int = 4_096
    """Requests of one tenant that wait here while every instance is saturated; more are refused."""
    queue_depth: int = 4
    """Requests that an engine may have waiting; with more, new ones wait here. 0: all are sent on at once."""
    request_ms: float = 3_600_000
    """Deadline of one request, from admission."""
    seek_ms: float = 60_000
    """How long a request may look for an instance before it fails."""
    refusals_max: int = 16
    """Instances that may refuse a request in a row before it fails."""
    repeat_ms: float = 300
    quiet_ms: float = 2_000
    """Silence of an owner after which it is asked whether it still holds the run."""
    ping_ms: float = 1_000
    silent_ms: float = 3_000
    """Silence of an instance after which its connection counts as lost."""
    alone_ms: float = 10_000
    """Silence after which an instance is taken for lost when no controller says anything."""
    acknowledge_ms: float = 50
    housekeeping_ms: float = 100
    tombstone_ms: float = 60_000
    """How long an ended request is remembered, so that late messages are answered with `Drop`."""


TOMBSTONES_MAX = 50_000
DROPS_MAX = 20
"""Times a `Drop` is repeated to an owner that does not answer."""
