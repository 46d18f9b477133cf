"""The archive in SQL under kills, cancellations and outages, its schema, and the archiver on top of it."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import psycopg
import pytest
import redis
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select
from structlog.testing import capture_logs

from midstream import migrations
from midstream.control.adapters.local_valkey import LocalValkey
from midstream.control.adapters.memory_archive import MemoryArchive
from midstream.control.adapters.memory_log import MemoryLog, MemoryLogStore
from midstream.control.adapters.redis_log import RedisLog
from midstream.control.adapters.sql import SqlArchive
from midstream.control.adapters.sql_engine import make_engine, transaction
from midstream.control.adapters.sql_schema import metadata
from midstream.control.adapters.sql_store import ArchiveStore
from midstream.control.archive import Archiver
from midstream.control.codec import encode_state
from midstream.control.errors import ArchiveUnavailable, BadInput, LogUnavailable, UnknownThing
from midstream.control.events import Entry, Event, Fact, FactsMissed, TaskFailed
from midstream.control.ids import START, Position
from midstream.control.ports import Clock, Hole
from midstream.control.publisher import Publisher
from midstream.control.simulate.loop import VirtualClock, run_virtual
from midstream.control.state import State
from tests.control.histories import entry, load
from tests.crash import crash

# --- the schema -------------------------------------------------------------------------------------


def test_the_tables_come_from_nothing_and_a_second_upgrade_does_nothing(empty_database_url: str):
    assert migrations.current(empty_database_url) is None
    assert migrations.upgrade(empty_database_url) == migrations.head()
    assert migrations.upgrade(empty_database_url) == migrations.head()
    assert migrations.current(empty_database_url) == migrations.head()


def test_the_tables_are_those_the_code_knows(database_url: str):
    engine = make_engine(database_url)
    with transaction(engine) as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_a_schema_can_be_taken_down_again(database_url: str):
    assert migrations.upgrade(database_url) == migrations.head()
    assert migrations.downgrade(database_url, "base") == "base"
    assert migrations.upgrade(database_url) == migrations.head()


def test_upgrades_at_the_same_time_are_harmless(empty_database_url: str):
    reached: list[str] = []
    threads = [
        threading.Thread(target=lambda: reached.append(migrations.upgrade(empty_database_url))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reached == [migrations.head()] * 4


def test_a_database_without_tables_says_what_to_do(empty_database_url: str):
    store = ArchiveStore(empty_database_url)
    with pytest.raises(ArchiveUnavailable, match="midstream db upgrade"):
        store.position()
    store.close()


@pytest.mark.parametrize("url", ["", "nonsense", "sqlite://", "sqlite:///:memory:", "mysql://h/d", "redis://h"])
def test_a_bad_database_url_is_refused(url: str):
    with pytest.raises(BadInput):
        ArchiveStore(url)


def test_a_database_that_is_away_is_unavailable(tmp_path: Path):
    for url in (f"sqlite:///{tmp_path}/no/such/folder/a.db", f"postgresql://postgres@/x?host={tmp_path}"):
        store = ArchiveStore(url)
        with pytest.raises(ArchiveUnavailable):
            store.store([load(0, 1)])
        store.close()


# --- storing ----------------------------------------------------------------------------------------

WRITER = """
import sys
from midstream.control.adapters.sql_store import ArchiveStore
from tests.control.histories import load
store = ArchiveStore(sys.argv[1])
start = store.position().seq + 1 if store.position().generation else 0
for first in range(start, 1_000_000, 37):
    store.store([load(n, n + 1) for n in range(first, first + 37)])
    print(first, flush=True)
