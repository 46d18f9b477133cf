"""What of a load is news, and how long decoding alone makes none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from midstream.control.state import Load
from midstream.instance.news import NEWS_SHARE, is_news, quiet_ms

BUSY = Load(running=4, blocks_free=640, step_ms=20.0)


@pytest.mark.parametrize(
    "change",
    [{"running": 5}, {"waiting": 1}, {"blocks_reserved": 1}, {"blocks_head": 1}, {"preemptions": 1}],
)
def test_every_count_is_news_at_once(change: dict[str, float]) -> None:
    assert is_news(BUSY, replace(BUSY, **change))
    assert not is_news(BUSY, replace(BUSY, step_ms=30.0))


@pytest.mark.parametrize(("reported", "now", "expected"), [
    (640, 630, False), (640, 629, True), (640, 650, False), (640, 651, True), (63, 62, True), (0, 1, True),
])  # fmt: skip
def test_free_blocks_count_to_a_share_of_themselves(reported: int, now: int, expected: bool) -> None:
    assert is_news(replace(BUSY, blocks_free=reported), replace(BUSY, blocks_free=now)) is expected


def test_who_waits_or_arrives_leaves_no_quiet_and_who_serves_nothing_leaves_nothing_else() -> None:
    assert quiet_ms(BUSY, replace(BUSY, waiting=1), 16) == 0
    assert quiet_ms(BUSY, replace(BUSY, blocks_reserved=1), 16) == 0
    assert quiet_ms(BUSY, Load(blocks_free=640), 16) == float("inf")


@given(st.integers(1, 64), st.integers(0, 2_000), st.integers(0, 40), st.sampled_from([1, 4, 16]), st.data())
def test_P21_decoding_makes_no_news_before_the_quiet_ends(
    running: int, reported: int, taken: int, block_tokens: int, data: st.DataObject
) -> None:
    """The worst case: each request takes a block with its first step already, and one more with each block's end."""
    before = Load(running=running, blocks_free=reported, step_ms=10.0)
    looked = replace(before, blocks_free=reported - min(taken, reported // NEWS_SHARE))
    steps = round(quiet_ms(before, looked, block_tokens) / 10.0)
    at = data.draw(st.integers(0, steps))
    worst = looked.blocks_free - running * -(-at // block_tokens)
    assert not is_news(before, replace(looked, blocks_free=worst))
