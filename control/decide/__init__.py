"""Decisions as a function of the fold and one tick: what is true of the cluster, and which moves to order. Pure.

The tick brings the time and the seed, so the log alone determines every decision (P17).
"""

from __future__ import annotations

from midstream.control.decide.draft import Decision, Draft
from midstream.control.decide.manual import answer_requests
from midstream.control.decide.rng import SplitMix
from midstream.control.decide.scaling import scale
from midstream.control.decide.verdicts import drained, health, is_down_verdict, stuck
from midstream.control.events import TickElapsed
from midstream.control.policies import move_policy
from midstream.control.policies.base import MovePolicy, Proposal
from midstream.control.policies.room import Room
from midstream.control.state import State

__all__ = ["Decision", "decide"]


def decide(state: State, tick: TickElapsed) -> Decision:
    """Decide at one tick. Reads the state, changes nothing; equal arguments give equal decisions.

    In order: verdicts on health, moves asked for by hand, drains that are done, moves that got stuck, instances that
    should come or go, then the policies' moves within the limits that all of them share. Raises `UnknownThing` or
    `BadInput` if the policies in force are not known here.
    """
    verdicts = health(state, tick.now_ms)
    down = frozenset(v.owner.instance for v in verdicts if is_down_verdict(v))
    room = Room(state, tick.now_ms, down)
    draft = Draft(state, tick, room)
    draft.say(verdicts)
    answer_requests(state, room, draft)
    draft.say(drained(state, room))
    draft.say(stuck(state, tick.now_ms))
    draft.say(scale(state, room, tick))
    _follow_policies(state, room, draft)
    return draft.decision()


def _follow_policies(state: State, room: Room, draft: Draft) -> None:
    rng = SplitMix(draft.tick.seed)
    for chosen in state.policies.moves:
        policy = move_policy(chosen.name)
        params = policy.params(chosen.params)
        for proposal in policy.propose(state, room, draft.tick.now_ms, params, rng):
            if room.moves_left <= 0:
                return
            if _is_allowed(state, room, policy, proposal):
                draft.order(proposal, policy=policy.name, version=policy.version, params=params)


def _is_allowed(state: State, room: Room, policy: MovePolicy, proposal: Proposal) -> bool:
    """The limits no policy can talk its way around: cool-down, ping-pong, moves per instance, room, geometry."""
    view = state.requests.get(proposal.request)
    target = state.instances.get(proposal.target)
    source = None if view is None else state.instances.get(view.owner.instance)
    if view is None or source is None or target is None:
        return False
    return (
        view.owner == source.owner
        and room.is_up(source)
        and not room.is_at_limit(source.owner.instance)
        and room.may_leave(view)
        and room.may_pair(source, target)
        and (policy.may_return or not room.is_return(view, proposal.target))
        and room.fits(target, proposal.blocks_needed)
    )