"""


def test_R6_a_killed_writer_leaves_rows_and_position_together(database_url: str):
    store = ArchiveStore(database_url)
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", WRITER, database_url], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(5):
                writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
        end = store.position()
        assert end > START
        assert store.length(Position(9, 0)) == store.length(end) == end.seq + 1
        assert store.holes() == []
    assert [e.position.seq for e in store.iterate()] == list(range(end.seq + 1))
    store.close()


def test_R6_rows_and_position_are_one_transaction(database_url: str):
    store = ArchiveStore(database_url)
    store.store([load(0, 1)])
    with pytest.raises(RuntimeError), transaction(store.engine, writes=True) as connection:
        connection.execute(metadata.tables["facts"].delete())
        connection.execute(metadata.tables["archive_position"].update().values(seq=99))
        raise RuntimeError
    assert store.position() == Position(1, 0)
    assert store.history(START) == [load(0, 1)]
    store.close()


async def test_R7_R8_cancelled_writers_neither_hang_nor_spoil_anything(database_url: str):
    archive = SqlArchive(database_url)
    entries = [load(n, n + 1) for n in range(400)]
    for round_ in range(40):
        task = asyncio.create_task(archive.store(entries[10 * round_ : 10 * round_ + 10]))
        await asyncio.sleep(0.0005 * (round_ % 4))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(30):
        await archive.store(entries)
        assert await archive.history(START) == entries
        assert await archive.holes() == []
        await archive.close()


async def test_P13_connections_that_the_database_cuts_are_made_again(empty_postgres_url: str):
    migrations.upgrade(empty_postgres_url)
    archive = SqlArchive(empty_postgres_url)
    entries = [load(n, n + 1) for n in range(60)]
    for first in range(0, 60, 10):
        await archive.store(entries[first : first + 10])
        with psycopg.connect(empty_postgres_url, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    assert await archive.history(START) == entries
    await archive.close()


async def test_a_closed_archive_says_so_instead_of_hanging(sqlite_url: str):
    archive = SqlArchive(sqlite_url)
    await archive.close()
    await archive.close()
    with pytest.raises(ArchiveUnavailable, match="closed"):
        await archive.position()


async def test_P28_a_flood_of_calls_is_refused_not_queued_without_end(sqlite_url: str):
    archive = SqlArchive(sqlite_url)
    await archive.store([load(0, 1)])
    results = await asyncio.gather(*(archive.position() for _ in range(1_000)), return_exceptions=True)
    refused = [r for r in results if isinstance(r, ArchiveUnavailable)]
    assert 0 < len(refused) < 1_000
    assert set(results) - set(refused) == {Position(1, 0)}
    assert await archive.position() == Position(1, 0)
    await archive.close()


def test_P19_readers_of_other_processes_see_whole_batches_while_one_writes(database_url: str):
    store = ArchiveStore(database_url)
    with subprocess.Popen([sys.executable, "-c", WRITER, database_url], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for _ in range(20):
            writer.stdout.readline()
            end = store.position()
            assert (end.seq + 1) % 37 == 0
            assert store.length(end) == end.seq + 1
            assert [e.position.seq for e in store.history(Position(1, 0), 100)][:5] == [1, 2, 3, 4, 5]
        writer.kill()
    store.close()


def test_two_writers_at_once_store_every_fact_once(database_url: str):
    entries = [load(n, n + 1) for n in range(2_000)]
    errors: list[Exception] = []

    def write(size: int) -> None:
        store = ArchiveStore(database_url)
        try:
            for first in range(0, len(entries), size):
                store.store(entries[first : first + size])
        except ArchiveUnavailable as error:
            errors.append(error)
        store.close()

    threads = [threading.Thread(target=write, args=(size,)) for size in (70, 110)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = ArchiveStore(database_url)
    assert errors == []
    assert list(store.iterate()) == entries
    with transaction(store.engine) as connection:
        assert connection.execute(select(metadata.tables["repeats"])).all() == []
    store.close()


def test_dead_letters_can_be_looked_at(database_url: str):
    store = ArchiveStore(database_url)
    store.store([entry(0, TaskFailed(task="t", error="e"), source="bad\0source")])
    [(position, error, body)] = store.dead_letters()
    assert (position, "NUL" in error, "TaskFailed" in body) == (Position(1, 0), True, True)
    store.close()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6)), max_size=30), st.randoms(use_true_random=False))
def test_P19_memory_and_sql_agree_on_any_log(tmp_path_factory: pytest.TempPathFactory, said, rng):
    log = [load(seq, number, instance=who) for seq, (who, number) in enumerate(said)]
    url = f"sqlite:///{tmp_path_factory.mktemp('any')}/a.db"
    migrations.upgrade(url)
    store, memory = ArchiveStore(url), MemoryArchive()
    for _ in range(4):
        cut = sorted(rng.randrange(len(log) + 1) for _ in range(2))
        store.store(log[cut[0] : cut[1]])
        asyncio.run(memory.store(log[cut[0] : cut[1]]))
    for first in range(0, len(log), 7):
        store.store(log[first : first + 7])
        asyncio.run(memory.store(log[first : first + 7]))
    assert store.history(START) == asyncio.run(memory.history(START)) == log
    assert store.read(START) == asyncio.run(memory.read(START))
    assert {e.fact.source + str(e.fact.source_seq) for e in store.read(START)} == {
        e.fact.source + str(e.fact.source_seq) for e in log
    }
    assert store.holes() == asyncio.run(memory.holes())
    assert store.marks() == asyncio.run(memory.marks())
    store.close()


# --- operations -------------------------------------------------------------------------------------


def test_operations_are_opened_once_and_end_once(database_url: str):
    archive = SqlArchive(database_url)

    async def steps() -> None:
        opened = await archive.open_operation("op-1", "replay", {"upto": None}, 10)
        assert (opened.status, opened.params, opened.created_at_ms) == ("accepted", {"upto": None}, 10)
        assert await archive.open_operation("op-1", "replay", {"upto": "1-1"}, 20) == opened
        store = archive.operation_store
        store.report("op-1", 0.5, 30)
        assert (await archive.operation("op-1")).progress == 0.5
        store.succeed("op-1", {"equal": 3}, 40)
        store.fail("op-1", "late", 50)
        store.report("op-1", 0.1, 60)
        ended = await archive.operation("op-1")
        assert (ended.status, ended.result, ended.error, ended.updated_at_ms) == ("succeeded", {"equal": 3}, None, 40)
        with pytest.raises(UnknownThing):
            await archive.operation("op-2")
        for number in range(5):
            await archive.open_operation(f"p-{number}", "replay", {}, 100 + number // 2)
        first = await archive.operations(4)
        rest = await archive.operations(4, after=first[-1].id)
        assert [o.id for o in first + rest] == ["p-4", "p-3", "p-2", "p-1", "p-0", "op-1"]
        await archive.close()

    asyncio.run(steps())


# --- the archiver -----------------------------------------------------------------------------------


LATER_MS = 10


class Heard:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, event: object) -> None:
        assert isinstance(event, Event)
        self.events.append(event)


class HandClock:
    def __init__(self) -> None:
        self.ms = 1_000_000

    def now_ms(self) -> int:
        return self.ms


class ShakyArchive(MemoryArchive):
    """Fails when told to: before the effect or after it."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[str] = []

    async def store(self, entries: Sequence[Entry]) -> None:
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "before":
            raise ArchiveUnavailable("away")
        await super().store(entries)
        if failure == "after":
            raise ArchiveUnavailable("the answer was lost")


