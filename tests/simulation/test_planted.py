"""The simulation finds what it is for: each planted bug, within 500 seeds. By hand: `tests.simulation.planted`."""

from __future__ import annotations

import pytest

from tests.simulation.planted import BUGS, SEEDS_MAX, Bug, hunt


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_P31_a_planted_bug_is_found(bug: Bug) -> None:
    """Stops at the first seed that shows it, which is soon."""
    found = hunt(bug, jobs=2)
    assert found.found, f"{bug.name}: {SEEDS_MAX} seeds show nothing"
    assert found.violation
