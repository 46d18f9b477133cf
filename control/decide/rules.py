"""What a policy's own rule says of other targets and requests, beside the limits of all: for explanations. Pure."""

from __future__ import annotations

from typing import Final

from midstream.control.decide.manual import POLICY as MANUAL
from midstream.control.events import MoveDecided
from midstream.control.policies import MOVES, move_policy
from midstream.control.policies.leavers import NO_GAIN, gain_blocks
from midstream.control.policies.room import Problem, Room
from midstream.control.state import InstanceView, RequestView, State

SPARES_HIGH: Final = frozenset({"balance", "defragment", "priority"})
"""Policies that leave running requests of the high class where they are."""

SPARES_PREFILL: Final = frozenset({"balance", "prefill_decode"})
"""Policies that give nothing to instances that are for prompts."""


def may_return(policy: str) -> bool:
    """May it send a request back at once to where it came from."""
    return policy == MANUAL or (policy in MOVES and move_policy(policy).may_return)


def target_rule(state: State, room: Room, move: MoveDecided, target: InstanceView) -> Problem | None:
    """Why the policy of this move would not have chosen that target for anything."""
    name, policy = target.owner.instance, move.policy
    if any(name == weighed for weighed, _ in move.candidates):
        return None
    if target.role == "prefill" and policy in SPARES_PREFILL:
        return "policy", f"{policy} gives nothing to {name}, which is for prompts"
    if policy == "priority" and name in state.high:
        return "policy", f"{name} serves the high class itself"
    return _balance_rule(state, room, move, target) if policy == "balance" else None


def _balance_rule(state: State, room: Room, move: MoveDecided, target: InstanceView) -> Problem | None:
    freeness, high = room.freeness(target), move.params["high"]
    if freeness <= high:
        return "policy", f"its freeness is {freeness:.1f}, not over {high:g}"
    view = state.requests[move.request]
    gain = gain_blocks(room, state.instances[view.owner.instance], target, view)
    cost = move.params["cost_per_move"] + move.params["cost_per_block"] * view.blocks
    if gain == NO_GAIN:
        return "policy", "it would be the fuller of the two"
    return ("policy", f"the move gains {gain:.1f} blocks of room and costs {cost:.1f}") if gain <= cost else None


def request_rule(move: MoveDecided, view: RequestView) -> Problem | None:
    """Why the policy of this move would not have moved that request."""
    policy = move.policy
    if view.is_high and policy in SPARES_HIGH and (policy == "priority" or not view.is_waiting):
        return "policy", f"{policy} leaves the high class where it is"
    if policy == "balance" and view.is_waiting != (move.params["request"] == "first_waiting"):
        return "policy", f"balance moves those that {'run' if view.is_waiting else 'wait'}"
    if policy == "priority" and not view.is_waiting and view.blocks < move.params["blocks_min"]:
        return "policy", f"it has {view.blocks} blocks, fewer than {move.params['blocks_min']}"
    return None
