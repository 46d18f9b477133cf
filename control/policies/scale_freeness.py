"""How many instances there should be, by the cluster's freeness (Llumnix, OSDI'24, section 4.4.3), with hysteresis.

Freeness of the cluster = (all blocks - blocks in use or wanted by what waits) / requests: a mean weighted by batches,
so that one empty instance does not make a crowded cluster look free. It is taken for busy moments: with the line
through the samples of a window by least squares, and their standard deviation d from it,

    busy = line now + `spread` x d + max(0, slope - 2 standard errors) x time ahead

so that a small cluster, whose load varies more in proportion, keeps more room than a large one (square-root staffing:
Halfin and Whitt, Operations Research 29, 1981). Some are added when freeness is under `low` by the window `trend_ms`,
or by the mean over `out_after_ms` if that is busier, for the time at which an instance decided now would serve; those
that are starting count as there. Some are removed, those with the fewest requests, when freeness is over `high` and
would stay over `low` x `margin` without them, by the window `in_after_ms`, with `spread` x `margin`, for as long again:
else they would be called back (P23).

Fewer than `instances_min` are made up for once they have been too few for as long as a start takes: who restarts or
registers late counts as there. More than `instances_max` over `out_after_ms` are brought down to it, whatever the load.
Who counts, and who may go at all where there are several models or roles: `scale_bounds`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import sqrt
from typing import Annotated, Final, NamedTuple

import msgspec

from midstream.control.policies.base import Blocks, Milliseconds, ScalePolicy, ScaleProposal, Weight
from midstream.control.policies.freeness_math import freeness_of
from midstream.control.policies.room import Room
from midstream.control.policies.scale_bounds import away, is_watched, who_may_go
from midstream.control.state import InstanceView, LoadSample, ScalingView, State

TREND_MIN: Final = 5
"""Samples that make a line."""
WINDOW_MAX_MS: Final = 590_000
"""Samples of ten minutes are kept."""
SURE: Final = 2.0
"""Standard errors by which a slope is taken for less than it seems: what is left is hardly noise."""


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Freeness in blocks for each request; times in milliseconds."""

    instances_min: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 1
    instances_max: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 8
    low: Blocks = 2.0
    high: Blocks = 5.0
    margin: Annotated[float, msgspec.Meta(ge=1, le=1_000)] = 1.5
    spread: Weight = 1.5
    """Standard deviations between the usual load and that of busy moments."""
    waiting_max: Weight = 1.0
    """Requests that may wait for each instance, on average, whatever the blocks say."""
    out_after_ms: Milliseconds = 3_000
    in_after_ms: Milliseconds = 240_000
    """Window of the load by which some are removed; none is so soon after one was added."""
    step_max: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 4
    """Instances added or removed at once."""
    boot_ms: Milliseconds = 30_000
    """How long an instance takes to start, until that has been seen."""
    trend_ms: Milliseconds = 120_000
    """Window of the load by which some are added; from one removal to the next it is as long."""
    retry_ms: Milliseconds = 30_000
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
    expected = _expected(state, recent, now_ms, params)
    if _is_crowded(cluster, recent, expected, params):
        yield from _grow(state, cluster, recent, expected, params)
    elif not cluster.starting and not cluster.leaving:
        yield from _shrink(state, cluster, now_ms, params)


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


class _Demand(NamedTuple):
    """What is wanted at some moment."""

    blocks: float
    requests: float

    def freeness(self, capacity: float) -> float:
        """Of a cluster with so many blocks."""
        return freeness_of(capacity - self.blocks, round(self.requests))

    def busier(self, blocks: float) -> _Demand:
        """As many blocks, in requests of the same size."""
        return _Demand(blocks, self.requests * blocks / self.blocks if self.blocks else self.requests)


def _mean(samples: Sequence[LoadSample]) -> _Demand:
    blocks = sum(sample.blocks_used for sample in samples)
    requests = sum(sample.running + sample.waiting for sample in samples)
    return _Demand(blocks / len(samples), requests / len(samples))


