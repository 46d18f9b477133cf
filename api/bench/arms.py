"""Arms of benchmarks in one word: `DISPATCH+MOVES+…`, each policy with parameters behind a colon if it has any.

`freeness+defragment:keep=2,copy_max=10+balance:low=20`: no character of it means anything to a shell.
"""

from __future__ import annotations

from typing import Any

import msgspec

from midstream.control.errors import BadInput
from midstream.control.policies import check
from midstream.control.state import PolicyChoice, PolicySettings


def policies_of(arm: str) -> PolicySettings:
    """The policies that an arm names. Raises `UnknownThing`, `BadInput`."""
    dispatch, *moves = (_choice(text, arm) for text in arm.split("+"))
    settings = PolicySettings(dispatch=dispatch, moves=tuple(moves) or (PolicyChoice("none"),))
    check(settings)
    return settings


def moves_anything(arm: str) -> bool:
    """Is it more than a dispatcher."""
    return any(name != "none" for name in arm.split("+")[1:])


def _choice(text: str, arm: str) -> PolicyChoice:
    name, colon, rest = text.partition(":")
    return PolicyChoice(name, dict(_param(one, arm) for one in rest.split(",")) if colon else {})


def _param(text: str, arm: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise BadInput(f"policies {arm!r}: parameters are name=value, not {text!r}")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value