class Rig:
    """A log with a producer, an archive and an archiver."""

    def __init__(self, retain_ms: int = 0, clock: Clock | None = None) -> None:
        self.clock = clock or HandClock()
        self.server = MemoryLogStore(clock=self.clock)
        self.log = MemoryLog(self.server, opened_by="producer")
        self.archive = ShakyArchive()
        self.heard = Heard()
        self.retain_ms = retain_ms
        self.archiver = self.another()
        self.said = 0

    def another(self) -> Archiver:
        log = MemoryLog(self.server, opened_by="archiver")
        return Archiver(log, self.archive, self.clock, self.heard, retain_ms=self.retain_ms, read_wait_ms=0)

    async def say(self, count: int, *, skip: int = 0) -> Position:
        self.said += skip
        facts = [Fact("llumlet/a", 1, self.said + n, n, TaskFailed(task="t", error="")) for n in range(1, count + 1)]
        self.said += count
        return await self.log.append(facts)

    async def newcomer_says(self, count: int) -> Position:
        """A while later, a producer that knows no generation is the first to speak."""
        self.clock.ms += LATER_MS
        self.log = MemoryLog(self.server, opened_by="a producer that knows nothing")
        return await self.say(count)

    async def archive_all(self, archiver: Archiver | None = None) -> None:
        archiver = archiver or self.archiver
        while archiver.position < self.server.last:
            await archiver.step()

    async def due(self) -> None:
        """Make the archiver's periodic work due."""
        self.archiver._tidy_due = self.archiver._check_due = 0.0
        await self.archiver.step()


async def test_P19_the_archiver_copies_the_log_and_a_new_one_goes_on_where_it_was():
    rig = Rig()
    await rig.say(1_200)
    await rig.archive_all()
    await rig.say(30)
    rig.archiver = rig.another()
    await rig.archive_all()
    assert await rig.archive.history(START, 2_000) == rig.server.entries
    assert rig.archiver.stored == 30
    assert await rig.archive.holes() == [] == rig.heard.events


