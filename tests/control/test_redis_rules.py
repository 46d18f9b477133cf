"""The rules for Redis (docs/promises.md), each on a real server: R2, R4, R5, R10, R11, R12, and their grounds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import redis

from midstream.control import fold
from midstream.control.adapters import redis_client
from midstream.control.adapters.clock import SystemClock
from midstream.control.adapters.local_valkey import LocalValkey
from midstream.control.adapters.redis_log import RedisLog
from midstream.control.commands import StartMigration
from midstream.control.errors import BadInput, GenerationChanged, LogUnavailable
from midstream.control.events import Entry, Event, Fact, FactsDropped, GenerationOpened, LoadReported, TaskFailed
from midstream.control.ids import START, Owner, Position
from midstream.control.publisher import Publisher
from midstream.control.state import Load, State
from tests.control.reply_eater import ReplyEater, eating_replies_of
from tests.crash import crash

T = TypeVar("T")
PATIENCE_S = 20.0


@asynccontextmanager
async def log_on(url: str, name: str = "one", cluster: str = "rules") -> AsyncIterator[RedisLog]:
    log = RedisLog(url, cluster=cluster, opened_by=name)
    try:
        yield log
    finally:
        await log.close()


@asynccontextmanager
async def publishing(log: RedisLog, source: str = "llumlet/a", **options: int) -> AsyncIterator[Publisher]:
    publisher = Publisher(log, source, 1, SystemClock(), **options)
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def admin(server: LocalValkey) -> redis.Redis:
    return redis.Redis.from_url(server.url)


def fact(number: int) -> Fact:
    return Fact("llumlet/a", 1, number, number, happened(number))


def happened(number: int) -> TaskFailed:
    return TaskFailed(task="t", error=str(number))


def applied(entries: list[Entry]) -> tuple[list[Event], int]:
    """What the production fold takes from the llumlet, and the holes it sees."""
    state = State()
    facts = [entry.fact for entry in entries if fold.apply(state, entry)]
    return [fact.event for fact in facts if fact.source == "llumlet/a"], state.gaps


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call until the log is there."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await call()
            except LogUnavailable:
                await asyncio.sleep(0.02)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


# --- R2: nothing is written twice behind our back ---------------------------------------------------


def test_R2_R4_every_client_option_is_said() -> None:
    writer, reader = redis_client.command_settings(), redis_client.reader_settings()
    for settings in (writer, reader):
        assert settings["retry"].get_retries() == 0
        assert settings["retry_on_timeout"] is False and settings["retry_on_error"] == []
        assert settings["protocol"] == 2 and settings["decode_responses"] is False
    assert writer["socket_timeout"] is None, "its send would lose a cancellation on Python 3.11"
    assert reader["socket_timeout"] is None
    assert redis_client.COMMAND_TIMEOUT_S == 4.0
    assert redis_client.BLOCK_MS_MAX <= 2_000


async def test_R2_R4_the_options_reach_the_connections(valkey: LocalValkey) -> None:
    async with (
        redis_client.command_client(valkey.url) as writer,
        redis_client.reader_client(valkey.url) as reader,
    ):
        for client in (writer, reader):
            connection = client.connection_pool.make_connection()
            assert connection.retry.get_retries() == 0
            assert connection.socket_timeout is None


async def test_R2_a_lost_reply_writes_once_and_says_so(valkey: LocalValkey, cluster: str) -> None:
    async with eater(valkey) as (proxy, url), log_on(url, cluster=cluster) as log:
        generation = (await log.append([fact(1)])).generation
        proxy.eat_next(b"append")
        with pytest.raises(LogUnavailable):
            await log.append([fact(2), fact(3)])
        assert proxy.eaten == 1
        assert (await log.tail()).last == Position(generation, 3)


async def test_R2_R3_a_publisher_behind_lost_replies_has_every_effect_once(valkey: LocalValkey, cluster: str) -> None:
    async with eater(valkey) as (proxy, url), log_on(url, cluster=cluster) as log, publishing(log) as publisher:
        for number in range(60):
            publisher.record(happened(number))
            if number % 10 == 0:
                proxy.eat_next(b"append")
                await until(lambda: publisher.unsent == 0)
        assert await publisher.flush(PATIENCE_S)
        entries = await log.read(START, count=1_000)
        assert proxy.eaten == 6
        assert len(entries) > 61
        assert applied(entries) == ([happened(number) for number in range(60)], 0)


async def test_R2_a_commit_whose_reply_was_lost_is_not_done_again(valkey: LocalValkey, cluster: str) -> None:
    async with eater(valkey) as (proxy, url), log_on(url, cluster=cluster) as log:
        generation = (await log.tail()).generation
        proxy.eat_next(b"commit")
        with pytest.raises(LogUnavailable):
            await log.commit(after=START, facts=[fact(1)], commands=[order()])
        assert (await log.tail()).committed == Position(generation, 1)
        assert len(await log.read_commands("a", "0-0")) == 1


async def test_a_cancelled_call_never_gets_another_ones_reply(valkey: LocalValkey, cluster: str) -> None:
    async with eater(valkey) as (proxy, url), log_on(url, cluster=cluster) as log:
        end = await log.append([fact(number) for number in range(1, 21)])
        proxy.delay_s = 0.03
        for number in range(1, 15):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(number / 400):
                    await log.load_snapshot()
            entries = await log.read(end._replace(seq=number), count=1)
            assert [entry.position for entry in entries] == [end._replace(seq=number + 1)]
        assert (await log.tail()).last == end


# --- R4, R5: reads that wait -------------------------------------------------------------------------


async def test_R4_a_long_wait_is_several_short_blocks(valkey: LocalValkey, cluster: str) -> None:
    async with log_on(valkey.url, cluster=cluster) as log, log_on(valkey.url, "two", cluster) as other:
        end = await log.append([fact(1)])
        reader = asyncio.create_task(log.read(end, wait_ms=60_000))
        await asyncio.sleep(2.2 * redis_client.BLOCK_MS_MAX / 1000)
        await other.append([fact(2)])
        async with asyncio.timeout(5):
            assert [entry.fact for entry in await reader] == [fact(2)]


async def test_P13_a_server_that_hangs_does_not_hang_its_reader(valkey: LocalValkey, cluster: str) -> None:
    async with eater(valkey) as (proxy, url), log_on(url, cluster=cluster) as log:
        end = await log.append([fact(1)])
        await log.read(end, wait_ms=10)
        proxy.is_mute = True
        with pytest.raises(LogUnavailable, match="does not answer"):
            await log.read(end, wait_ms=60_000)


async def test_R4_waiting_readers_do_not_take_connections_from_writers(valkey: LocalValkey, cluster: str) -> None:
    async with log_on(valkey.url, cluster=cluster) as log:
        end = await log.append([fact(1)])
        readers = [asyncio.create_task(log.read(end, wait_ms=30_000)) for _ in range(20)]
        readers += [asyncio.create_task(log.read_commands("a", "0-0", wait_ms=30_000)) for _ in range(20)]
        await asyncio.sleep(0.2)
        await log.commit(after=START, facts=[fact(2)], commands=[order()])
        assert [len(found) for found in await asyncio.gather(*readers)] == [1] * 40


async def test_R5_a_cancelled_read_hides_nothing_from_the_next(valkey: LocalValkey, cluster: str) -> None:
    async with log_on(valkey.url, cluster=cluster) as log, log_on(valkey.url, "two", cluster) as other:
        after, seen = await other.append([fact(1)]), []
        for number in range(2, 42):
            reading = asyncio.create_task(log.read(after, wait_ms=5_000))
            await asyncio.sleep(0.001)
            await other.append([fact(number)])
            if number % 2:
                reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                entries = await reading
                seen += [entry.fact.source_seq for entry in entries]
                after = entries[-1].position
        seen += [entry.fact.source_seq for entry in await log.read(after)]
        assert seen == list(range(2, 42))


# --- R10: memory -------------------------------------------------------------------------------------


async def test_R10_a_server_that_may_evict_is_refused(own_valkey: LocalValkey) -> None:
    async with log_on(own_valkey.url) as log:
        await log.check()
        with admin(own_valkey) as server:
            server.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(BadInput, match=r"maxmemory-policy allkeys-lru.*noeviction") as refused:
            await log.check()
        assert "\n" not in str(refused.value)


async def test_R10_the_share_of_memory_used_is_known(own_valkey: LocalValkey) -> None:
    async with log_on(own_valkey.url) as log:
        assert 0 < await log.memory_used_ratio() < 0.5
        with admin(own_valkey) as server:
            server.config_set("maxmemory", server.info("memory")["used_memory"] * 10 // 8)
        assert 0.7 < await log.memory_used_ratio() < 0.95


async def test_R10_a_full_server_refuses_facts_and_gets_them_later(own_valkey: LocalValkey) -> None:
    async with log_on(own_valkey.url) as log, publishing(log, buffer_max=40) as publisher:
        publisher.record(happened(0))
        assert await publisher.flush(PATIENCE_S)
        end = publisher.confirmed
        tick = Fact("control", end.generation, 1, 0, happened(0))
        committed = await log.commit(after=START, facts=[tick], commands=[order()])
        before = await log.read(START)
        with admin(own_valkey) as server:
            server.config_set("maxmemory", 1)
            with pytest.raises(LogUnavailable, match="is full"):
                await log.append([fact(9)])
            for number in range(1, 21):
                publisher.record(happened(number))
            for number in range(100):
                publisher.record(LoadReported(owner=Owner("a", 1), load=Load(running=number)))
            await asyncio.sleep(0.1)
            assert publisher.confirmed == end
            await can_drain(log, committed)
            server.config_set("maxmemory", 0)
        assert await publisher.flush(PATIENCE_S)
        after = await log.read(before[-1].position, count=1_000)
        events, gaps = applied(before + after)
        assert gaps == 0
        assert [event for event in events if isinstance(event, TaskFailed)] == [happened(n) for n in range(21)]
        assert events[-1] == LoadReported(owner=Owner("a", 1), load=Load(running=99))
        assert sum(event.count for event in events if isinstance(event, FactsDropped)) == publisher.dropped > 0


async def can_drain(log: RedisLog, end: Position) -> None:
    """Reading, asking and trimming work on a full server."""
    assert len(await log.read(START)) == 3
    (delivered,) = await log.read_commands("a", "0-0")
    await log.forget_commands("a", delivered.cursor)
    assert (await log.tail()).last == end == Position(end.generation, 2)
    assert await log.trim(end) == 2


# --- R11: trimming -----------------------------------------------------------------------------------


async def test_R11_what_is_unread_behind_the_trim_is_still_delivered(valkey: LocalValkey, cluster: str) -> None:
    async with log_on(valkey.url, cluster=cluster) as log:
        end = await log.append([fact(number) for number in range(1, 1_001)])
        for below in range(0, 900, 90):
            await log.trim(end._replace(seq=below))
        entries = await log.read(end._replace(seq=809), count=1_000)
        assert [entry.position.seq for entry in entries] == list(range(810, 1_001))


def test_R11_nothing_is_ever_trimmed_by_length() -> None:
    adapters = Path(redis_client.__file__).parent
    for source in (adapters / "redis_log.py", adapters / "log.lua"):
        assert "MAXLEN" not in source.read_text().upper()


# --- R12: a server that comes back -------------------------------------------------------------------


async def test_R12_kill_and_restart_loses_nothing_acknowledged(own_valkey: LocalValkey) -> None:
    async with log_on(own_valkey.url) as log, publishing(log) as publisher:
        recorded = 0
        for _ in range(3):
            for _ in range(300):
                publisher.record(happened(recorded))
                recorded += 1
                await asyncio.sleep(0.001)
            await until(lambda: publisher.confirmed.seq > 100)
            acknowledged = publisher.confirmed
            crash(own_valkey)
            own_valkey.start()
            kept = await patiently(lambda: log.read(START, count=10_000))
            assert kept[-1].position >= acknowledged
            publisher.record(happened(recorded))
            recorded += 1
            assert await publisher.flush(PATIENCE_S)
        entries = await log.read(START, count=10_000)
        assert applied(entries) == ([happened(number) for number in range(recorded)], 0)
        openings = [entry for entry in entries if isinstance(entry.fact.event, GenerationOpened)]
        assert len({entry.position.generation for entry in entries}) == len(openings) == 4
        assert [entry.position.generation for entry in openings] == [e.fact.event.generation for e in openings]


async def test_R12_a_flushed_log_is_filled_again_above_everything_seen(own_valkey: LocalValkey) -> None:
    async with log_on(own_valkey.url) as log, log_on(own_valkey.url, "two") as other, publishing(log) as publisher:
        for number in range(50):
            publisher.record(happened(number))
        assert await publisher.flush(PATIENCE_S)
        seen = (await other.read(START))[-1].position
        with admin(own_valkey) as server:
            server.flushall()
        publisher.record(happened(50))
        assert await publisher.flush(PATIENCE_S)
        entries = await other.read(seen, wait_ms=10_000)
        assert entries[0].position == Position(publisher.confirmed.generation, 0) > seen
        assert isinstance(entries[0].fact.event, GenerationOpened)
        assert applied(entries) == ([happened(number) for number in range(51)], 0)


async def test_R12_a_log_whose_end_was_cut_off_is_healed_by_its_producer(own_valkey: LocalValkey) -> None:
    async with log_on(own_valkey.url) as log, publishing(log) as publisher:
        for number in range(50):
            publisher.record(happened(number))
            await publisher.flush(PATIENCE_S)
        seen = (await log.read(START))[-1].position
        crash(own_valkey)
        cut_off(own_valkey, 3_000)
        own_valkey.start()
        kept = await patiently(lambda: log.read(START))
        assert 0 < len(kept) < 50
        publisher.record(happened(50))
        assert await publisher.flush(PATIENCE_S)
        entries = await log.read(START, count=1_000)
        assert applied(entries) == ([happened(number) for number in range(51)], 0)
        followed = await log.read(seen, wait_ms=10_000)
        assert followed[0].position == Position(publisher.confirmed.generation, 0) > seen


def cut_off(server: LocalValkey, size: int) -> None:
    (append_only,) = server.directory.glob("appendonlydir/*.incr.aof")
    data = append_only.read_bytes()
    append_only.write_bytes(data[:-size])


async def test_R12_no_write_lands_in_a_restarted_log_before_its_generation(own_valkey: LocalValkey) -> None:
    async with log_on(own_valkey.url) as log:
        first = (await log.append([fact(1)])).generation
        crash(own_valkey)
        own_valkey.start()
        with pytest.raises(GenerationChanged) as changed:
            await patiently(lambda: log.append([fact(2)], generation=first))
        second = changed.value.generation
        assert second > first
        await log.append([fact(2)], generation=second)
        positions = [entry.position for entry in await log.read(START)]
        assert positions == [Position(generation, seq) for generation in (first, second) for seq in (0, 1)]


async def test_R12_a_server_that_lost_the_function_library_gets_it_again(own_valkey: LocalValkey) -> None:
    async with log_on(own_valkey.url) as log:
        end = await log.append([fact(1)])
        with admin(own_valkey) as server:
            server.function_flush()
        assert await log.append([fact(2)]) == end._replace(seq=2)


# --- what else a server can be -----------------------------------------------------------------------


async def test_no_server_is_one_clear_line(own_valkey: LocalValkey) -> None:
    own_valkey.stop()
    secret = own_valkey.url.replace("redis://", "redis://me:hush@")
    async with log_on(secret) as log:
        with pytest.raises(LogUnavailable) as away:
            await log.append([fact(1)])
    message = str(away.value)
    assert "cannot be reached" in message and "hush" not in message and "\n" not in message


async def test_a_replica_is_called_one(own_valkey: LocalValkey) -> None:
    async with log_on(own_valkey.url) as log:
        await log.append([fact(1)])
        with admin(own_valkey) as server:
            server.replicaof("127.0.0.1", "1")
        with pytest.raises(LogUnavailable, match="read-only replica"):
            await log.append([fact(2)])


@pytest.mark.parametrize("url", ["localhost:6379", "http://x", "redis://x:port/0", "redis://x:70000/0"])
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(BadInput):
        RedisLog(url, cluster="c", opened_by="one")


@pytest.mark.parametrize("cluster", ["", "a b", "{x}", "x" * 101])
def test_a_bad_cluster_name_is_refused(cluster: str) -> None:
    with pytest.raises(BadInput):
        RedisLog("redis://x", cluster=cluster, opened_by="one")


async def test_two_clusters_on_one_server_see_nothing_of_each_other(valkey: LocalValkey, cluster: str) -> None:
    async with log_on(valkey.url, cluster=cluster) as log, log_on(valkey.url, cluster=f"{cluster}x") as other:
        await log.append([fact(1)])
        assert await other.read(START) == []


async def test_P28_a_poisoned_stream_does_not_stall_its_readers(valkey: LocalValkey, cluster: str) -> None:
    async with log_on(valkey.url, cluster=cluster) as log:
        end = await log.append([fact(1)])
        with admin(valkey) as server:
            server.xadd(f"midstream:{{{cluster}}}:facts", {"d": b"\xff{"}, id=str(end._replace(seq=2)))
            server.xadd(f"midstream:{{{cluster}}}:facts", {"other": b"1"}, id=str(end._replace(seq=3)))
            server.xadd(f"midstream:{{{cluster}}}:cmd:a", {"d": b"{}"}, id=str(end._replace(seq=0)))
        await log.append([fact(2)])
        entries = await log.read(end)
        assert [entry.fact.source for entry in entries] == ["poison", "poison", "llumlet/a"]
        assert await log.read_commands("a", "0-0", wait_ms=50) == []
        await log.commit(after=START, facts=[fact(3)], commands=[order()])
        (delivered,) = await log.read_commands("a", "0-0", wait_ms=50)
        assert delivered.cursor == str(end._replace(seq=1))


async def test_the_local_server_refuses_a_taken_port(own_valkey: LocalValkey, tmp_path: Path) -> None:
    second = LocalValkey(tmp_path / "second", port=own_valkey.port)
    with pytest.raises(BadInput, match=f"port {own_valkey.port} .*is taken"):
        second.start()
    assert not second.is_running
    own_valkey.stop()
    second.start()
    try:
        assert second.pid is not None
    finally:
        second.stop()


def test_the_local_server_says_why_it_did_not_come_up(own_valkey: LocalValkey) -> None:
    own_valkey.stop()
    (append_only,) = own_valkey.directory.glob("appendonlydir/*.manifest")
    append_only.write_text("nonsense\n")
    with pytest.raises(LogUnavailable, match="ended at once"):
        own_valkey.start()
    assert own_valkey.pid is None


def order() -> StartMigration:
    return StartMigration(
        id="m-1-1-0/start",
        instance="a",
        incarnation=1,
        deadline_ms=9,
        migration="m-1-1-0",
        request="r",
        epoch=2,
        target=Owner("b", 1),
        target_address="tcp://127.0.0.1:1",
    )


@asynccontextmanager
async def eater(server: LocalValkey) -> AsyncIterator[tuple[ReplyEater, str]]:
    async with eating_replies_of(server.port) as proxy:
        yield proxy, f"redis://127.0.0.1:{proxy.port}/0"
