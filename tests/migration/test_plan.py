"""When a move copies on, freezes or gives up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.migration.plan import (
    BLOCKING,
    LIVE,
    PlanLimits,
    Progress,
    blocks_for,
    final_copy_max_ms,
    next_step,
    predicted_stop_ms,
)

LIMITS = PlanLimits(stop_budget_ms=20.0, stop_max_ms=150.0, rounds_max=8, copy_max_ms=10_000.0)


def after_rounds(rounds: int, left: int, before: int | None, *, elapsed_ms: float = 100.0) -> Progress:
    """A move with some rounds behind it."""
    return Progress(
        rounds=rounds,
        copied_bytes=1_000 * rounds,
        copying_ms=10.0 * rounds,
        elapsed_ms=elapsed_ms,
        blocks_left=left,
        blocks_left_before=before,
    )


def test_predicted_stop_is_blocks_left_over_the_measured_bandwidth_plus_a_round_trip() -> None:
    progress = Progress(rounds=1, copied_bytes=1_000_000, copying_ms=10.0, blocks_left=3)
    assert predicted_stop_ms(progress, block_bytes=50_000, round_trip_ms=2.0) == pytest.approx(3 * 0.5 + 2.0)


def test_a_blocking_copy_has_the_bound_of_all_rounds_and_a_live_one_that_of_the_stop() -> None:
    assert final_copy_max_ms(BLOCKING, LIMITS) == LIMITS.copy_max_ms
    assert final_copy_max_ms(LIVE, LIMITS) == LIMITS.stop_max_ms


def test_predicted_stop_without_a_measurement_is_the_round_trip() -> None:
    assert predicted_stop_ms(Progress(rounds=1, blocks_left=5), block_bytes=1, round_trip_ms=2.0) == 2.0


def test_predicted_stop_of_a_copy_too_fast_to_time_is_finite() -> None:
    progress = Progress(rounds=1, copied_bytes=1_000, copying_ms=0.0, blocks_left=1)
    assert 2.0 <= predicted_stop_ms(progress, block_bytes=1_000, round_trip_ms=2.0) < 3.0


@given(left=st.integers(0, 10_000), more=st.integers(1, 100), sent=st.integers(1, 10**12), took=st.floats(0.01, 1e6))
def test_predicted_stop_grows_with_what_is_left(left: int, more: int, sent: int, took: float) -> None:
    progress = Progress(rounds=1, copied_bytes=sent, copying_ms=took, blocks_left=left)
    longer = Progress(rounds=1, copied_bytes=sent, copying_ms=took, blocks_left=left + more)
    assert predicted_stop_ms(progress, 4096, 1.0) < predicted_stop_ms(longer, 4096, 1.0)


@pytest.mark.parametrize(
    ("progress", "stop_ms", "step"),
    [
        (Progress(blocks_left=10), 1.0, "round"),
        (Progress(blocks_left=1), 1.0, "freeze"),
        (after_rounds(1, 5, None), 20.0, "freeze"),
        (after_rounds(1, 5, None), 20.1, "round"),
        (after_rounds(2, 4, 5), 100.0, "round"),
        (after_rounds(2, 5, 5), 150.0, "freeze"),
        (after_rounds(2, 6, 5), 150.1, "abort"),
        (after_rounds(8, 4, 5), 100.0, "freeze"),
        (after_rounds(8, 4, 5), 151.0, "abort"),
        (after_rounds(2, 4, 5, elapsed_ms=10_000.0), 100.0, "freeze"),
        (after_rounds(2, 4, 5, elapsed_ms=10_000.0), 151.0, "abort"),
    ],
    ids=[
        "nothing copied yet",
        "nothing to copy before the freeze",
        "fits the budget",
        "does not fit",
        "still shrinks",
        "shrinks no more, bearable",
        "shrinks no more, too long",
        "out of rounds, bearable",
        "out of rounds, too long",
        "out of time, bearable",
        "out of time, too long",
    ],
)
def test_next_step(progress: Progress, stop_ms: float, step: str) -> None:
    assert next_step(progress, stop_ms, LIMITS) == step


@given(
    blocks=st.integers(1, 2_000),
    copy_blocks_per_ms=st.floats(0.01, 100.0),
    grown_blocks_per_ms=st.floats(0.0, 10.0),
)
def test_P15_a_move_over_any_link_ends_within_its_rounds_and_never_stops_for_too_long(
    blocks: int, copy_blocks_per_ms: float, grown_blocks_per_ms: float
) -> None:
    progress, step, stop_ms = Progress(blocks_left=blocks), "round", 0.0
    while step == "round":
        took = progress.blocks_left / copy_blocks_per_ms
        progress = Progress(
            rounds=progress.rounds + 1,
            copied_bytes=progress.copied_bytes + progress.blocks_left * 1_000,
            copying_ms=progress.copying_ms + took,
            elapsed_ms=progress.elapsed_ms + took,
            blocks_left=1 + int(took * grown_blocks_per_ms),
            blocks_left_before=progress.blocks_left if progress.rounds else None,
        )
        assert progress.rounds <= LIMITS.rounds_max
        stop_ms = predicted_stop_ms(progress, 1_000, 1.0)
        step = next_step(progress, stop_ms, LIMITS)
    assert step == "abort" or stop_ms <= LIMITS.stop_max_ms


@given(tokens=st.integers(0, 10**7), block_tokens=st.integers(1, 512))
def test_blocks_for_is_the_least_number_that_holds_the_tokens(tokens: int, block_tokens: int) -> None:
    blocks = blocks_for(tokens, block_tokens)
    assert blocks * block_tokens >= tokens
    assert (blocks - 1) * block_tokens < tokens or blocks == 0
