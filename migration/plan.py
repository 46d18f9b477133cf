"""The arithmetic of a move: when to stop copying rounds and freeze. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

LIVE: Final = "live"
"""Copy rounds while the request decodes on, freeze for the last one."""
BLOCKING: Final = "blocking"
"""Freeze first, then copy everything: stop-and-copy."""
RECOMPUTE: Final = "recompute"
"""Copy nothing: the target computes prompt and outputs again."""
MODES: Final = (LIVE, BLOCKING, RECOMPUTE)


class PlanLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one move. Times in milliseconds."""

    stop_budget_ms: float = 20.0
    """Freeze once the predicted stop fits in here."""
    stop_max_ms: float = 150.0
    """Never freeze when the predicted stop is longer than this."""
    rounds_max: int = 8
    copy_max_ms: float = 10_000.0
    """All rounds of a live move; the one copy of a blocking move."""
    headroom_tokens: int = 128
    """Tokens the request may grow while it is copied; the target reserves for them."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What a move has done so far. Rates are of the move itself, so the first rounds measure the link."""

    rounds: int = 0
    copied_bytes: int = 0
    copying_ms: float = 0.0
    """Time spent copying, all rounds."""
    elapsed_ms: float = 0.0
    """Since the move was prepared."""
    blocks_left: int = 0
    blocks_left_before: int | None = None
    """The same, one round earlier."""


def predicted_stop_ms(progress: Progress, block_bytes: int, round_trip_ms: float) -> float:
    """How long the final round would pause the request: blocks left ÷ measured bandwidth + round trip."""
    if progress.copied_bytes == 0:
        return round_trip_ms
    bytes_per_ms = progress.copied_bytes / max(progress.copying_ms, 1e-3)
    return progress.blocks_left * block_bytes / bytes_per_ms + round_trip_ms


def final_copy_max_ms(mode: str, limits: PlanLimits) -> float:
    """How long the copy of a frozen request may take: a live move's last round, or all of a blocking one."""
    return limits.copy_max_ms if mode == BLOCKING else limits.stop_max_ms


def next_step(progress: Progress, stop_ms: float, limits: PlanLimits) -> str:
    """`round`, `freeze` or `abort`.

    Freeze when the predicted stop fits the budget or no longer shrinks; abort when even then it would pause
    the request for too long or the limits of rounds and time are used up.
    """
    if progress.rounds == 0:
        return "round" if progress.blocks_left > 1 else "freeze"
    if stop_ms <= limits.stop_budget_ms:
        return "freeze"
    before = progress.blocks_left_before
    if before is not None and progress.blocks_left >= before:
        return "freeze" if stop_ms <= limits.stop_max_ms else "abort"
    if progress.rounds >= limits.rounds_max or progress.elapsed_ms >= limits.copy_max_ms:
        return "freeze" if stop_ms <= limits.stop_max_ms else "abort"
    return "round"


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_tokens)
