"""Two controllers on one log: every decision once, whoever makes it. The long form: `tests.e2e.two_controllers`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.two_controllers import play, report

SECONDS = 10.0

pytestmark = pytest.mark.timeout(150)


async def test_P18_two_controllers_decide_everything_once(tmp_path: Path) -> None:
    seen = await play(tmp_path, SECONDS)
    assert seen.problems == [], report(seen)
    assert seen.moves_decided > 0
    assert sum(seen.lost_races.values()) > 0, "the two never met"
