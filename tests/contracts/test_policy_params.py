"""One contract for the parameters of all policies: each number has a range, and nothing outside it is put in force."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.inspect import FloatType, IntType, type_info

from midstream.control.decide.rng import SplitMix
from midstream.control.errors import BadInput
from midstream.control.policies import DISPATCH, MOVES, SCALE, check, dispatch_policy, move_policy, scale_policy
from midstream.control.policies.base import DispatchPolicy, MovePolicy, ScalePolicy
from midstream.control.policies.room import Room
from midstream.control.replay import check_overrides
from midstream.control.state import PolicyChoice, PolicySettings
from tests.contracts.test_policies import clusters
from tests.control.fixtures import Story
from tests.control.policies.scenes import wanted

POLICIES_MD = Path(__file__).parents[2] / "docs" / "policies.md"

Policy = DispatchPolicy | MovePolicy | ScalePolicy

POLICIES: dict[str, Policy] = {
    **{name: dispatch_policy(name) for name in DISPATCH},
    **{name: move_policy(name) for name in MOVES},
    **{name: scale_policy(name) for name in SCALE},
}

RELATIONS: list[tuple[str, dict[str, Any]]] = [
    ("balance", {"low": 50.0, "high": 5.0}),
    ("balance", {"low": 31.0}),
    ("scale_freeness", {"low": 50.0, "high": 5.0}),
    ("scale_freeness", {"instances_min": 3, "instances_max": 2}),
]
"""Each of them in its range, but not together."""


def numbers(policy: Policy) -> Iterator[tuple[str, IntType | FloatType]]:
    info: Any = type_info(policy.params_type)
    return ((f.name, f.type) for f in info.fields if isinstance(f.type, IntType | FloatType))


NUMBERS = [(name, field, kind) for name, policy in POLICIES.items() for field, kind in numbers(policy)]


def in_force(name: str, params: dict[str, Any]) -> PolicySettings:
    choice = PolicyChoice(name, params)
    if name in DISPATCH:
        return PolicySettings(dispatch=choice)
    return PolicySettings(moves=(choice,)) if name in MOVES else PolicySettings(scale=choice)


def outside(kind: IntType | FloatType) -> list[float]:
    assert kind.ge is not None and kind.le is not None, "a number has a least and a greatest value"
    step = 1 if isinstance(kind, IntType) else 1e-3
    return [kind.ge - step, kind.le + step, -(10**12), 10**12, *([] if step == 1 else [math.nan, math.inf, -math.inf])]


def test_there_are_parameters_to_hold_to_it() -> None:
    assert {"slo", "balance", "scale_freeness"} <= {name for name, *_ in NUMBERS}


@pytest.mark.parametrize(("name", "field", "kind"), NUMBERS, ids=[f"{name}.{field}" for name, field, _ in NUMBERS])
def test_P29_a_number_outside_its_range_is_refused_in_one_line_that_names_it(name: str, field: str, kind: Any) -> None:
    for value in outside(kind):
        with pytest.raises(BadInput, match=rf"^policy {name}: .*{field}.*$") as caught:
            check(in_force(name, {field: value}))
        assert "\n" not in str(caught.value)
        with pytest.raises(BadInput, match=field):
            check_overrides({f"{name}.{field}": value})


def test_the_documented_ranges_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (`.*\..*`) \| (.+) \| (.+) \|$", POLICIES_MD.read_text(), re.MULTILINE)
    said = {name: (float(low), float(high)) for names, low, high in rows for name in re.findall(r"`([^`]+)`", names)}
    assert said == {f"{name}.{field}": (kind.ge, kind.le) for name, field, kind in NUMBERS}


@pytest.mark.parametrize(("name", "params"), RELATIONS)
def test_P29_numbers_that_do_not_go_together_are_refused(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=f"^policy {name}: must hold: .*{next(iter(params))}"):
        check(in_force(name, params))


def test_what_if_judges_a_relation_by_what_was_in_force_not_by_the_defaults() -> None:
    check_overrides({"balance.low": 50.0, "balance.high": 90.0, "scale_freeness.low": 50.0})


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None, max_examples=30)
@given(clusters(), st.data())
def test_whatever_is_accepted_can_be_decided_with(name: str, story: Story, data: st.DataObject) -> None:
    policy = POLICIES[name]
    given_params = {field: data.draw(_inside(kind), label=field) for field, kind in numbers(policy)}
    try:
        params = policy.params(given_params)
    except BadInput as error:
        assert "must hold" in str(error)
        return
    _decide(policy, story, params)


def _inside(kind: Any) -> st.SearchStrategy[float]:
    ends = st.sampled_from([kind.ge, kind.le])
    if isinstance(kind, IntType):
        return ends | st.integers(kind.ge, kind.le)
    return ends | st.floats(kind.ge, kind.le)


def _decide(policy: Policy, story: Story, params: msgspec.Struct) -> None:
    room = Room(story.state, story.now_ms)
    if isinstance(policy, DispatchPolicy):
        choice = policy.choose(story.state, wanted(session="s"), {}, params, 0)
        assert choice is None or all(math.isfinite(score) for _, score in choice.scores)
    elif isinstance(policy, MovePolicy):
        for proposal in policy.propose(story.state, room, story.now_ms, params, SplitMix(1)):
            room.take(story.state.requests[proposal.request], proposal.target, proposal.blocks_needed)
    else:
        assert len(list(policy.propose(story.state, room, story.now_ms, params))) <= 100_000
