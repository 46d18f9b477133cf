"""Requests of one session to one instance, as long as that is not too loaded: its prefix cache knows them.

Instances are ranked by highest random weight (Thaler, Ravishankar, 1998) of (session, instance): when one comes or
goes, only its own sessions change places. The first in rank with at most `slack` x the mean number of requests + 1
takes the request (consistent hashing with bounded loads, Mirrokni et al., 2018). A request without a session goes
where the fewest requests are. Score = weight, from 0 to 1; of an instance over the bound, weight - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated, Final

import msgspec

from midstream.control.policies import dispatch_least_requests
from midstream.control.policies.base import DispatchChoice, DispatchPolicy, DispatchWanted, InFlight, NoParams
from midstream.control.policies.candidates import candidates
from midstream.control.policies.dispatch_least_requests import requests_there
from midstream.control.policies.ranking import NOTHING_SENT, best_of
from midstream.control.state import State

_MASK: Final = (1 << 64) - 1


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bound on load."""

    slack: Annotated[float, msgspec.Meta(ge=1, le=1_000)] = 1.25
    """An instance with more than this times the mean number of requests, plus one, is passed over. Not all can be."""


def choose(
    state: State, wanted: DispatchWanted, in_flight: Mapping[str, InFlight], params: Params, turn: int
) -> DispatchChoice | None:
    """The session's own instance, or the next in its order that is not too loaded."""
    if not wanted.session:
        return dispatch_least_requests.choose(state, wanted, in_flight, NoParams(), turn)
    views = candidates(state, wanted)
    if not views:
        return None
    loads = [requests_there(view, in_flight.get(view.owner.instance, NOTHING_SENT)) for view in views]
    bound = params.slack * sum(loads) / len(loads) + 1
    key = _hash(wanted.session)
    weights = [_weight(key, view.owner.instance) for view in views]
    scores = [weight if load <= bound else weight - 1 for weight, load in zip(weights, loads, strict=True)]
    home = views[weights.index(max(weights))].owner.instance
    return best_of(
        views, scores, turn,
        lambda view, _: "the session's own instance" if view.owner.instance == home
        else f"next for the session: {home} has more than {bound:.1f} requests",
    )  # fmt: skip


def _weight(key: int, instance: str) -> float:
    """From 0 to 1, by SplitMix64's finaliser: cheap, and even enough for a ranking."""
    mixed = (key ^ _hash(instance)) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((mixed ^ (mixed >> 31)) >> 11) / (1 << 53)


@lru_cache(maxsize=4_096)
def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


POLICY = DispatchPolicy(name="session_affinity", version=1, params_type=Params, choose=choose)