@pytest.mark.parametrize("failure", ["before", "after"])
async def test_R6_a_failed_store_is_done_again_and_harmless(failure: str):
    rig = Rig()
    rig.archive.failures = [failure]
    await rig.say(20)
    with pytest.raises(ArchiveUnavailable):
        await rig.archiver.step()
    await rig.archive_all()
    assert await rig.archive.history(START) == rig.server.entries


async def test_P13_run_waits_out_a_log_and_a_database_that_are_away():
    rig = Rig()
    rig.archive.failures = ["before", "after"]
    rig.server.is_down = True
    task = asyncio.create_task(rig.archiver.run())
    await asyncio.sleep(0.1)
    rig.server.is_down = False
    await rig.say(20)
    async with asyncio.timeout(20):
        while rig.archiver.position < rig.server.last:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await rig.archive.history(START) == rig.server.entries


async def test_R11_the_log_is_trimmed_behind_archive_snapshot_and_retention_and_no_further():
    rig = Rig(retain_ms=60_000)
    end = await rig.say(50)
    await rig.archive_all()
    await rig.due()
    assert len(rig.server.entries) == 51, "nothing is a snapshot yet"
    await rig.log.save_snapshot(end._replace(seq=30), encode_state(State()))
    await rig.due()
    assert len(rig.server.entries) == 51, "too young"
    rig.clock.ms += 60_000
    await rig.due()
    assert rig.server.entries[0].position == end._replace(seq=30)
    await rig.log.save_snapshot(end._replace(seq=45), encode_state(State()))
    await rig.due()
    assert rig.server.entries[0].position == end._replace(seq=45)
    assert rig.archiver.position == end


async def test_R11_nothing_unarchived_is_ever_trimmed():
    rig = Rig()
    await rig.say(10)
    await rig.archive_all()
    end = await rig.say(10)
    rig.archive.failures = ["before"] * 5
    await rig.log.save_snapshot(end, encode_state(State()))
    for _ in range(5):
        rig.clock.ms += 10**9
        with pytest.raises(ArchiveUnavailable):
            await rig.due()
    assert len(rig.server.entries) == 21
    await rig.archive_all()
    await rig.due()
    assert await rig.archive.holes() == []
    assert rig.server.entries[0].position == end


async def test_the_log_s_snapshot_is_kept_in_the_archive_once_it_is_covered():
    rig = Rig()
    end = await rig.say(10)
    marked = State(position=end._replace(seq=5), gaps=9)
    await rig.log.save_snapshot(marked.position, encode_state(marked))
    await rig.archiver.step()
    assert (await rig.archive.state_at(end)).gaps == 10, "the snapshot's, and the one from where it knows nothing to 6"


async def test_P19_R12_a_log_that_a_newcomer_opened_after_a_flush_is_archived_from_its_beginning():
    rig = Rig()
    old = await rig.say(20)
    await rig.archive_all()
    rig.server.flush()
    new = await rig.newcomer_says(30)
    assert new.generation > old.generation
    await rig.archive_all()
    await rig.due()
    assert rig.server.last == rig.archiver.position == new, "nobody had to open another generation"
    assert (await rig.archive.history(START))[21:] == rig.server.entries
    assert (await rig.archive.counts())["TaskFailed"] == 50
    assert await rig.archive.holes() == [] == rig.heard.events
    assert rig.archiver.position_holes == 0


async def test_P19_R12_a_log_that_lost_its_newest_opening_is_archived_on_in_a_newer_one():
    rig = Rig()
    await rig.say(5)
    rig.server.restart()
    lost = await rig.say(5)
    await rig.archive_all()
    rig.server.restart(lose=6)
    new = await rig.newcomer_says(10)
    assert new.generation > lost.generation
    await rig.archive_all()
    await rig.due()
    assert rig.server.last == rig.archiver.position == new, "nobody had to open another generation"
    assert (await rig.archive.history(lost)) == rig.server.entries[-11:]
    assert (await rig.archive.counts())["TaskFailed"] == 20
    assert await rig.archive.holes() == [] == rig.heard.events
    assert rig.archiver.position_holes == 0


async def test_P19_R12_a_flushed_log_whose_clock_was_set_back_becomes_a_new_generation():
    rig = Rig()
    old = await rig.say(20)
    await rig.archive_all()
    rig.server.flush()
    rig.clock.ms -= 1_000
    low = await rig.newcomer_says(5)
    assert low.generation < old.generation
    await rig.due()
    assert rig.server.generation == old.generation + 1
    await rig.say(5)
    await rig.archive_all()
    stored = await rig.archive.read(START)
    assert stored[-1].position == Position(old.generation + 1, 5)
    assert rig.heard.events == [FactsMissed(source="llumlet/a", incarnation=1, from_seq=21, to_seq=25)]
    assert await rig.archive.holes() == [Hole("llumlet/a", 1, 21, 25)]


