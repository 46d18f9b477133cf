"""A short storm on every backend; `python -m tests.migration.transfer_storm` is the long one."""

from __future__ import annotations

import importlib.util

import pytest

from tests.migration import transfer_storm

HAS_TORCH = importlib.util.find_spec("torch") is not None
NAMES = [name for name in transfer_storm.BACKENDS if HAS_TORCH or name not in transfer_storm.NEED_TORCH]


@pytest.mark.parametrize("backend", NAMES)
async def test_P07_P08_moves_that_end_anyhow_leave_nothing_behind(backend: str) -> None:
    ends, more = await transfer_storm.storm(backend, 60, kill_every=30)
    assert more == (0, 0, 0)
    assert ends["killed"] == 2
    assert ends["moved"] and ends["cancelled"] + ends["failed"]
