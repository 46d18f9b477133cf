"""Replay: every decision comes out of the log again, and the first one that does not is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from midstream.control.adapters.sql_store import ArchiveStore
from midstream.control.codec import decode_state, encode_state
from midstream.control.errors import BadInput, UnknownThing
from midstream.control.events import (
    Entry,
    Fact,
    InstanceSuspected,
    LoadReported,
    MoveDecided,
    PolicyConfigured,
    TaskFailed,
    TickElapsed,
)
from midstream.control.ids import COMMIT_SOURCE, START, Owner
from midstream.control.replay import ReplayReport, as_json, verify
from midstream.control.state import Load, PolicyChoice, PolicySettings
from tests.contracts.test_archive import lossy_day
from tests.control.histories import Recorded, busy_day, folded, full_and_empty


def moves(log: Recorded) -> list[Entry]:
    return [e for e in log.entries if isinstance(e.fact.event, MoveDecided)]


def with_event(log: Recorded, index: int, event: object) -> list[Entry]:
    """The log with another event in one place."""
    entries = list(log.entries)
    old = entries[index]
    entries[index] = Entry(old.position, replace(old.fact, event=event))
    return entries


def test_P17_every_decision_comes_out_of_the_log_again():
    log = busy_day()
    report = verify(log.entries)
    assert report.is_equal, report.first_difference
    assert report.decisions == report.equal > 5
    assert len(moves(log)) > 3
    assert (report.ticks, report.ticks_skipped, report.facts) == (12, 0, len(log.entries))
    assert report.last == log.entries[-1].position


def test_P17_facts_between_a_decision_and_its_commit_are_not_part_of_it():
    """Folding to the tick instead of to where it was decided would let a late fact change the decision."""
    log = full_and_empty()
    late = LoadReported(owner=Owner("a", 1), load=Load(running=0, blocks_free=200))
    events = log.tick(1_000, lag=[late])
    assert any(isinstance(e, MoveDecided) for e in events)
    assert verify(log.entries).is_equal


def test_P17_another_parameter_shows_the_first_difference():
    log = busy_day()
    report = verify(log.entries, overrides={"balance.low": 0.5})
    assert not report.is_equal
    difference = report.first_difference
    assert difference is not None
    first = moves(log)[0]
    assert difference.position == first.position
    assert difference.recorded is not None
    assert difference.recorded["migration"] == first.fact.event.migration
    assert "MoveDecided" in difference.explanation
    assert str(first.position) in difference.explanation
    assert report.equal < report.decisions
    assert report.ticks == 12, "it counts on behind the first difference"


def test_a_setting_all_policies_share_can_be_overridden():
    log = busy_day()
    report = verify(log.entries, overrides={"moves_per_tick_max": 0})
    assert report.first_difference is not None
    assert verify(log.entries, overrides={"moves_per_tick_max": 8}).is_equal


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        ({"nobody.low": 1}, UnknownThing),
        ({"balance.nothing": 1}, BadInput),
        ({"balance.low": "much"}, BadInput),
        ({"cooldown": 1}, UnknownThing),
        ({"cooldown_ms": "long"}, BadInput),
        ({"round_robin.x": 1}, BadInput),
    ],
)
def test_a_bad_override_is_refused_before_anything(overrides: dict[str, object], error: type[Exception]):
    with pytest.raises(error):
        verify(iter(()), overrides=overrides)


def test_an_override_of_a_policy_that_was_never_in_force_is_refused():
    log = Recorded()
    log.say("admin", PolicyConfigured(policies=PolicySettings(moves=(PolicyChoice("none"),)), actor="me"))
    log.tick(1_000)
    with pytest.raises(UnknownThing, match="balance"):
        verify(log.entries, overrides={"balance.low": 3})


def test_P17_a_changed_missing_or_added_decision_is_found():
    log = busy_day()
    index = log.entries.index(moves(log)[1])
    changed = verify(with_event(log, index, replace(log.entries[index].fact.event, reason="because")))
    assert changed.first_difference is not None
    assert changed.first_difference.position == log.entries[index].position
    assert "reason" in changed.first_difference.explanation

    missing = verify(log.entries[:index] + log.entries[index + 1 :])
    assert missing.first_difference is not None
    assert "is derived" in missing.first_difference.explanation

    suspected = InstanceSuspected(owner=Owner("a", 1), silent_ms=1)
    last = log.entries[-1]
    more = Entry(last.position._replace(seq=last.position.seq + 1), Fact(COMMIT_SOURCE, 1, 999, 0, suspected))
    added = verify([*log.entries, more])
    assert added.first_difference is not None
    assert added.first_difference.derived is None
    assert "nothing more is derived" in added.first_difference.explanation


def test_P17_a_commit_cut_by_the_end_of_the_archive_or_of_a_generation_is_no_difference():
    log = full_and_empty()
    assert log.tick(1_000)
    assert verify(log.entries[:-1]).is_equal
    log.lose(1)
    log.carry()
    assert verify(log.entries).is_equal


def test_P19_the_state_carried_into_a_new_generation_replaces_and_is_checked():
    log = lossy_day()
    report = verify(log.entries)
    assert report.is_equal, report.first_difference
    forged = lossy_day()
    forged.reopen()
    forged.carry(digest_of=b"something else")
    report = verify(forged.entries)
    assert report.first_difference is not None
    assert "digest" in report.first_difference.explanation


def test_P19_the_archive_replays_as_the_log_did(database_url: str):
    log = lossy_day()
    store = ArchiveStore(database_url)
    for first in range(0, len(log.entries), 11):
        store.store(log.entries[first : first + 11])
    assert verify(store.iterate()) == verify(log.entries)
    assert len(store.read(START, 1_000)) < len(log.entries), "some facts were said twice"
    store.close()


def test_replay_may_start_from_a_snapshot():
    log = busy_day()
    middle = moves(log)[2].position
    state = decode_state(encode_state(folded(log.entries, middle)))
    tail = [e for e in log.entries if e.position > middle]
    report = verify(tail, from_state=state)
    assert report.is_equal
    assert 0 < report.ticks < 12


def test_ticks_decided_before_the_known_state_are_told_not_guessed():
    log = busy_day()
    tick = [e for e in log.entries if isinstance(e.fact.event, TickElapsed)][4]
    between = tick.position._replace(seq=tick.position.seq - 1)
    assert tick.fact.event.decided_at < between
    state = folded(log.entries, between)
    report = verify([e for e in log.entries if e.position > between], from_state=state)
    assert report.ticks_skipped == 1
    assert report.is_equal


def test_a_tick_decided_before_a_later_commit_is_a_difference():
    log = busy_day()
    ticks = [n for n, e in enumerate(log.entries) if isinstance(e.fact.event, TickElapsed)]
    old = replace(log.entries[ticks[4]].fact.event, decided_at=log.entries[3].position)
    report = verify(with_event(log, ticks[4], old))
    assert report.first_difference is not None
    assert "later commit" in report.first_difference.explanation


def test_progress_is_told():
    log = busy_day()
    told: list[int] = []
    verify((Entry(log.entries[0].position, Fact("s", 1, n, 0, TaskFailed(task="", error=""))) for n in range(5_000)),
           on_progress=told.append)  # fmt: skip
    assert told == [2_000, 4_000]


def test_the_report_is_plain_json():
    log = busy_day()
    report = as_json(verify(log.entries, overrides={"balance.low": 0.5}))
    assert msgspec.json.decode(msgspec.json.encode(report)) == report
    assert report["is_equal"] is False
    assert report["first_difference"]["position"] == str(moves(log)[0].position)
    assert report["last"] == str(log.entries[-1].position)


HASHED = """
from midstream.control.replay import as_json, verify
from tests.contracts.test_archive import lossy_day
from tests.control.histories import busy_day
import msgspec
print([msgspec.json.encode(as_json(verify(day().entries))) for day in (busy_day, lossy_day)], busy_day().entries[-30:])
"""


def test_P17_another_hash_seed_changes_nothing(tmp_path: Path):
    outputs = {
        subprocess.run(
            [sys.executable, "-c", HASHED], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(outputs) == 1
    assert isinstance(verify(busy_day().entries), ReplayReport)
