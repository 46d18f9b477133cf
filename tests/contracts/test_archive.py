"""The contract of `control.ports.Archive`: in memory, on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from midstream import migrations
from midstream.control.adapters.memory_archive import MemoryArchive
from midstream.control.adapters.sql import SqlArchive
from midstream.control.codec import decode_stored, encode_state
from midstream.control.errors import ArchiveForked, BadInput
from midstream.control.events import Entry, Fact, MigrationStarted, RequestCancelled, RoundCopied, TaskFailed
from midstream.control.ids import START, Owner, Position
from midstream.control.ports import Archive, Hole
from midstream.control.state import SourceMark
from tests.control.histories import Recorded, busy_day, entry, folded, load


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def archive(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Archive]:
    opened: Archive = MemoryArchive()
    if request.param != "memory":
        sqlite = f"sqlite:///{tmp_path}/archive.db"
        url = sqlite if request.param == "sqlite" else request.getfixturevalue("empty_postgres_url")
        migrations.upgrade(url)
        opened = SqlArchive(url)
    yield opened
    await opened.close()


def ten() -> list[Entry]:
    return [load(n, n + 1) for n in range(10)]


async def test_P19_what_is_stored_is_read_back_exactly_and_moves_the_position(archive: Archive):
    assert await archive.position() == START
    await archive.store(ten())
    assert await archive.position() == Position(1, 9)
    assert await archive.read(START) == await archive.history(START) == ten()
    assert await archive.counts() == {"LoadReported": 10}
    assert await archive.marks() == {"llumlet/a": SourceMark(1, 10)}


async def test_P19_storing_again_in_other_batches_changes_nothing(archive: Archive):
    await archive.store(ten()[:6])
    await archive.store(ten()[2:])
    await archive.store(ten()[:3])
    await archive.store([])
    assert await archive.position() == Position(1, 9)
    assert await archive.history(START) == ten()


async def test_P19_a_fact_said_again_counts_once_and_stands_in_the_history_where_it_was(archive: Archive):
    again = [load(0, 9, generation=2), load(1, 10, generation=2), load(2, 11, generation=2), load(3, 11, generation=2)]
    await archive.store(ten())
    await archive.store(again)
    await archive.store(again)
    assert await archive.read(START) == [*ten(), again[2]]
    assert await archive.history(START) == [*ten(), *again]
    assert await archive.history(Position(1, 8), 3) == [ten()[9], *again[:2]]
    assert await archive.history(Position(1, 8), upto=Position(2, 0)) == [ten()[9], again[0]]
    assert await archive.holes() == []
    assert await archive.position() == Position(2, 3)


async def test_P19_holes_are_found_at_the_start_and_inside_and_heal(archive: Archive):
    await archive.store([load(0, 3), load(1, 4), load(2, 7), load(3, 1, instance="b")])
    assert await archive.holes() == [Hole("llumlet/a", 1, 1, 2), Hole("llumlet/a", 1, 5, 6)]
    await archive.store([load(n, n + 1, generation=2) for n in range(6)])
    assert await archive.holes() == []


async def test_P19_a_forked_log_is_refused_with_nothing_stored(archive: Archive):
    await archive.store(ten())
    with pytest.raises(ArchiveForked, match="1-9"):
        await archive.store([load(9, 99), load(10, 100)])
    assert await archive.history(START) == ten()
    assert await archive.position() == Position(1, 9)


async def test_P19_one_poison_entry_stalls_nothing_and_keeps_its_place(archive: Archive):
    poison = Entry(Position(1, 1), decode_stored(b"\x00\xff no fact"))
    nul = entry(2, TaskFailed(task="t", error="e"), source="bad\0source")
    long = entry(3, RequestCancelled(request="r" * 5_000, epoch=1, output_tokens=0), source="gateway/g")
    huge = Entry(Position(1, 4), Fact("llumlet/x", 2**70, 1, 1, TaskFailed(task="t", error="\0")))
    again = Entry(Position(1, 6), poison.fact)
    stored = [load(0, 1), poison, nul, long, huge, load(5, 2), again]
    await archive.store(stored)
    await archive.store(stored)
    assert await archive.history(START) == stored
    assert await archive.read(START) == [stored[0], stored[5]]
    assert await archive.position() == Position(1, 6)
    assert await archive.holes() == []


async def test_facts_of_a_newer_build_are_kept_and_found_by_their_kind(archive: Archive):
    text = b'{"kind":"New","version":3,"source":"s","incarnation":1,"source_seq":1,"at_ms":5,"payload":{"x":[1]}}'
    newer = Entry(Position(1, 0), decode_stored(text))
    await archive.store([newer])
    assert await archive.read(START, kind="New") == [newer]
    assert await archive.counts() == {"New": 1}


async def test_reading_finds_facts_by_kind_subject_and_time(archive: Archive):
    cancelled = entry(3, RequestCancelled(request="r1", epoch=1, output_tokens=0), source="gateway/g", number=7)
    await archive.store([load(0, 1), load(1, 2), load(2, 1, instance="b"), cancelled])
    assert await archive.read(START, kind="RequestCancelled") == [cancelled]
    assert await archive.read(START, request="r1") == [cancelled]
    assert await archive.read(START, instance="b") == [load(2, 1, instance="b")]
    assert await archive.read(START, since_ms=2_000, until_ms=2_000) == [load(1, 2)]
    assert await archive.read(START, instance="a", since_ms=3_000) == []
    assert await archive.read(Position(1, 0), kind="LoadReported", instance="a") == [load(1, 2)]


async def test_P29_pages_lead_to_the_end(archive: Archive):
    await archive.store(ten())
    seen: list[Entry] = []
    while page := await archive.read(seen[-1].position if seen else START, 3):
        seen += page
    assert seen == ten()


@pytest.mark.parametrize("count", [0, -1, 10_001])
async def test_a_bad_count_is_refused(archive: Archive, count: int):
    with pytest.raises(BadInput, match="count"):
        await archive.read(START, count)
    with pytest.raises(BadInput, match="count"):
        await archive.history(START, count)


async def test_a_request_s_story_has_its_moves(archive: Archive):
    a, b = Owner("a", 1), Owner("b", 1)
    started = entry(1, MigrationStarted(migration="m1", request="r1", epoch=1, source=a, target=b), number=2)
    copied = entry(2, RoundCopied(migration="m1", round=1, blocks=1, copied_bytes=1, duration_ms=1.0), number=3)
    other = entry(3, RoundCopied(migration="m2", round=1, blocks=1, copied_bytes=1, duration_ms=1.0), number=4)
    cancelled = entry(4, RequestCancelled(request="r1", epoch=1, output_tokens=0), number=5)
    await archive.store([load(0, 1), started, copied, other, cancelled])
    assert await archive.story("r1") == [started, copied, cancelled]
    assert await archive.story("nobody") == []


async def test_a_time_leads_to_a_position(archive: Archive):
    await archive.store(ten())
    assert await archive.position_at(4_500) == Position(1, 3)
    assert await archive.position_at(10**12) == Position(1, 9)
    assert await archive.position_at(0) == START


def lossy_day() -> Recorded:
    """A log that lost its memory: what was archived and forgotten by Redis is said again, after the state was carried.

    The carried state is of a controller that had not seen the last reports; live folds apply them only where they
    were said again. An archive that kept facts but not the places of their repeats would fold to something else.
    """
    log = busy_day(ticks=4)
    log.catch_up()
    unseen = [log.report("b", msgspec.structs.replace(log.state.instances["b"].load, blocks_free=n)) for n in range(3)]
    log.reopen()
    log.say("llumlet/late", TaskFailed(task="t", error="before the state is carried"))
    behind = [e for e in log.entries if e.fact not in unseen]
    log.state = folded(behind, behind[-1].position)
    log.carry()
    for fact in unseen:
        log.append(fact)
    log.tick(6_000)
    return log


async def test_P19_the_archive_folds_to_what_was_live_at_every_position(archive: Archive):
    log = lossy_day()
    await archive.store(log.entries[:30])
    await archive.store(log.entries[30:])
    for each in log.entries[::7] + log.entries[-9:]:
        state = await archive.state_at(each.position)
        assert encode_state(state) == encode_state(folded(log.entries, each.position)), each.position


async def test_P19_a_snapshot_and_the_tail_fold_to_the_same_state(archive: Archive):
    log = lossy_day()
    await archive.store(log.entries)
    middle = folded(log.entries, log.entries[20].position)
    await archive.save_snapshot(middle.position, encode_state(middle))
    await archive.save_snapshot(middle.position, b"{}")
    end = log.entries[-1].position
    assert encode_state(await archive.state_at(end)) == encode_state(folded(log.entries, end))
    before = log.entries[19].position
    assert encode_state(await archive.state_at(before)) == encode_state(folded(log.entries, before))


async def test_the_state_is_folded_from_the_nearest_snapshot(archive: Archive):
    await archive.store(ten())
    planted = folded(ten(), Position(1, 4))
    planted.gaps = 77
    await archive.save_snapshot(planted.position, encode_state(planted))
    assert (await archive.state_at(Position(1, 9))).gaps == 77
    assert (await archive.state_at(Position(1, 3))).gaps == 0
