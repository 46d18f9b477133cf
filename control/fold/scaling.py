"""What facts about scaling do to the state: what was decided, what came of it, and how loaded the cluster was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from midstream.control.events import ClusterSampled, Event, Fact, ScaleDecided, ScaleEnded, ScaleFailed
from midstream.control.fold import operations
from midstream.control.state import LoadSample, ScalingView, State

SAMPLES_MAX: Final = 600
GAP_MS_MAX: Final = 10_000
"""Samples that are further apart are of two times, with nobody to watch between them: the earlier ones are dropped."""
BOOT_WEIGHT: Final = 0.5
"""Weight of the newest start in the moving mean of start-up times."""


def came(state: State, instance: str) -> None:
    """An instance registered: if it was asked for, that is done; if it was to go, it starts afresh and stays."""
    for view in _open(state, instance):
        if view.action == "add":
            _learn_start(state, view)
            _close(state, view, "done")
        else:
            _close(state, view, "failed", "restarted", f"{instance} started again")


def _learn_start(state: State, view: ScalingView) -> None:
    """Unless nobody watched in between: the cluster may have been stopped."""
    samples = state.samples
    if len(samples) == SAMPLES_MAX or (samples and samples[0].at_ms <= view.decided_at_ms):
        took_ms, known = state.last_tick_ms - view.decided_at_ms, state.boot_ms
        state.boot_ms = int(took_ms if not known else known + BOOT_WEIGHT * (took_ms - known))


def went(state: State, instance: str) -> None:
    """An instance is gone."""
    for view in _open(state, instance):
        if view.action == "remove":
            _close(state, view, "done")


def stays(state: State, instance: str, detail: str) -> None:
    """Somebody wants it to serve after all."""
    for view in _open(state, instance):
        if view.action == "remove":
            _close(state, view, "cancelled", "kept", detail)


def _sampled(state: State, fact: Fact, event: ClusterSampled) -> None:
    sample = LoadSample(
        event.now_ms, event.instances, event.blocks_total, event.blocks_used, event.running, event.waiting
    )
    is_gap = bool(state.samples) and event.now_ms - state.samples[-1].at_ms > GAP_MS_MAX
    state.samples = (sample,) if is_gap else (*state.samples[-SAMPLES_MAX + 1 :], sample)


def _decided(state: State, fact: Fact, event: ScaleDecided) -> None:
    if event.scaling in state.scalings:
        return
    state.scaled_at_ms = state.last_tick_ms
    view = ScalingView(
        scaling=event.scaling, action=event.action, instance=event.instance, policy=event.policy, reason=event.reason,
        decided_at_ms=state.last_tick_ms, decided_at=event.decided_at, status="dry_run" if event.is_dry_run else "open",
    )  # fmt: skip
    if event.action == "keep" and not event.is_dry_run:
        view = replace(view, status="done", ended_at_ms=state.last_tick_ms)
        stays(state, event.instance, event.reason)
    elif event.action == "remove" and not event.is_dry_run:
        _drain(state, event.instance, is_draining=True)
    state.scalings[event.scaling] = view
    operations.forget_closed(state.scalings, lambda scaling: scaling.status == "open")


def _ended(state: State, fact: Fact, event: ScaleEnded | ScaleFailed) -> None:
    view = state.scalings.get(event.scaling)
    if view is not None and view.status == "open":
        _close(state, view, "failed", event.code, event.reason)


def _open(state: State, instance: str) -> list[ScalingView]:
    return [view for view in state.scalings.values() if view.status == "open" and view.instance == instance]


def _close(state: State, view: ScalingView, status: str, code: str | None = None, detail: str | None = None) -> None:
    """End a decision; an instance that was to go and did not serves again."""
    state.scalings[view.scaling] = replace(
        view, status=status, code=code, detail=detail, ended_at_ms=state.last_tick_ms
    )
    if view.action == "remove" and status != "done":
        _drain(state, view.instance, is_draining=False)


def _drain(state: State, instance: str, *, is_draining: bool) -> None:
    view = state.instances.get(instance)
    if view is not None:
        state.instances[instance] = replace(view, is_draining=is_draining, is_drained=False)


HANDLERS: Final[dict[type[Event], Callable[[State, Fact, Any], None]]] = {
    ClusterSampled: _sampled,
    ScaleDecided: _decided,
    ScaleEnded: _ended,
    ScaleFailed: _ended,
}
