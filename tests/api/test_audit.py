"""What the demo's audit counts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from midstream.api.demo.audit import audit, percentile
from midstream.control.adapters.sql_store import ArchiveStore
from midstream.control.events import DowntimeMeasured, Entry, MigrationCommitted
from midstream.control.ids import Position
from tests.control.fixtures import GATEWAY, Story


def test_P19_what_was_said_again_after_the_log_lost_its_memory_counts_once(sqlite_url: str) -> None:
    story = Story()
    a, b = story.instance("a"), story.instance("b")
    story.running("r", a)
    story.say(GATEWAY, MigrationCommitted(migration="m", request="r", epoch=1, owner=b, tail_tokens=0))
    story.say(GATEWAY, DowntimeMeasured(migration="m", gap_ms=30.0, normal_gap_ms=20.0, downtime_ms=10.0))
    again = [replace(entry, position=Position(2, index)) for index, entry in enumerate(story.entries[-2:], start=1)]
    opened = Entry(Position(2, 0), Story(2).entries[0].fact)
    store = ArchiveStore(sqlite_url)
    try:
        store.store([*story.entries, opened, *again])
        found = audit(store)
    finally:
        store.close()
    assert found.moves_by_reason == {"unknown": 1}
    assert found.downtime_ms == (10.0,)
    assert found.downtime_steps == (0.5,)
    assert found.facts == len(story.entries) + 1
    assert found.holes == ()


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2.0), (0.99, 4.0), (1.0, 4.0), (0.01, 1.0)])
def test_a_percentile_is_one_of_the_values(share: float, expected: float) -> None:
    assert percentile((1.0, 2.0, 3.0, 4.0), share) == expected
    assert percentile((), share) is None
