"""When an instance takes one more request at once, and when requests had better wait at their gateway. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from midstream.control.policies.base import DispatchWanted, InFlight
from midstream.control.policies.freeness_math import blocks_kept
from midstream.control.state import InstanceView, State
from midstream.migration.plan import blocks_for

STEP_TOKENS: Final = 2_048
"""Prompt tokens that an engine computes in one step at least (vLLM's least default of `max_num_batched_tokens`)."""

REPORT_MS: Final = 100.0
"""Load reports are no closer than this: what is computed by the next one keeps nobody waiting here in vain."""

_NONE: Final = InFlight(0, 0)


def saturated(state: State, wanted: DispatchWanted, in_flight: Mapping[str, InFlight], depth: int) -> frozenset[str]:
    """Instances that would only queue the request: it is as well off at its gateway, where it waits its turn."""
    return frozenset(name for name in state.instances if not takes(state, name, wanted, in_flight, depth))


def takes(state: State, instance: str, wanted: DispatchWanted, in_flight: Mapping[str, InFlight], depth: int) -> bool:
    """Does the instance have slots and blocks for it, and a line that is short; with a `depth` of 0 it need not.

    What was sent and is in no report yet counts for slots and blocks, and until its first token for the line. An idle
    instance takes anything: its engine may say that the request is too long. A high-priority request is taken
    everywhere: it is first in an engine's queue.
    """
    view, sent = state.instances[instance], in_flight.get(instance, _NONE)
    load = view.load
    present = load.running + load.waiting + sent.requests
    if wanted.is_high or not present or not depth:
        return True
    needed = blocks_for(wanted.prompt_tokens + 1, view.fingerprint.block_tokens)
    free = load.blocks_free - load.blocks_waiting - sent.blocks - blocks_kept(state, view)
    return present < view.slots_max and free >= needed and _is_short(state, view, sent, wanted, depth)


def _is_short(state: State, view: InstanceView, sent: InFlight, wanted: DispatchWanted, depth: int) -> bool:
    """Are fewer than `depth` in line, or all of them, this one included, such that their prompts begin at once.

    A line of requests that have slots and blocks is a matter of prompt tokens: those of one step, or of the time until
    the next report at the speed that the log has shown, are no line (`fold.speeds`).
    """
    if view.load.waiting + sent.line < depth:
        return True
    speed = state.speeds.get(view.owner.instance)
    per_token_ms = speed.prefill_ms_per_token if speed is not None else 0.0
    at_once = max(STEP_TOKENS, REPORT_MS / per_token_ms if per_token_ms else 0.0)
    reported = view.load.blocks_waiting * view.fingerprint.block_tokens
    return reported + sent.line_tokens + wanted.prompt_tokens <= at_once