async def test_P19_R12_a_flushed_log_that_got_the_same_number_and_grew_past_the_archive_is_still_noticed():
    rig = Rig()
    old = await rig.say(5)
    await rig.archive_all()
    rig.server.flush()
    rig.clock.ms -= LATER_MS
    same = await rig.newcomer_says(30)
    assert same.generation == old.generation
    rig.archiver = rig.another()
    await rig.archiver.step()
    assert rig.server.generation == old.generation + 1


async def test_P19_R12_facts_that_redis_lost_and_producers_say_again_leave_no_hole():
    rig = Rig()
    archived = await rig.say(20)
    await rig.archive_all()
    await rig.say(10)
    lost = [e.fact for e in rig.server.entries[-15:]]
    rig.server.restart(lose=15)
    await rig.log.append(lost)
    await rig.say(3)
    await rig.archive_all()
    generation = rig.server.generation
    assert generation > archived.generation
    assert await rig.archive.holes() == [] == rig.heard.events
    assert (await rig.archive.counts())["TaskFailed"] == 33
    assert (await rig.archive.history(archived))[1:16] == [
        Entry(Position(generation, 1 + n), fact) for n, fact in enumerate(lost)
    ]


async def test_P19_a_hole_is_a_fact_and_stops_nothing():
    rig = Rig()
    await rig.say(5)
    await rig.say(5, skip=3)
    await rig.archive_all()
    assert rig.heard.events == [FactsMissed(source="llumlet/a", incarnation=1, from_seq=6, to_seq=8)]
    rig.archiver = rig.another()
    await rig.say(1)
    await rig.archive_all()
    assert len(rig.heard.events) == 1, "known from the archive, not told again"


async def test_P19_entries_trimmed_before_they_were_archived_are_noticed():
    rig = Rig()
    end = await rig.say(20)
    await rig.log.trim(end._replace(seq=11))
    await rig.archive_all()
    assert rig.archiver.position_holes == 1
    assert rig.heard.events == [FactsMissed(source="llumlet/a", incarnation=1, from_seq=1, to_seq=10)]
    assert await rig.archive.position() == end


async def test_R10_a_log_server_that_fills_up_is_warned_of():
    rig = Rig()
    await rig.say(1)
    with capture_logs() as logged:
        for ratio in (0.69, 0.7, 0.953):
            rig.server.memory_used_ratio = ratio
            await rig.due()
    warned = [line["memory_used_ratio"] for line in logged if line["log_level"] == "warning"]
    assert warned == [0.7, 0.953]


async def test_P19_R12_what_a_newcomer_says_on_a_flushed_valkey_is_archived(own_valkey: LocalValkey):
    def client(name: str) -> RedisLog:
        return RedisLog(own_valkey.url, cluster="c", opened_by=name)

    def facts(first: int, last: int) -> list[Fact]:
        return [Fact("llumlet/a", 1, n, n, TaskFailed(task="t", error="")) for n in range(first, last + 1)]

    logs, archive, heard = [client(name) for name in ("one", "archiver", "newcomer")], MemoryArchive(), Heard()
    archiver = Archiver(logs[1], archive, HandClock(), heard, read_wait_ms=1_000)
    old = await logs[0].append(facts(1, 20))
    await archiver.step()
    assert archiver.position == old
    with redis.Redis.from_url(own_valkey.url) as server:
        server.flushall()
    new = await logs[2].append(facts(21, 60))
    await archiver.step()
    assert archiver.position == new
    assert new.generation > old.generation
    assert (archiver.position_holes, (await archive.counts())["TaskFailed"]) == (0, 60)
    assert await archive.holes() == [] == heard.events
    for log in logs:
        await log.close()


async def test_two_archivers_at_once_are_harmless():
    rig = Rig()
    archivers = [rig.archiver, rig.another()]
    await rig.say(700)
    await asyncio.gather(*(rig.archive_all(a) for a in archivers))
    await rig.say(100)
    await asyncio.gather(*(rig.archive_all(a) for a in archivers))
    assert await rig.archive.history(START, 1_000) == rig.server.entries


