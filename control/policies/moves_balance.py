"""Moves load from instances that are nearly full to instances with plenty (Llumnix, OSDI'24, section 4.4.3).

Instances whose freeness is under `low` are paired with those over `high`, extremes first; each pair moves one
request per tick. With F free blocks, batch n and a request of b blocks, a move makes the freeness of the source
(F+b)/(n-1) and of the target (F-b)/(n+1). It must leave the target the freer of the two, and give the n-1 that stay
more room, all together, than `cost_per_move` + `cost_per_block` x b blocks, or it is not worth its bytes (P23).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

import msgspec

from midstream.control.policies.base import Blocks, MovePolicy, Proposal, Rng, Weight
from midstream.control.policies.leavers import RequestChoice, gain_blocks, leavers
from midstream.control.policies.room import Room, blocks_needed
from midstream.control.state import InstanceView, RequestView, State

SOURCES_MAX: Final = 64
"""Sources that one tick weighs, the fullest first."""

PARTNERS_MAX: Final = 8
"""Targets that one source tries."""

REQUESTS_MAX: Final = 8
"""Requests of one source that are weighed, in the order of the choice."""


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Freeness in blocks for each running request."""

    low: Blocks = 10.0
    """Sources have less than this."""
    high: Blocks = 30.0
    """Targets have more than this."""
    request: RequestChoice = "cheapest"
    """Which request leaves. `cheapest`: fewest blocks to copy for each block of freeness that the source gains."""
    cost_per_move: Blocks = 1.0
    """What the pause and the orders of one move are worth, in blocks of room: a one-block request stays."""
    cost_per_block: Weight = 0.05
    """What copying one block is worth: it is held twice, and the source decodes a little slower, meanwhile."""

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("must hold: low <= high")


def propose(state: State, room: Room, now_ms: int, params: Params, rng: Rng) -> Iterator[Proposal]:
    """The fullest source goes to the emptiest target, the next to the next."""
    ranked = [(room.freeness(view), view) for view in state.instances.values() if _is_partner(room, view)]
    sources = sorted((row for row in ranked if row[0] < params.low), key=lambda row: (row[0], row[1].owner))
    roomy = (row for row in ranked if row[0] > params.high and row[1].role != "prefill")
    targets = sorted(roomy, key=lambda row: (-row[0], row[1].owner))
    for source in sources[:SOURCES_MAX]:
        if room.moves_left <= 0 or not targets:
            return
        found = leavers(state, room, source[1], params.request)
        for index, target in enumerate(targets[:PARTNERS_MAX]):
            view = _choice(room, source[1], target[1], found, params)
            if view is not None:
                del targets[index]
                yield _proposal(view, source, target, params)
                break


def _is_partner(room: Room, view: InstanceView) -> bool:
    return room.is_up(view) and not view.is_draining and not room.is_at_limit(view.owner.instance)


def _proposal(
    view: RequestView, source: tuple[float, InstanceView], target: tuple[float, InstanceView], params: Params
) -> Proposal:
    (low, full), (high, empty) = source, target
    name = empty.owner.instance
    return Proposal(
        request=view.request,
        target=name,
        candidates=((name, high),),
        blocks_needed=blocks_needed(view, empty.fingerprint.block_tokens),
        reason=f"freeness of {full.owner.instance} is {low:.1f} (under {params.low:g}), of {name} {high:.1f} "
        f"(over {params.high:g}); {params.request} request, {view.blocks} blocks",
    )


def _choice(
    room: Room, source: InstanceView, target: InstanceView, found: list[RequestView], params: Params
) -> RequestView | None:
    """The first of those found whose move to `target` is worth it."""
    if not room.may_pair(source, target):
        return None
    comers = (view for view in found if room.may_host(view, target))
    for view in islice(comers, REQUESTS_MAX):
        if room.fits(target, blocks_needed(view, target.fingerprint.block_tokens)) and _is_worth(
            room, source, target, view, params
        ):
            return view
    return None


def _is_worth(room: Room, source: InstanceView, target: InstanceView, view: RequestView, params: Params) -> bool:
    return gain_blocks(room, source, target, view) > params.cost_per_move + params.cost_per_block * view.blocks


POLICY = MovePolicy(name="balance", version=1, params_type=Params, propose=propose)
