"""What facts about requests do to the state: where each lives, and that it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from midstream.control.events import (
    Event,
    Fact,
    FirstTokenDelivered,
    RequestCancelled,
    RequestDispatched,
    RequestFailed,
    RequestFinished,
    RunsDropped,
    WaitingReported,
)
from midstream.control.fold.instances import withdraw_witness
from midstream.control.fold.speeds import learn_request
from midstream.control.state import RequestView, State, WaitingView

GATEWAY_PREFIX: Final = "gateway/"


def place(state: State, view: RequestView) -> None:
    """Put a request at its owner; a drained instance that gets one is no longer drained."""
    name = view.owner.instance
    state.requests[view.request] = view
    state.placed.setdefault(name, {})[view.request] = None
    if view.is_high:
        state.high.setdefault(name, {})[view.request] = None
    instance = state.instances.get(name)
    if instance is not None and instance.is_drained:
        state.instances[name] = replace(instance, is_drained=False)


def unplace(state: State, view: RequestView) -> None:
    """Take a request from its owner."""
    name = view.owner.instance
    placed = state.placed.get(name)
    if placed is not None:
        placed.pop(view.request, None)
    high = state.high.get(name)
    if high is not None:
        high.pop(view.request, None)
        if not high:
            del state.high[name]


def forget_gateway(state: State, source: str) -> None:
    """A source started again. If it is a gateway its ledgers are gone: its requests ended, its testimony is void."""
    names = (source, source.removeprefix(GATEWAY_PREFIX))
    for view in [v for v in state.requests.values() if v.gateway in names]:
        del state.requests[view.request]
        unplace(state, view)
    for name in names:
        state.waiting.pop(name, None)
    for instance in list(state.instances.values()):
        for name in names:
            withdraw_witness(state, instance.owner, name)


def _dispatched(state: State, fact: Fact, event: RequestDispatched) -> None:
    known = state.requests.get(event.request)
    if known is None:
        place(state, _new(fact, event))
    elif event.epoch > known.epoch:
        unplace(state, known)
        place(state, _again(known, event))


def _new(fact: Fact, event: RequestDispatched) -> RequestView:
    return RequestView(
        request=event.request,
        gateway=event.gateway,
        owner=event.owner,
        epoch=event.epoch,
        prompt_tokens=event.prompt_tokens,
        output_tokens_max=event.output_tokens_max,
        priority=event.priority,
        dispatched_at_ms=fact.at_ms,
        arrived_at_ms=fact.at_ms - round(event.waited_ms),
        tokens=event.prompt_tokens + event.delivered_tokens,
        waited_ms=event.waited_ms,
        is_dispatched_again=event.cause != "new",
    )


def _again(known: RequestView, event: RequestDispatched) -> RequestView:
    return replace(
        known,
        gateway=event.gateway,
        owner=event.owner,
        epoch=event.epoch,
        tokens=event.prompt_tokens + event.delivered_tokens,
        blocks=0,
        is_waiting=True,
        is_movable=True,
        migration=None,
        is_dispatched_again=True,
    )


def _ended(state: State, fact: Fact, event: RequestFinished | RequestCancelled | RequestFailed) -> None:
    view = state.requests.pop(event.request, None)
    if view is not None:
        unplace(state, view)
        if isinstance(event, RequestFinished) and event.owner.instance in state.instances:
            learn_request(state, event, view)


def _first_token(state: State, fact: Fact, event: FirstTokenDelivered) -> None:
    """Known at once, not only with the owner's next report of its requests."""
    view = state.requests.get(event.request)
    if view is not None and view.owner == event.owner and view.epoch == event.epoch:
        tokens = max(view.tokens, view.prompt_tokens + 1)
        state.requests[event.request] = replace(view, tokens=tokens, is_waiting=False)


def _waiting(state: State, fact: Fact, event: WaitingReported) -> None:
    if event.requests:
        state.waiting[event.gateway] = WaitingView(
            requests=event.requests, tokens=event.tokens, head_tokens=event.head_tokens, head_model=event.head_model
        )
    else:
        state.waiting.pop(event.gateway, None)


def _runs_dropped(state: State, fact: Fact, event: RunsDropped) -> None:
    """If the gateway lives after all, it finds its runs gone and dispatches them again."""
    for view in [v for v in state.requests.values() if v.gateway == event.gateway and v.owner == event.owner]:
        del state.requests[view.request]
        unplace(state, view)
    state.waiting.pop(event.gateway, None)


HANDLERS: Final[dict[type[Event], Callable[[State, Fact, Any], None]]] = {
    RequestDispatched: _dispatched,
    RequestFinished: _ended,
    RequestCancelled: _ended,
    RequestFailed: _ended,
    RunsDropped: _runs_dropped,
    WaitingReported: _waiting,
    FirstTokenDelivered: _first_token,
}
