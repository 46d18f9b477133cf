"""The loop that live processes run on: fast, and with a clock that sees parts of a millisecond."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from midstream.api import event_loop


def test_it_is_uvloop_with_a_clock_that_goes_on_within_a_turn() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, uvloop.Loop)
        return [loop.time() for _ in range(1_000)]

    times = event_loop.run(main())
    assert times == sorted(times)
    assert len(set(times)) > len(times) / 2
    assert abs(times[0] - time.monotonic()) < 60


def test_deadlines_go_by_the_same_clock() -> None:
    async def main() -> float:
        begun = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout_at(begun + 0.05):
                await asyncio.sleep(60)
        return asyncio.get_running_loop().time() - begun

    assert 0.04 < event_loop.run(main()) < 30
