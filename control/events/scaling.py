"""Facts about how many instances there should be. Said by controllers, and by the scaler that acts on them."""

from __future__ import annotations

from typing import Any

from midstream.control.events.base import Event, event
from midstream.control.ids import Position


@event
class ClusterSampled(Event, frozen=True, kw_only=True):
    """What the cluster has and what is wanted of it, while a scale policy is in force: about once a second."""

    now_ms: int
    instances: int
    """Neither lost nor stopped nor draining."""
    blocks_total: int
    """KV blocks of those."""
    blocks_used: int
    """Blocks that are owned or reserved, or needed by what waits, in engines and at gateways."""
    running: int
    waiting: int


@event
class ScaleDecided(Event, frozen=True, kw_only=True):
    """A controller decided that an instance should come, go, or stay after all."""

    scaling: str
    """Derived from the position it was decided at, so that deciding twice is deciding once."""
    action: str
    """`add`: an instance of this name should come. `remove`: it should be emptied, then go. `keep`: it should not."""
    instance: str
    """`add`: its name, derived as well, so that starting it twice is starting it once."""
    policy: str
    policy_version: int
    params: dict[str, Any]
    freeness: float
    """Of the cluster, as the policy expects it by the time a new instance would serve."""
    reason: str
    decided_at: Position
    is_dry_run: bool = False
    """Nobody acts on it."""


@event
class ScaleEnded(Event, frozen=True, kw_only=True):
    """Controller's verdict: a decision had no effect in time (`not_there`, `still_there`)."""

    scaling: str
    code: str
    reason: str


@event
class ScaleFailed(Event, frozen=True, kw_only=True):
    """A scaler could not do what was decided, however often it tried."""

    scaling: str
    code: str
    reason: str
