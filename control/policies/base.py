"""What a policy is given and what it answers. Policies are pure: values in, values out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final, Protocol

import msgspec

from midstream.control.errors import BadInput
from midstream.control.ids import Owner
from midstream.control.policies.room import Room
from midstream.control.state import HIGH_PRIORITY_MAX, State

CANDIDATES_MAX: Final = 8
"""Candidates that a fact names, best first."""

SCORE_MAX: Final = 1e9
"""Stands for an infinite score in facts: JSON has no infinity."""

Blocks = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]
"""A parameter in KV blocks, for each request or in all. Every number that is a parameter has a range."""
Weight = Annotated[float, msgspec.Meta(ge=0, le=1_000)]
"""A factor on something."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=86_400_000)]


class Rng(Protocol):
    """The tick's own randomness."""

    def random(self) -> float:
        """A float from [0, 1)."""
        ...


class NoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a policy that has no parameters."""


def read_params(policy: str, params_type: type[msgspec.Struct], given: Mapping[str, Any]) -> Any:
    """Typed parameters with defaults filled in. Raises `BadInput` for an unknown one, a wrong type or range."""
    try:
        return msgspec.convert(dict(given), params_type)
    except msgspec.ValidationError as error:
        raise BadInput(f"policy {policy}: {error}; parameters: {', '.join(params_type.__struct_fields__)}") from error


def check_param(policy: str, params_type: type[msgspec.Struct], name: str, value: Any) -> None:
    """Raise `BadInput` unless there is such a parameter and the value is in its range, whatever the others are."""
    kinds = {field.name: field.type for field in msgspec.structs.fields(params_type)}
    if name not in kinds:
        read_params(policy, params_type, {name: value})
        return
    try:
        msgspec.convert(value, kinds[name])
    except msgspec.ValidationError as error:
        raise BadInput(f"policy {policy}: {name}: {error}") from error


class InFlight(msgspec.Struct, frozen=True):
    """What one gateway sent to an instance that no load report of it can show yet."""

    requests: int
    blocks: int
    line: int = 0
    """Those of the requests that no token came of yet."""
    line_tokens: int = 0
    """Their prompt tokens."""


class DispatchWanted(msgspec.Struct, frozen=True, kw_only=True):
    """A request that looks for an instance. `exclude` names instances that may not be chosen."""

    request: str
    prompt_tokens: int
    """Prompt plus the output tokens already delivered, if it is dispatched again."""
    output_tokens_max: int
    priority: int = 0
    """Lower runs first; below 0 is the high class."""
    model: str | None = None
    exclude: frozenset[str] = frozenset()
    session: str = ""
    """What the client says belongs together; empty: nothing."""
    cached: Mapping[str, int] = {}
    """Instance to leading prompt tokens that its prefix cache holds, where that is known and not 0."""

    @property
    def is_high(self) -> bool:
        """Is it of the high class."""
        return self.priority <= HIGH_PRIORITY_MAX


class DispatchChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Where to, and why. `scores` are the best candidates weighed, best first, at most `CANDIDATES_MAX`."""

    owner: Owner
    address: str
    scores: tuple[tuple[str, float], ...]
    reason: str


class DispatchPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A way to choose an instance for a new request.

    `choose(state, wanted, in_flight, params, turn)`: `params` are of `params_type`, `turn` is the gateway's count of
    dispatches; `None` if no instance may take the request.
    """

    name: str
    version: int
    params_type: type[msgspec.Struct]
    choose: Callable[[State, DispatchWanted, Mapping[str, InFlight], Any, int], DispatchChoice | None]
    needs_cached: bool = False
    """Does it read `DispatchWanted.cached`: only then gateways follow the caches."""

    def params(self, given: Mapping[str, Any]) -> Any:
        """Typed parameters. Raises `BadInput`."""
        return read_params(self.name, self.params_type, given)


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A move that a policy would like. The limits of `Room` decide whether it is ordered."""

    request: str
    target: str
    candidates: tuple[tuple[str, float], ...]
    """(instance, score) weighed as targets, best first."""
    blocks_needed: int
    reason: str
    is_first: bool = False
    """It goes before those who wait at the target, or makes room for one who does: what they claim is not counted."""


class MovePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A way to propose moves.

    `propose(state, room, now_ms, params, rng)` is read one proposal at a time: when it is asked for the next, `room`
    already counts the one before, if it was ordered.
    """

    name: str
    version: int
    params_type: type[msgspec.Struct]
    propose: Callable[[State, Room, int, Any, Rng], Iterator[Proposal]]
    may_return: bool = False
    """May a request go back at once to where it came from: only when it must leave anyway."""

    def params(self, given: Mapping[str, Any]) -> Any:
        """Typed parameters. Raises `BadInput`."""
        return read_params(self.name, self.params_type, given)


class ScaleProposal(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that a policy would like to come (`add`, not named), go (`remove`) or stay after all (`keep`)."""

    action: str
    instance: str | None
    freeness: float
    reason: str


class ScalePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A way to choose how many instances there are: `propose(state, room, now_ms, params)`."""

    name: str
    version: int
    params_type: type[msgspec.Struct]
    propose: Callable[[State, Room, int, Any], Iterator[ScaleProposal]]

    def params(self, given: Mapping[str, Any]) -> Any:
        """Typed parameters. Raises `BadInput`."""
        return read_params(self.name, self.params_type, given)


def finite(score: float) -> float:
    """A score as a fact can carry it."""
    return max(-SCORE_MAX, min(SCORE_MAX, float(score)))
