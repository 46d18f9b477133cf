"""Explanations name what a policy's own rule left out, not only the limits that all share."""

from __future__ import annotations

from copy import deepcopy

from midstream.control.decide import decide
from midstream.control.decide.explain import MoveExplanation, explain_dispatch, explain_move
from midstream.control.events import DrainCancelled, DrainRequested, MoveDecided, RequestDispatched
from tests.control.fixtures import Story, fingerprint, owner
from tests.control.policies.scenes import decide_and_move, even, put_in_force, scene


def explained(story: Story, after_ms: int = 250) -> MoveExplanation:
    """The first move of the next tick."""
    tick, state = story.next_tick(after_ms), deepcopy(story.state)
    move = next(event for event in decide(story.state, tick).events if isinstance(event, MoveDecided))
    return explain_move(state, tick, move)


def test_a_dispatch_says_why_an_instance_of_another_model_and_a_full_one_were_left_out() -> None:
    story = even(2, "freeness")
    story.load(story.instance("other", fingerprint=fingerprint(model="m2")), blocks_free=1_000)
    story.load(story.instance("full"), running=64, blocks_free=1_000)
    story.load(story.instance("queue"), running=4, blocks_free=900)
    fact = RequestDispatched(
        request="q", gateway="g", owner=owner("i0"), epoch=2, prompt_tokens=100, delivered_tokens=0,
        output_tokens_max=10, cause="new", policy="freeness", scores=(("i0", 1.0), ("i1", 1.0)), reason="x",
    )  # fmt: skip
    found = {row.name: row.code for row in explain_dispatch(story.state, fact).instances}
    assert found == {"i0": None, "i1": None, "other": "other_model", "full": "saturated", "queue": "left_out"}


def test_the_chosen_target_of_a_drain_is_not_said_to_be_impossible() -> None:
    story = scene(a=([10, 10], []), b=([10], []))
    put_in_force(story, "drain")
    story.say("admin", DrainRequested(operation="o1", instance="a", actor="x"))
    decide_and_move(story)
    story.say("admin", DrainCancelled(operation="o2", instance="a", actor="x"))
    story.say("admin", DrainRequested(operation="o3", instance="b", actor="x"))
    back = explained(story, 2_500)
    assert {row.name: row.code for row in back.targets}[back.target.instance] is None


def test_balance_says_whom_it_gives_nothing_and_whom_it_never_moves() -> None:
    story = scene(a=([300, 300, 390], []), b=([10], []), c=([25] * 20, []))
    story.dispatch("hi", story.state.instances["a"].owner, prompt=16, priority=-1)
    story.progress("hi", 32)
    put_in_force(story, "balance")
    found = explained(story)
    assert (found.source.instance, found.target.instance) == ("a", "b")
    targets = {row.name: row for row in found.targets}
    assert targets["b"].code is None and targets["c"].reason == "its freeness is 25.0, not over 30"
    requests = {row.name: row for row in found.requests}
    assert requests["hi"].reason == "balance leaves the high class where it is"
    assert {row.code for name, row in requests.items() if name != "hi"} == {None}
