"""Policies by name, and parameters that are checked before anything follows them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from midstream.control import policies
from midstream.control.errors import BadInput, UnknownThing
from midstream.control.state import PolicyChoice, PolicySettings


def test_every_policy_named_in_the_tables_exists_under_its_name() -> None:
    assert [policies.dispatch_policy(name).name for name in policies.DISPATCH] == list(policies.DISPATCH)
    assert [policies.move_policy(name).name for name in policies.MOVES] == list(policies.MOVES)
    assert [policies.scale_policy(name).name for name in policies.SCALE] == list(policies.SCALE)


@pytest.mark.parametrize(("load", "known"), [
    (policies.dispatch_policy, policies.DISPATCH),
    (policies.move_policy, policies.MOVES),
    (policies.scale_policy, policies.SCALE),
], ids=["dispatch", "moves", "scale"])  # fmt: skip
def test_an_unknown_name_is_told_the_known_ones(load: Callable[[str], object], known: dict[str, str]) -> None:
    with pytest.raises(UnknownThing, match=f"'magic'; known: {', '.join(sorted(known))}"):
        load("magic")


def test_P29_settings_are_checked_as_a_whole() -> None:
    policies.check(PolicySettings())
    policies.check(PolicySettings(moves=(PolicyChoice("balance", {"low": 3, "request": "longest"}),)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (PolicySettings(dispatch=PolicyChoice("magic")), "magic"),
        (PolicySettings(dispatch=PolicyChoice("freeness", {"x": 1})), "freeness.*unknown field `x`"),
        (PolicySettings(moves=(PolicyChoice("balance", {"lo": 1}),)), "parameters: low, high"),
        (PolicySettings(moves=(PolicyChoice("balance", {"low": "much"}),)), "Expected `float`"),
        (PolicySettings(moves=(PolicyChoice("balance", {"request": "best"}),)), "best"),
    ],
)
def test_P29_a_bad_or_unknown_parameter_is_refused(settings: PolicySettings, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        policies.check(settings)
