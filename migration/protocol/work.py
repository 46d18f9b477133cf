"""What an engine reports about the parts of a move: a reservation, a route to it, a copied round."""

from __future__ import annotations

import msgspec


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """A reservation: `blocks` are held for the slot, of which the first `cached` already have the right content."""

    blocks: int
    cached: int
    transfer: str
    """Backend chosen among those the source offered."""
    why: str = ""
    """Why this backend and no better one."""
    address: str
    handle: str


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Where a source sends blocks: what the target's `Reserved` said."""

    transfer: str
    address: str
    handle: str


class RoundReport(msgspec.Struct, frozen=True, kw_only=True):
    """One copy of blocks `first_block` .. `next_block`-1 of a run."""

    blocks: int
    copied_bytes: int
    duration_ms: float
    next_block: int
    """Where the next round starts: full blocks before it are at the target."""
    blocks_left: int
    """Blocks from there to the run's end right now, the partly filled last one included."""
    tokens: int
