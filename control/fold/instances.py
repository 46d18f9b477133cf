"""What facts about instances do to the state: who is there, how loaded, how healthy, draining or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from midstream.control.events import (
    ConnectionLost,
    ConnectionRestored,
    DrainCancelled,
    DrainRequested,
    Event,
    Fact,
    InstanceDrained,
    InstanceLost,
    InstanceRegistered,
    InstanceRestored,
    InstanceStopped,
    InstanceSuspected,
    LoadReported,
    RequestsReported,
)
from midstream.control.fold import operations, scaling
from midstream.control.fold.speeds import learn_step
from midstream.control.ids import Owner
from midstream.control.state import InstanceView, Load, State

INSTANCES_GONE_MAX: Final = 1_000
"""Lost or stopped instances that the state keeps; the earliest registered are forgotten first."""

GONE: Final = ("lost", "stopped")


def current(state: State, owner: Owner) -> InstanceView | None:
    """The view of exactly this incarnation; reports of another one are nobody's (P21)."""
    view = state.instances.get(owner.instance)
    return view if view is not None and view.owner == owner else None


def change(state: State, owner: Owner, **changes: Any) -> bool:
    """Change the view of exactly this incarnation; `False` if it is not the current one."""
    view = current(state, owner)
    if view is None:
        return False
    state.instances[owner.instance] = replace(view, **changes)
    return True


def withdraw_witness(state: State, owner: Owner, gateway: str) -> None:
    """A gateway no longer says that it lost this incarnation."""
    view = current(state, owner)
    if view is not None and gateway in view.witnesses:
        change(state, owner, witnesses=tuple(w for w in view.witnesses if w != gateway))


def _registered(state: State, fact: Fact, event: InstanceRegistered) -> None:
    """Requests of the incarnation before stay placed until their gateway says where they are now."""
    owner = event.owner
    known = state.instances.get(owner.instance)
    if known is not None and known.owner.incarnation >= owner.incarnation:
        return
    _fail_drains(state, owner.instance, "restarted", f"{owner.instance} started again as {owner}")
    state.instances[owner.instance] = InstanceView(
        owner=owner,
        address=event.address,
        fingerprint=event.fingerprint,
        blocks_total=event.blocks_total,
        slots_max=event.slots_max,
        role=event.role,
        load=Load(blocks_free=event.blocks_total),
        registered_at_ms=fact.at_ms,
        reported_at_ms=state.last_tick_ms,
    )
    state.placed.setdefault(owner.instance, {})
    state.speeds.pop(owner.instance, None)
    scaling.came(state, owner.instance)
    if known is None:
        _forget_gone(state)


def _load_reported(state: State, fact: Fact, event: LoadReported) -> None:
    owner = event.owner
    view = state.instances.get(owner.instance)
    if view is not None and view.owner.incarnation == owner.incarnation:
        state.instances[owner.instance] = replace(view, load=event.load, reported_at_ms=state.last_tick_ms)
        learn_step(state, event)


def _requests_reported(state: State, fact: Fact, event: RequestsReported) -> None:
    requests = state.requests
    for said in event.requests:
        view = requests.get(said.request)
        if view is not None and view.epoch == said.epoch and view.owner == event.owner:
            requests[said.request] = replace(
                view, tokens=said.tokens, blocks=said.blocks, is_waiting=said.is_waiting, is_movable=said.is_movable
            )


def _stopped(state: State, fact: Fact, event: InstanceStopped) -> None:
    if change(state, event.owner, health="stopped"):
        scaling.went(state, event.owner.instance)
        for operation in operations.open_drains(state, event.owner.instance):
            operations.succeed(state, operation, f"{event.owner} stopped")


def _suspected(state: State, fact: Fact, event: InstanceSuspected) -> None:
    change(state, event.owner, health="suspect")


def _restored(state: State, fact: Fact, event: InstanceRestored) -> None:
    change(state, event.owner, health="up")


def _lost(state: State, fact: Fact, event: InstanceLost) -> None:
    if change(state, event.owner, health="lost"):
        scaling.went(state, event.owner.instance)
        _fail_drains(state, event.owner.instance, "instance_lost", f"{event.owner} was lost")


def _connection_lost(state: State, fact: Fact, event: ConnectionLost) -> None:
    view = current(state, event.owner)
    if view is not None and event.gateway not in view.witnesses:
        change(state, event.owner, witnesses=tuple(sorted((*view.witnesses, event.gateway))))


def _connection_restored(state: State, fact: Fact, event: ConnectionRestored) -> None:
    withdraw_witness(state, event.owner, event.gateway)


def _drain_requested(state: State, fact: Fact, event: DrainRequested) -> None:
    name = event.instance
    operations.accept(state, fact, event.operation, kind="drain", actor=event.actor, subject=name)
    view = state.instances.get(name)
    if view is None:
        operations.fail(state, event.operation, "unknown_instance", f"there is no instance {name}")
    elif view.health in GONE:
        operations.fail(state, event.operation, "instance_down", f"{name} is {view.health}")
    elif view.is_drained:
        operations.succeed(state, event.operation, f"{name} was drained already")
    else:
        state.instances[name] = replace(view, is_draining=True)


def _drain_cancelled(state: State, fact: Fact, event: DrainCancelled) -> None:
    name = event.instance
    operations.accept(state, fact, event.operation, kind="undrain", actor=event.actor, subject=name)
    view = state.instances.get(name)
    if view is None:
        operations.fail(state, event.operation, "unknown_instance", f"there is no instance {name}")
        return
    scaling.stays(state, name, f"{event.actor} cancelled the drain")
    state.instances[name] = replace(state.instances[name], is_draining=False, is_drained=False)
    _fail_drains(state, name, "cancelled", f"{event.actor} cancelled the drain")
    operations.succeed(state, event.operation)


def _drained(state: State, fact: Fact, event: InstanceDrained) -> None:
    view = current(state, event.owner)
    if view is not None and view.is_draining:
        change(state, event.owner, is_drained=True)
        for operation in operations.open_drains(state, event.owner.instance):
            operations.succeed(state, operation)


def _fail_drains(state: State, instance: str, code: str, detail: str) -> None:
    for operation in operations.open_drains(state, instance):
        operations.fail(state, operation, code, detail)


def _forget_gone(state: State) -> None:
    gone = [name for name, view in state.instances.items() if view.health in GONE and not state.placed.get(name)]
    for name in gone[: max(0, len(gone) - INSTANCES_GONE_MAX)]:
        del state.instances[name]
        state.placed.pop(name, None)
        state.speeds.pop(name, None)


HANDLERS: Final[dict[type[Event], Callable[[State, Fact, Any], None]]] = {
    InstanceRegistered: _registered,
    LoadReported: _load_reported,
    RequestsReported: _requests_reported,
    InstanceStopped: _stopped,
    InstanceSuspected: _suspected,
    InstanceRestored: _restored,
    InstanceLost: _lost,
    ConnectionLost: _connection_lost,
    ConnectionRestored: _connection_restored,
    DrainRequested: _drain_requested,
    DrainCancelled: _drain_cancelled,
    InstanceDrained: _drained,
}
