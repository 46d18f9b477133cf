"""What classes and roles mean for policies that are about neither."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from midstream.control.policies import DispatchWanted
from midstream.control.policies.candidates import candidate_problem, candidates
from midstream.control.policies.room import Room
from tests.control.fixtures import Story, owner
from tests.control.policies.scenes import pairs, proposals, scene


def make_high(story: Story, request: str) -> None:
    view = story.state.requests[request]
    story.state.requests[request] = replace(view, priority=-1)
    story.state.high.setdefault(view.owner.instance, {})[request] = None


def give_role(story: Story, instance: str, role: str) -> None:
    story.state.instances[instance] = replace(story.state.instances[instance], role=role)


def test_room_for_the_line_is_not_made_by_the_high_class() -> None:
    story = scene(a=([300, 200, 400], [300]), b=([300, 450], []))
    assert pairs(proposals(story, "defragment")) == [("a1", "b")]
    make_high(story, "a1")
    assert "a1" not in dict(pairs(proposals(story, "defragment")))


def test_head_room_is_no_reason_to_make_room_for_a_line_that_fits() -> None:
    story = scene(a=([300, 400], [300]), b=([100], []))
    make_high(story, "a0")
    room = Room(story.state, story.now_ms)
    a = story.state.instances["a"]
    assert room.blocks_after(a) < 0 <= room.blocks_free_after(a)
    assert proposals(story, "defragment") == [], "the engine lets the head in by itself"


@pytest.mark.parametrize("policy", ["balance", "defragment", "consolidate"])
def test_what_runs_does_not_move_to_an_instance_that_is_for_prompts(policy: str) -> None:
    story = scene(a=([300, 200, 400], [300])) if policy != "consolidate" else scene(a=([5], []))
    b = story.instance("b", blocks=1000)
    story.load(b, running=1, blocks_free=990)
    story.tick()
    if policy == "consolidate":
        story.load(owner("b"), running=4, blocks_free=900)
    found = proposals(story, policy)
    assert found, "it would move there"
    give_role(story, "b", "prefill")
    running = [name for name, _ in pairs(proposals(story, policy)) if not story.state.requests[name].is_waiting]
    assert running == []


def test_an_explanation_names_role_and_class_as_what_spoke_against_an_instance() -> None:
    story = scene(a=([10], []), b=([10], []), c=([10], []))
    give_role(story, "a", "decode")
    make_high(story, "b0")
    normal = DispatchWanted(request="r", prompt_tokens=16, output_tokens_max=16)
    codes = {name: candidate_problem(story.state, view, normal) for name, view in story.state.instances.items()}
    assert {name: problem and problem[0] for name, problem in codes.items()} == {
        "a": "role",
        "b": "high_class",
        "c": None,
    }
    assert [view.owner.instance for view in candidates(story.state, normal)] == ["c"]
    assert candidate_problem(story.state, story.state.instances["b"], replace(normal, priority=-1)) is None
