"""How many instances there should be, by the cluster's freeness (Llumnix, OSDI'24, section 4.4.3), with hysteresis.

Freeness of the cluster = (all blocks - blocks in use or wanted by what waits) / requests: a mean weighted by batches,
so that one empty instance does not make a crowded cluster look free. An instance takes its time to start: freeness is
expected for the moment when one decided now would serve, by the trend of what is in use, and with those that are
starting. Under `low` over `out_after_ms`, and without the trend, which is partly noise, under `low` x `margin`, some
are added. One is removed, that with the fewest requests, when freeness stayed over `high` for `in_after_ms` and, by the
busiest moment of that time and its trend for as long again, would stay over `low` x `margin` without it: else it would
be called back (P23).

Fewer than `instances_min` are made up for once they have been too few for as long as a start takes: who restarts or
registers late counts as there. More than `instances_max` over `out_after_ms` are brought down to it, whatever the load.
Who counts, and who may go at all where there are several models or roles: `scale_bounds`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import msgspec

from midstream.control.policies.base import ScalePolicy, ScaleProposal
from midstream.control.policies.freeness_math import freeness_of
from midstream.control.policies.room import Room
from midstream.control.policies.scale_bounds import away, is_watched, who_may_go
from midstream.control.state import InstanceView, LoadSample, ScalingView, State

TREND_MIN: Final = 5
"""Samples that make a trend."""


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Freeness in blocks for each request; times in milliseconds."""

    instances_min: int = 1
    instances_max: int = 8
    low: float = 10.0
    high: float = 40.0
    margin: float = 1.5
    waiting_max: float = 1.0
    """Requests that may wait for each instance, on average, whatever the blocks say."""
    out_after_ms: int = 3_000
    in_after_ms: int = 60_000
    step_max: int = 4
    """Instances added at once."""
    boot_ms: int = 30_000
    """How long an instance takes to start, until that has been seen."""
    trend_ms: int = 30_000
    """Time over which the trend is taken."""
    retry_ms: int = 30_000
    """After a start that failed, nothing is decided for so long."""
    is_dry_run: bool = False
    """Say what would be done; do nothing."""

    def __post_init__(self) -> None:
        if not 1 <= self.instances_min <= self.instances_max:
            raise ValueError("must hold: 1 <= instances_min <= instances_max")
        if not 0 < self.low * self.margin < self.high:
            raise ValueError("must hold: 0 < low * margin < high")


class _Cluster:
    """The instances that count, those that are starting, and what is wanted of them."""

    def __init__(self, state: State, room: Room, away: int) -> None:
        views = state.instances.values()
        self.present = [view for view in views if view.health in ("up", "suspect") and not view.is_draining]
        """A suspect one may well be alive (P25): only its loss calls for another."""
        removable = [view for view in self.present if room.is_up(view)]
        self.removable = who_may_go(sorted(removable, key=lambda view: _weight(state, view)))
        """The lightest first; read once, as who went before decides who may go after."""
        self.away = away
        open_ones = [view for view in state.scalings.values() if view.status == "open"]
        self.starting = sum(view.action == "add" for view in open_ones)
        self.leaving = [view for view in open_ones if view.action == "remove"]
        total = sum(view.blocks_total for view in self.present)
        self.each = total / len(self.present) if self.present else 1.0
        self.capacity = total + self.starting * self.each

    @property
    def count(self) -> int:
        """Instances, with those that are starting and those that are away."""
        return len(self.present) + self.starting + self.away


def propose(state: State, room: Room, now_ms: int, params: Params) -> Iterator[ScaleProposal]:
    """Add some, keep one that was to go, remove some, or nothing."""
    boot_ms = state.boot_ms or params.boot_ms
    cluster = _Cluster(state, room, away(state, now_ms, boot_ms))
    if _has_failed_lately(state, now_ms, params, "add"):
        return
    if cluster.count < params.instances_min:
        lacking = params.instances_min - cluster.count
        if is_watched(state, now_ms, boot_ms):
            reason = f"{cluster.count} of at least {params.instances_min} are there"
            yield from _more(state, cluster, lacking, 0.0, reason)
        return
    if not cluster.present or not is_watched(state, now_ms, params.out_after_ms):
        return
    recent = _since(state.samples, now_ms - params.out_after_ms) or state.samples[-1:]
    if len(cluster.present) > params.instances_max:
        yield from _trim(state, cluster, recent, now_ms, params)
        return
    expected = _expected(state, cluster, recent, now_ms, params)
    if _is_crowded(cluster, recent, expected, params):
        yield from _grow(state, cluster, recent, expected, params)
    elif not cluster.starting and not cluster.leaving:
        yield from _shrink(state, cluster, expected, now_ms, params)


def _trim(
    state: State, cluster: _Cluster, recent: Sequence[LoadSample], now_ms: int, params: Params
) -> Iterator[ScaleProposal]:
    """The lightest go, whatever the load: bounds were narrowed, or one that was made up for came back."""
    is_brief = any(sample.instances <= params.instances_max for sample in recent)
    if is_brief or _has_failed_lately(state, now_ms, params, "remove"):
        return
    count = len(cluster.present)
    for view in islice(cluster.removable, count - params.instances_max):
        reason = f"{count} are there, of at most {params.instances_max}"
        yield ScaleProposal(action="remove", instance=view.owner.instance, freeness=0.0, reason=reason)


