"""When an instance's load is worth a report: what is news, and how long there can be none without a look. Pure."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from midstream.control.state import Load

NEWS_SHARE: Final = 64
"""Free blocks count to one in so many of those last reported; fewer than 64 count exactly."""


def is_news(reported: Load, load: Load) -> bool:
    """Does the load differ from the last report: free blocks by more than a share of them, counts at all.

    The mean step time is not asked: what changes it for good changes counts too, or can wait for the next report.
    """
    if abs(load.blocks_free - reported.blocks_free) > reported.blocks_free // NEWS_SHARE:
        return True
    return replace(load, blocks_free=reported.blocks_free, step_ms=reported.step_ms) != reported


def quiet_ms(reported: Load, load: Load, block_tokens: int) -> float:
    """Milliseconds in which decoding alone makes no news of a load that was just looked at.

    A running request takes at most one block in each `block_tokens` steps. Who waits may start, and who arrives takes
    blocks, at any step.
    """
    if load.waiting or load.blocks_reserved:
        return 0.0
    if not load.running:
        return float("inf")
    taken = reported.blocks_free - load.blocks_free
    rounds = -(-(reported.blocks_free // NEWS_SHARE + 1 - taken) // load.running)
    return max(rounds - 1, 0) * block_tokens * load.step_ms