async def test_P19_the_archive_heals_what_a_killed_valkey_lost(own_valkey: LocalValkey, database_url: str):
    """The real things together: log, publisher and archiver through a kill -9 and a flush of the server."""
    archive, heard, clock = SqlArchive(database_url), Heard(), HandClock()
    logs = [RedisLog(own_valkey.url, cluster="c", opened_by=name) for name in ("publisher", "archiver")]
    publisher = Publisher(logs[0], "llumlet/a", 1, clock)
    archiver = Archiver(logs[1], archive, clock, heard, read_wait_ms=50)
    tasks = [asyncio.create_task(publisher.run()), asyncio.create_task(archiver.run())]

    async def say(count: int) -> None:
        for _ in range(count):
            publisher.record(TaskFailed(task="t", error="e"))
            await asyncio.sleep(0)

    async def all_archived(count: int) -> None:
        async with asyncio.timeout(60):
            while (await archive.counts()).get("TaskFailed", 0) < count:
                await asyncio.sleep(0.05)

    await say(700)
    await all_archived(700)
    crash(own_valkey)
    await say(300)
    own_valkey.start()
    await all_archived(1_000)
    with redis.Redis.from_url(own_valkey.url) as client:
        client.flushall()
    await say(50)
    await all_archived(1_050)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await archive.holes() == [] == heard.events
    generations = {e.position.generation for e in await archive.history(START, 10_000)}
    assert len(generations) >= 3
    for log in logs:
        await log.close()
    await archive.close()


async def test_P19_random_trouble_loses_nothing_and_repeats_nothing():
    rig = Rig()
    calls = 0

    def fault(method: str) -> Literal["", "before", "after"]:
        nonlocal calls
        calls += 1
        return "before" if calls % 7 == 3 else "after" if calls % 7 == 5 else ""

    rig.archiver = Archiver(
        MemoryLog(rig.server, opened_by="archiver", fault=fault),
        rig.archive,
        rig.clock,
        rig.heard,
        retain_ms=0,
        read_wait_ms=0,
    )  # type: ignore[arg-type]
    for round_ in range(12):
        await rig.say(90)
        rig.archive.failures = ["", "after", "before", ""][round_ % 4 :][:2]
        while rig.archiver.position < rig.server.last:
            try:
                await rig.archiver.step()
            except (ArchiveUnavailable, LogUnavailable):
                continue
        if round_ % 5 == 4:
            rig.server.restart()
    assert await rig.archive.history(START, 5_000) == rig.server.entries
    assert await rig.archive.holes() == [] == rig.heard.events


@pytest.mark.parametrize("seed", range(20))
def test_P19_in_simulated_trouble_the_archive_ends_up_with_every_fact(seed: int):
    """Virtual time, any order of tasks: two archivers that die, an archive and a log that fail, lose and restart."""

    async def trouble() -> None:
        clock = VirtualClock(asyncio.get_running_loop(), 0)
        rng, rig = random.Random(seed), Rig(clock=clock)
        rig.server.fault = lambda method: rng.choice(["", "", "", "", "before", "after"])  # type: ignore[assignment]
        log = MemoryLog(rig.server, opened_by="publisher")
        publisher = Publisher(log, "llumlet/a", 1, clock)
        speaking = asyncio.create_task(publisher.run())
        archivers = [asyncio.create_task(rig.another().run()) for _ in range(2)]
        for number in range(300):
            publisher.record(TaskFailed(task="t", error=str(number)))
            await asyncio.sleep(rng.random() * 0.05)
            if rng.random() < 0.03:
                rig.server.restart(lose=rng.randrange(4))
            if rng.random() < 0.03:
                rig.archive.failures = [rng.choice(["before", "after"])]
            if rng.random() < 0.03:
                archivers[0].cancel()
                archivers = [archivers[1], asyncio.create_task(rig.another().run())]
        rig.server.fault = lambda method: ""
        while publisher.unsent or await rig.archive.position() < rig.server.last:
            await asyncio.sleep(0.1)
        for task in (speaking, *archivers):
            task.cancel()
        said = [e.fact.event.error for e in await rig.archive.read(START, 5_000, kind="TaskFailed")]
        assert sorted(said, key=int) == [str(n) for n in range(300)]
        assert await rig.archive.holes() == []
        history = await rig.archive.history(START, 10_000)
        assert [e for e in history if e.position >= rig.server.entries[0].position][-20:] == rig.server.entries[-20:]

    run_virtual(trouble, seed=seed)
