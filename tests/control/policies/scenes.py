"""Small clusters in a few words, and what a policy would like there."""

from __future__ import annotations

from collections import Counter
from typing import Any

from midstream.control.decide import decide
from midstream.control.decide.rng import SplitMix
from midstream.control.events import MigrationCommitted, MoveDecided, PolicyConfigured
from midstream.control.policies import DispatchWanted, InFlight, choose, move_policy
from midstream.control.policies.base import Proposal
from midstream.control.policies.leavers import turn
from midstream.control.policies.room import Room
from midstream.control.state import PolicyChoice, PolicySettings
from tests.control.fixtures import BLOCK_TOKENS, GATEWAY, Story, owner


def scene(total: int = 1000, **instances: tuple[list[int], list[int]]) -> Story:
    """Instances of `total` blocks, each with the blocks of its running and of its waiting requests.

    Requests are named by their instance and place: `a0`, `a1` run, `a2` waits.
    """
    story = Story()
    for name, (running, waiting) in instances.items():
        me = story.instance(name, blocks=total)
        for index, blocks in enumerate(running):
            story.running(f"{name}{index}", me, tokens=blocks * BLOCK_TOKENS, prompt=blocks * BLOCK_TOKENS)
        for index, blocks in enumerate(waiting, len(running)):
            story.dispatch(f"{name}{index}", me, prompt=blocks * BLOCK_TOKENS)
            story.progress(f"{name}{index}", blocks * BLOCK_TOKENS, is_waiting=True)
        story.load(
            me, running=len(running), waiting=len(waiting), blocks_free=total - sum(running),
            blocks_head=waiting[0] if waiting else 0, blocks_waiting=sum(waiting), step_ms=20.0,
        )  # fmt: skip
    story.tick()
    return story


def even(count: int, dispatch: str = "freeness", **load: int) -> Story:
    """Instances that are all alike, `i0` and on, under a dispatch policy."""
    story = Story()
    settings = PolicySettings(dispatch=PolicyChoice(dispatch))
    story.say("admin", PolicyConfigured(policies=settings, actor="test"))
    for index in range(count):
        story.load(story.instance(f"i{index}"), **({"blocks_free": 1000} | load))
    return story


def wanted(**changes: Any) -> DispatchWanted:
    return DispatchWanted(**({"request": "r", "prompt_tokens": 160, "output_tokens_max": 160} | changes))


def dispatch_many(story: Story, count: int, **changes: Any) -> Counter[str]:
    """What one gateway does between two reports."""
    sent: dict[str, InFlight] = {}
    for number in range(count):
        choice = choose(story.state, wanted(**changes), sent, number)
        assert choice is not None
        name = choice.owner.instance
        before = sent.get(name, InFlight(0, 0))
        sent[name] = InFlight(before.requests + 1, before.blocks + 11)
    return Counter({name: flight.requests for name, flight in sent.items()})


def proposals(story: Story, name: str, **params: Any) -> list[Proposal]:
    """What a policy would like, if all of it were ordered."""
    policy, room, ordered = move_policy(name), Room(story.state, story.now_ms), []
    for proposal in policy.propose(story.state, room, story.now_ms, policy.params(params), SplitMix(1)):
        room.take(story.state.requests[proposal.request], proposal.target, proposal.blocks_needed)
        ordered.append(proposal)
    return ordered


def pairs(found: list[Proposal]) -> list[tuple[str, str]]:
    return [(proposal.request, proposal.target) for proposal in found]


def put_in_force(story: Story, *names: str, **changes: Any) -> None:
    policies = PolicySettings(moves=tuple(PolicyChoice(name) for name in names), **changes)
    story.say("admin", PolicyConfigured(policies=policies, actor="test"))


def decide_and_move(story: Story) -> list[MoveDecided]:
    """One tick whose moves all end well at once; loads follow them exactly, lines go on as engines let them."""
    decision = decide(story.state, story.next_tick())
    story.tick()
    story.control(*decision.events)
    moves = [event for event in decision.events if isinstance(event, MoveDecided)]
    for move in moves:
        view = story.state.requests[move.request]
        story.say(
            GATEWAY,
            MigrationCommitted(
                migration=move.migration, request=move.request, epoch=move.epoch, owner=move.target, tail_tokens=0
            ),
        )
        if view.is_waiting:
            story.progress(move.request, view.tokens, is_waiting=True)
    for name in story.state.instances:
        admit(story, name)
    return moves


def admit(story: Story, name: str) -> None:
    """What an engine does: the first to have come runs if its blocks are free, without overtaking."""
    me = owner(name)
    views = [story.state.requests[request] for request in story.state.placed.get(name, ())]
    free = story.state.instances[name].blocks_total - sum(view.blocks for view in views)
    waiting = sorted((view for view in views if view.is_waiting), key=turn)
    while waiting and -(-waiting[0].tokens // BLOCK_TOKENS) <= free:
        view = waiting.pop(0)
        story.progress(view.request, view.tokens)
        free -= story.state.requests[view.request].blocks
    needs = [-(-view.tokens // BLOCK_TOKENS) for view in waiting]
    story.load(
        me, running=len(views) - len(waiting), waiting=len(waiting), blocks_free=free,
        blocks_head=needs[0] if needs else 0, blocks_waiting=sum(needs), step_ms=20.0,
    )  # fmt: skip
