"""Decisions as a function of the fold and one tick: what is true of the cluster, and which moves to order. Pure.

The tick brings the time and the seed, so the log alone determines every decision (P17).
"""

from __future__ import annotations

from midstream.control.decide.draft import Decision, Draft, Watch
from midstream.control.decide.manual import answer_requests
from midstream.control.decide.rng import SplitMix
from midstream.control.decide.scaling import scale
from midstream.control.decide.verdicts import drained, health, is_down_verdict, stuck
from midstream.control.events import TickElapsed
from midstream.control.policies import move_policy
from midstream.control.policies.base import MovePolicy, Proposal
from midstream.control.policies.room import Problem, Room
from midstream.control.state import State

__all__ = ["Decision", "Watch", "decide"]


def decide(state: State, tick: TickElapsed, watch: Watch | None = None) -> Decision:
    """Decide at one tick. Reads the state, changes nothing; equal arguments give equal decisions.

    In order: verdicts on health, moves asked for by hand, drains that are done, moves that got stuck, instances that
    should come or go, then the policies' moves within the limits that all of them share. `watch` is told of every move
    ordered or refused on the way, and changes nothing. Raises `UnknownThing` or `BadInput` if the policies in force are
    not known here.
    """
    verdicts = health(state, tick.now_ms)
    down = frozenset(v.owner.instance for v in verdicts if is_down_verdict(v))
    room = Room(state, tick.now_ms, down)
    draft = Draft(state, tick, room, watch)
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
            problem = _problem(state, room, policy, proposal)
            if problem is None:
                draft.order(proposal, policy=policy.name, version=policy.version, params=params)
            else:
                draft.refuse(proposal, policy=policy.name, problem=problem)


def _problem(state: State, room: Room, policy: MovePolicy, proposal: Proposal) -> Problem | None:
    """The limits no policy can talk its way around: cool-down, ping-pong, moves per instance, room, geometry."""
    view = state.requests.get(proposal.request)
    target = state.instances.get(proposal.target)
    source = None if view is None else state.instances.get(view.owner.instance)
    if view is None or source is None or target is None:
        return "unknown", f"{proposal.request}, its instance or {proposal.target} is not known"
    if view.owner != source.owner or not room.is_up(source):
        return "source_down", f"{view.owner}, which holds {view.request}, is not up"
    if room.is_at_limit(source.owner.instance):
        return "source_busy", f"{source.owner.instance} takes part in as many moves as it may"
    return room.stay_problem(view) or room.target_problem(
        view, source, target, blocks=proposal.blocks_needed, may_return=policy.may_return, is_first=proposal.is_first,
    )  # fmt: skip