def _busy(samples: Sequence[LoadSample], spread: float, ahead_ms: int) -> _Demand:
    """At busy moments so long after the last sample; the mean if the samples are too few for more."""
    mean = _mean(samples)
    if len(samples) < TREND_MIN:
        return mean
    at = sum(sample.at_ms for sample in samples) / len(samples)
    width = sum((sample.at_ms - at) ** 2 for sample in samples)
    slope = sum((sample.at_ms - at) * (sample.blocks_used - mean.blocks) for sample in samples) / width
    off = sum((sample.blocks_used - mean.blocks - slope * (sample.at_ms - at)) ** 2 for sample in samples)
    line = mean.blocks + slope * (samples[-1].at_ms - at)
    rise = max(0.0, slope - SURE * sqrt(off / (len(samples) - 2) / width)) * ahead_ms
    return mean.busier(max(0.0, line) + spread * sqrt(off / len(samples)) + rise)


def _expected(state: State, recent: Sequence[LoadSample], now_ms: int, params: Params) -> _Demand:
    """At busy moments by the time that an instance decided now would serve; never less than there just was."""
    just_now = _mean(recent)
    window = _since(state.samples, now_ms - params.trend_ms)
    if not window or 2 * (now_ms - state.samples[0].at_ms) < params.trend_ms:
        return just_now
    busy = _busy(window, params.spread, state.boot_ms or params.boot_ms)
    return busy if busy.blocks > just_now.blocks else just_now


def _is_crowded(cluster: _Cluster, recent: Sequence[LoadSample], expected: _Demand, params: Params) -> bool:
    """A queue that those which are starting may well clear calls for no more of them."""
    waiting = sum(sample.waiting for sample in recent) / len(recent)
    is_queue = waiting > params.waiting_max * cluster.count and min(sample.waiting for sample in recent) > 0
    return (is_queue and not cluster.starting) or expected.freeness(cluster.capacity) < params.low


def _grow(
    state: State, cluster: _Cluster, recent: Sequence[LoadSample], expected: _Demand, params: Params
) -> Iterator[ScaleProposal]:
    wanted = expected.requests * (params.low + params.high) / 2
    lacking = max(1, round((wanted + expected.blocks - cluster.capacity) / cluster.each))
    count = min(lacking, params.step_max, params.instances_max - cluster.count)
    freeness = expected.freeness(cluster.capacity)
    waiting = recent[-1].waiting
    reason = f"freeness is expected to be {freeness:.1f} (low is {params.low:g}), {waiting} requests wait"
    yield from _more(state, cluster, count, freeness, reason)


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


def _shrink(state: State, cluster: _Cluster, now_ms: int, params: Params) -> Iterator[ScaleProposal]:
    window = _since(state.samples, now_ms - params.in_after_ms)
    if _is_too_soon(state, now_ms, params) or any(sample.waiting > cluster.count for sample in window):
        return
    busy = _busy(window, params.spread * params.margin, params.in_after_ms)
    lowest, left = busy.freeness(cluster.capacity), cluster.capacity
    count = min(params.step_max, len(cluster.present) - params.instances_min)
    for view in islice(cluster.removable, max(0, count)):
        left -= view.blocks_total
        after = busy.freeness(left)
        if lowest <= params.high or after <= params.low * params.margin:
            return
        reason = f"freeness stayed over {params.high:g} (lowest {lowest:.1f}); without it, it is {after:.1f}"
        yield ScaleProposal(action="remove", instance=view.owner.instance, freeness=lowest, reason=reason)


def _is_too_soon(state: State, now_ms: int, params: Params) -> bool:
    """Samples do not go back far enough, or something was decided lately."""
    added_ms = max((view.decided_at_ms for view in state.scalings.values() if view.action != "remove"), default=0)
    decided_ms = state.scaled_at_ms + min(params.trend_ms, params.in_after_ms)
    known_ms = state.samples[0].at_ms + min(params.in_after_ms, WINDOW_MAX_MS)
    return now_ms < max(known_ms, added_ms + params.in_after_ms, decided_ms)


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


POLICY = ScalePolicy(name="scale_freeness", version=2, params_type=Params, propose=propose)
