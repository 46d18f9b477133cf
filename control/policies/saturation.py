"""When an instance takes one more request at once, and when requests had better wait at their gateway. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from midstream.control.policies.base import DispatchWanted, InFlight
from midstream.control.policies.freeness_math import blocks_kept
from midstream.control.state import State
from midstream.migration.plan import blocks_for

_NONE: Final = InFlight(0, 0)


def saturated(state: State, wanted: DispatchWanted, in_flight: Mapping[str, InFlight], depth: int) -> frozenset[str]:
    """Instances that would only queue the request: it is as well off at its gateway, where it waits its turn."""
    return frozenset(name for name in state.instances if not takes(state, name, wanted, in_flight, depth))


def takes(state: State, instance: str, wanted: DispatchWanted, in_flight: Mapping[str, InFlight], depth: int) -> bool:
    """Does the instance have slots and blocks for it, and fewer than `depth` requests waiting.

    What was sent and is in no report yet counts for slots and blocks, and behind a queue for the queue. An idle
    instance takes anything: its engine may say that the request is too long. A high-priority request is taken
    everywhere: it is first in the queue of an engine.
    """
    view, sent = state.instances[instance], in_flight.get(instance, _NONE)
    load = view.load
    present = load.running + load.waiting + sent.requests
    if wanted.is_high or not present:
        return True
    has_queue_room = not load.waiting or load.waiting + sent.requests < depth
    needed = blocks_for(wanted.prompt_tokens + 1, view.fingerprint.block_tokens)
    free = load.blocks_free - load.blocks_waiting - sent.blocks - blocks_kept(state, view)
    return has_queue_room and present < view.slots_max and free >= needed
