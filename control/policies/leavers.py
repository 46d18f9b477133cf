"""Which request of an instance moves, and whether its move is worth it: for every policy that may choose.

The price of a move is the blocks it copies for each block of freeness that its source gains (bytes ÷ relief). A
waiting request has no KV: it costs no bytes, and relieves its source of what the head of the line claims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from midstream.control.policies.freeness_math import freeness_of
from midstream.control.policies.room import Room, blocks_needed
from midstream.control.state import InstanceView, RequestView, State

RequestChoice = Literal["last_come", "first_come", "longest", "shortest", "first_waiting", "cheapest"]
"""Running requests by arrival, by tokens or by price; `first_waiting`: those in the queue, as they came."""

Key = Callable[[RequestView], tuple[float, str]]


def leavers(state: State, room: Room, source: InstanceView, choice: RequestChoice) -> list[RequestView]:
    """The requests of `source` that may leave it now, in the order wanted; none of the high class that runs."""
    if choice == "first_waiting":
        return [view for view in line(state, room, source) if room.may_leave(view)]
    found = [view for view in running(state, source) if room.may_leave(view) and not view.is_high]
    if choice == "last_come":
        found.reverse()
    elif choice != "first_come":
        found.sort(key=_key(room, source, choice))
    return found


def running(state: State, source: InstanceView) -> list[RequestView]:
    """Requests that are known to hold blocks there, in the order in which they came."""
    return [view for view in _placed(state, source) if view.blocks > 0 and not view.is_waiting]


def line(state: State, room: Room, source: InstanceView) -> list[RequestView]:
    """The waiting requests of `source`, head first.

    A request counts as waiting until it is reported once, so of those said to wait only as many as the load says
    are believed: the last ones, because an engine takes them in this order.
    """
    waiting = [view for view in _placed(state, source) if view.is_waiting and not room.is_moving(view)]
    waiting.sort(key=turn)
    return waiting[max(0, len(waiting) - room.waiting_after(source)) :]


def turn(view: RequestView) -> tuple[int, int, str]:
    """In which order engines take those who wait: by class, then as they came to their gateways."""
    return view.priority, view.arrived_at_ms, view.request


def _placed(state: State, source: InstanceView) -> list[RequestView]:
    placed = (state.requests[name] for name in state.placed.get(source.owner.instance, ()))
    return [view for view in placed if view.owner == source.owner]


def _key(room: Room, source: InstanceView, choice: RequestChoice) -> Key:
    if choice == "longest":
        return lambda view: (-view.tokens, view.request)
    if choice == "shortest":
        return lambda view: (view.tokens, view.request)
    return lambda view: (price(room, source, view), view.request)


def price(room: Room, source: InstanceView, view: RequestView) -> float:
    """Blocks to copy for each block of freeness that the source gains; infinite if it gains nothing."""
    gain = freeness_without(room, source, view) - room.freeness(source)
    return view.blocks / gain if gain > 0 else float("inf")


def freeness_without(room: Room, source: InstanceView, view: RequestView) -> float:
    """Freeness of `source` once `view` has left."""
    return freeness_of(room.blocks_after(source, view), room.batch_after(source, view))


def freeness_with(room: Room, target: InstanceView, view: RequestView) -> float:
    """Freeness of `target` once `view` has come, with the head-room it must be given."""
    blocks = blocks_needed(view, target.fingerprint.block_tokens)
    return freeness_of(room.blocks_after(target) - blocks, room.batch_after(target) + 1)


NO_GAIN: Final = float("-inf")


def gain_blocks(room: Room, source: InstanceView, target: InstanceView, view: RequestView) -> float:
    """Blocks of room that those who stay on `source` gain, all together, by the move.

    Minus infinite if the move would only turn the imbalance round: it must leave the target the freer of the two,
    counting what the request has now, for head-room is room (P23).
    """
    source_after = freeness_without(room, source, view)
    claimed = view.blocks or blocks_needed(view, target.fingerprint.block_tokens)
    target_after = freeness_of(room.blocks_after(target) - claimed, room.batch_after(target) + 1)
    if target_after < source_after:
        return NO_GAIN
    return (source_after - room.freeness(source)) * room.batch_after(source, view)