def _expected(
    state: State, cluster: _Cluster, recent: Sequence[LoadSample], now_ms: int, params: Params
) -> tuple[float, float]:
    """(blocks in use, requests) by the time that an instance decided now would serve."""
    used = sum(sample.blocks_used for sample in recent) / len(recent)
    requests = sum(sample.running + sample.waiting for sample in recent) / len(recent)
    boot_ms = state.boot_ms or params.boot_ms
    rise = max(0.0, _slope(_since(state.samples, now_ms - params.trend_ms))) * boot_ms
    grown = 1 + rise / used if used > 0 else 1.0
    return used + rise, requests * grown


def _is_crowded(cluster: _Cluster, recent: Sequence[LoadSample], expected: tuple[float, float], params: Params) -> bool:
    """A queue that those which are starting may well clear calls for no more of them."""
    used, requests = expected
    waiting = sum(sample.waiting for sample in recent) / len(recent)
    is_queue = waiting > params.waiting_max * cluster.count and min(sample.waiting for sample in recent) > 0
    if is_queue and not cluster.starting:
        return True
    is_expected = freeness_of(cluster.capacity - used, round(requests)) < params.low
    return is_expected and _freeness_now(cluster, recent) < params.low * params.margin


def _freeness_now(cluster: _Cluster, recent: Sequence[LoadSample]) -> float:
    """Without the trend: that alone, which is partly noise, brings nobody back that this bound let go."""
    used = sum(sample.blocks_used for sample in recent) / len(recent)
    requests = sum(sample.running + sample.waiting for sample in recent) / len(recent)
    return freeness_of(cluster.capacity - used, round(requests))


def _grow(
    state: State, cluster: _Cluster, recent: Sequence[LoadSample], expected: tuple[float, float], params: Params
) -> Iterator[ScaleProposal]:
    used, requests = expected
    wanted = requests * (params.low + params.high) / 2
    lacking = max(1, round((wanted + used - cluster.capacity) / cluster.each))
    count = min(lacking, params.step_max, params.instances_max - cluster.count)
    now = freeness_of(cluster.capacity - used, round(requests))
    waiting = recent[-1].waiting
    reason = f"freeness is expected to be {now:.1f} (low is {params.low:g}), {waiting} requests wait"
    yield from _more(state, cluster, count, now, reason)


def _more(state: State, cluster: _Cluster, count: int, freeness: float, reason: str) -> Iterator[ScaleProposal]:
    """First those stay that were about to go: they are there already."""
    staying = [view for view in cluster.leaving if _may_stay(state, view)][: max(0, count)]
    for view in staying:
        yield ScaleProposal(action="keep", instance=view.instance, freeness=freeness, reason=reason)
    for _ in range(count - len(staying)):
        yield ScaleProposal(action="add", instance=None, freeness=freeness, reason=reason)


def _may_stay(state: State, scaling: ScalingView) -> bool:
    view = state.instances.get(scaling.instance)
    return view is not None and view.health == "up" and not view.is_drained


def _shrink(
    state: State, cluster: _Cluster, expected: tuple[float, float], now_ms: int, params: Params
) -> Iterator[ScaleProposal]:
    window = _since(state.samples, now_ms - params.in_after_ms)
    is_long = (
        state.samples[0].at_ms <= now_ms - params.in_after_ms and now_ms - state.scaled_at_ms >= params.in_after_ms
    )
    view = next(cluster.removable, None)
    if not is_long or view is None or len(cluster.present) <= params.instances_min:
        return
    used = max([expected[0], *(sample.blocks_used for sample in window)])
    requests = max([expected[1], *(sample.running + sample.waiting for sample in window)])
    rise = max(0.0, _slope(window)) * params.in_after_ms
    used, requests = used + rise, requests * (1 + rise / used) if used else requests
    lowest = freeness_of(cluster.capacity - used, round(requests))
    after = freeness_of(cluster.capacity - view.blocks_total - used, round(requests))
    if lowest > params.high and after > params.low * params.margin and not any(sample.waiting for sample in window):
        reason = f"freeness stayed over {params.high:g} (lowest {lowest:.1f}); without it, it is {after:.1f}"
        yield ScaleProposal(action="remove", instance=view.owner.instance, freeness=lowest, reason=reason)


def _weight(state: State, view: InstanceView) -> tuple[int, int, int, str]:
    """The lightest goes first: without the high class, fewest requests, the youngest."""
    name = view.owner.instance
    return int(name in state.high), len(state.placed.get(name, ())), -view.registered_at_ms, name


def _has_failed_lately(state: State, now_ms: int, params: Params, action: str) -> bool:
    return any(
        view.action == action and view.status == "failed" and now_ms - view.ended_at_ms < params.retry_ms
        for view in state.scalings.values()
    )


def _since(samples: Sequence[LoadSample], from_ms: int) -> list[LoadSample]:
    return [sample for sample in samples if sample.at_ms >= from_ms]


def _slope(samples: Sequence[LoadSample]) -> float:
    """Blocks in use per millisecond, by least squares; 0 for too few samples."""
    if len(samples) < TREND_MIN:
        return 0.0
    at = sum(sample.at_ms for sample in samples) / len(samples)
    used = sum(sample.blocks_used for sample in samples) / len(samples)
    spread = sum((sample.at_ms - at) ** 2 for sample in samples)
    return sum((sample.at_ms - at) * (sample.blocks_used - used) for sample in samples) / spread if spread else 0.0


POLICY = ScalePolicy(name="scale_freeness", version=1, params_type=Params, propose=propose)
