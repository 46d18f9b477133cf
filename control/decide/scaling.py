"""How many instances there should be: samples of the load, the scale policy's decisions, and those that led nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from midstream.control.events import ClusterSampled, Event, ScaleDecided, ScaleEnded, TickElapsed
from midstream.control.ids import scaling_id, scaling_instance
from midstream.control.policies import scale_policy
from midstream.control.policies.base import finite
from midstream.control.policies.room import Room
from midstream.control.state import State

SAMPLE_MS: Final = 1_000
BOOT_MAX_MS: Final = 900_000
"""An instance that has not come so long after it was decided will not come; models are large."""
LEAVE_MAX_MS: Final = 900_000
"""The same for one that was to go, from the decision: the longest of its requests may have nowhere to move."""


def scale(state: State, room: Room, tick: TickElapsed) -> list[Event]:
    """What to say about scaling at this tick; nothing without a policy. Raises as `move_policy` does."""
    chosen = state.policies.scale
    if chosen is None:
        return []
    policy = scale_policy(chosen.name)
    params = policy.params(chosen.params)
    plain: dict[str, Any] = msgspec.to_builtins(params)
    decided = [
        ScaleDecided(
            scaling=scaling_id(tick.decided_at, index),
            action=proposal.action,
            instance=proposal.instance or scaling_instance(tick.decided_at, index),
            policy=policy.name,
            policy_version=policy.version,
            params=plain,
            freeness=finite(proposal.freeness),
            reason=proposal.reason,
            decided_at=tick.decided_at,
            is_dry_run=bool(plain.get("is_dry_run", False)),
        )
        for index, proposal in enumerate(policy.propose(state, room, tick.now_ms, params))
        if not _is_said(state, plain, tick.now_ms)
    ]
    return [*_overdue(state, tick.now_ms), *_sample(state, tick.now_ms), *decided]


def _is_said(state: State, params: dict[str, Any], now_ms: int) -> bool:
    """A dry run changes nothing, so it would be said at every tick: once for each time that it stands for is enough."""
    return bool(params.get("is_dry_run", False)) and now_ms - state.scaled_at_ms < params.get("boot_ms", 0)


def _sample(state: State, now_ms: int) -> Iterator[Event]:
    if state.samples and now_ms - state.samples[-1].at_ms < SAMPLE_MS:
        return
    views = [view for view in state.instances.values() if view.health in ("up", "suspect")]
    present = [view for view in views if not view.is_draining]
    tokens = sum(waiting.tokens for waiting in state.waiting.values())
    block_tokens = present[0].fingerprint.block_tokens if present else 1
    yield ClusterSampled(
        now_ms=now_ms,
        instances=len(present),
        blocks_total=sum(view.blocks_total for view in present),
        blocks_used=sum(view.blocks_total - view.load.blocks_free + view.load.blocks_waiting for view in views)
        + tokens // block_tokens,
        running=sum(view.load.running for view in views),
        waiting=sum(view.load.waiting for view in views) + sum(row.requests for row in state.waiting.values()),
    )


def _overdue(state: State, now_ms: int) -> Iterator[Event]:
    for view in state.scalings.values():
        if view.status != "open":
            continue
        age_ms = now_ms - view.decided_at_ms
        if view.action == "add" and age_ms >= BOOT_MAX_MS:
            reason = f"{view.instance} has not come in {age_ms} ms"
            yield ScaleEnded(scaling=view.scaling, code="not_there", reason=reason)
        elif view.action == "remove" and age_ms >= LEAVE_MAX_MS:
            reason = f"{view.instance} has not gone in {age_ms} ms"
            yield ScaleEnded(scaling=view.scaling, code="still_there", reason=reason)
