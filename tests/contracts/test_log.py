"""The contract of `control.ports.FactLog`, on memory, on fakeredis and on a real Valkey.

fakeredis runs the very Lua of the function library as a script, with a made-up server run, because it knows
neither functions nor INFO. What it has no notion of at all (connections, time-outs, memory limits, files on disk)
is not part of this contract; `tests/control/test_redis_rules.py` shows that on a real server alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from midstream.control.adapters.local_valkey import LocalValkey
from midstream.control.commands import CancelMigration, Command
from midstream.control.errors import BadInput, CommitConflict, GenerationChanged
from midstream.control.events import Entry, Fact, GenerationOpened, TaskFailed
from midstream.control.ids import START, Position
from midstream.control.ports import FactLog
from tests.contracts.log_rigs import FakeRedisRig, MemoryRig, Rig, ValkeyRig

PATIENCE_MS = 10_000


@pytest.fixture(scope="module")
def module_valkey(tmp_path_factory: pytest.TempPathFactory):
    server = LocalValkey(tmp_path_factory.mktemp("contract"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["memory", "fakeredis", "valkey"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    rig: Rig
    if request.param == "memory":
        rig = MemoryRig()
    elif request.param == "fakeredis":
        rig = FakeRedisRig()
    else:
        rig = ValkeyRig(request.getfixturevalue("module_valkey"), request.getfixturevalue("cluster"))
    yield rig
    await rig.close()


@pytest.fixture
def log(rig: Rig) -> FactLog:
    return rig.client("one")


def fact(number: int, source: str = "llumlet/a") -> Fact:
    return Fact(source, 1, number, 1_000 + number, TaskFailed(task="t", error=f"é {number}"))


def order(number: int, instance: str = "a") -> Command:
    return CancelMigration(
        id=f"m-1-1-{number}/cancel", instance=instance, incarnation=1, deadline_ms=9, migration="m", request="r"
    )


def said(entries: list[Entry]) -> list[str]:
    """The facts by what they say; openings of generations by their number."""
    return [
        f"opened {entry.fact.event.generation}"
        if isinstance(entry.fact.event, GenerationOpened)
        else str(entry.fact.source_seq)
        for entry in entries
    ]


async def test_P19_facts_come_back_whole_in_append_order_at_dense_positions(log: FactLog) -> None:
    assert await log.append([fact(1), fact(2)]) == Position(1, 2)
    assert await log.append([fact(3)]) == Position(1, 3)
    entries = await log.read(START)
    assert [entry.position for entry in entries] == [Position(1, seq) for seq in range(4)]
    assert [entry.fact for entry in entries[1:]] == [fact(1), fact(2), fact(3)]


async def test_the_first_append_opens_a_generation_that_says_who_opened_it(log: FactLog) -> None:
    await log.append([fact(1)])
    opened = (await log.read(START))[0].fact
    assert (opened.source, opened.incarnation, opened.source_seq) == ("log", 1, 1)
    assert isinstance(opened.event, GenerationOpened)
    assert (opened.event.generation, opened.event.opened_by) == (1, "one")


async def test_reading_goes_on_behind_a_position_in_pages(log: FactLog) -> None:
    await log.append([fact(number) for number in range(1, 8)])
    first = await log.read(START, count=3)
    second = await log.read(first[-1].position, count=3)
    rest = await log.read(second[-1].position, count=3)
    assert said(first + second + rest) == ["opened 1", *map(str, range(1, 8))]
    assert await log.read(rest[-1].position) == []


async def test_a_waiting_reader_gets_what_another_client_appends(rig: Rig, log: FactLog) -> None:
    end = await log.append([fact(1)])
    reader = asyncio.create_task(rig.client("two").read(end, wait_ms=PATIENCE_MS))
    await asyncio.sleep(0.05)
    assert not reader.done()
    await log.append([fact(2)])
    assert said(await reader) == ["2"]


async def test_a_wait_ends_empty_handed(log: FactLog) -> None:
    end = await log.append([fact(1)])
    assert await log.read(end, wait_ms=30) == []
    assert await log.read_commands("a", "0-0", wait_ms=30) == []


async def test_a_waiting_llumlet_gets_a_command(rig: Rig, log: FactLog) -> None:
    await log.append([fact(1)])
    waiting = asyncio.create_task(rig.client("two").read_commands("a", "0-0", wait_ms=PATIENCE_MS))
    await asyncio.sleep(0.05)
    await log.commit(after=START, facts=[fact(2)], commands=[order(1)])
    assert [delivered.command for delivered in await waiting] == [order(1)]


async def test_nothing_is_not_appended(log: FactLog) -> None:
    with pytest.raises(BadInput):
        await log.append([])
    with pytest.raises(BadInput):
        await log.commit(after=START, facts=[], commands=[order(1)])


async def test_P18_a_commit_appends_facts_and_commands(log: FactLog) -> None:
    await log.tail()
    commands = [order(1), order(2, "b"), order(3)]
    end = await log.commit(after=START, facts=[fact(1), fact(2)], commands=commands)
    assert said(await log.read(START)) == ["opened 1", "1", "2"]
    assert (await log.tail()).committed == end == Position(1, 2)
    assert [delivered.command for delivered in await log.read_commands("a", "0-0")] == [order(1), order(3)]
    assert [delivered.command for delivered in await log.read_commands("b", "0-0")] == [order(2, "b")]


async def test_P18_a_commit_on_an_old_commit_appends_nothing(log: FactLog) -> None:
    await log.tail()
    first = await log.commit(after=START, facts=[fact(1)], commands=[])
    for stale in (START, Position(1, 0), Position(first.generation, first.seq + 1), Position(2, 0)):
        with pytest.raises(CommitConflict):
            await log.commit(after=stale, facts=[fact(2)], commands=[order(1)])
    assert said(await log.read(START)) == ["opened 1", "1"]
    assert await log.read_commands("a", "0-0") == []
    assert await log.commit(after=first, facts=[fact(2)], commands=[]) == Position(1, 2)


async def test_appends_do_not_disturb_a_commit_unless_it_names_the_tail(log: FactLog) -> None:
    end = await log.append([fact(1)])
    await log.append([fact(2)])
    with pytest.raises(CommitConflict):
        await log.commit(after=START, facts=[fact(3)], commands=[], tail=end)
    tail = (await log.tail()).last
    first = await log.commit(after=START, facts=[fact(3)], commands=[], tail=tail)
    await log.append([fact(4)])
    await log.commit(after=first, facts=[fact(5)], commands=[])
    assert said(await log.read(START)) == ["opened 1", "1", "2", "3", "4", "5"]


async def test_P18_two_racing_committers_commit_each_step_once(rig: Rig) -> None:
    async def committer(name: str) -> list[Position]:
        log, won, after = rig.client(name), [], START
        for number in range(1, 21):
            try:
                after = await log.commit(after=after, facts=[fact(number, name)], commands=[order(number)])
                won.append(after)
            except CommitConflict:
                after = (await log.tail()).committed
        return won

    await rig.client("zero").tail()
    one, two = await asyncio.gather(committer("one"), committer("two"))
    committed = [entry.position for entry in await rig.client("zero").read(Position(1, 0))]
    assert committed == sorted(one + two)
    assert committed == [Position(1, seq) for seq in range(1, len(committed) + 1)]
    assert len(await rig.client("zero").read_commands("a", "0-0")) == len(committed) >= 20


async def test_the_tail_shows_where_the_log_begins_and_ends(log: FactLog) -> None:
    empty = await log.tail()
    assert (empty.generation, empty.first, empty.last, empty.committed) == (1, Position(1, 0), Position(1, 0), START)
    await log.append([fact(1), fact(2)])
    tail = await log.tail()
    assert (tail.generation, tail.first, tail.last) == (1, Position(1, 0), Position(1, 2))


async def test_R11_trimming_forgets_only_what_is_below(log: FactLog) -> None:
    await log.append([fact(1), fact(2), fact(3)])
    assert await log.trim(Position(1, 2)) == 2
    assert said(await log.read(START)) == ["2", "3"]
    assert (await log.tail()).first == Position(1, 2)
    assert await log.trim(Position(1, 2)) == 0


async def test_positions_go_on_behind_a_log_trimmed_to_nothing(log: FactLog) -> None:
    end = await log.append([fact(1)])
    await log.trim(Position(1, 9))
    tail = await log.tail()
    assert (tail.first, tail.last) == (Position(1, end.seq + 1), end)
    assert await log.append([fact(2)]) == Position(1, end.seq + 1)


async def test_commands_are_read_behind_a_cursor_and_forgotten_through_it(log: FactLog) -> None:
    await log.tail()
    await log.commit(after=START, facts=[fact(1)], commands=[order(1), order(2), order(3)])
    first, second, third = await log.read_commands("a", "0-0")
    assert await log.read_commands("a", first.cursor) == [second, third]
    assert await log.read_commands("a", "0-0", count=1) == [first]
    await log.forget_commands("a", second.cursor)
    assert await log.read_commands("a", "0-0") == [third]
    await log.forget_commands("a", third.cursor)
    await log.commit(after=Position(1, 1), facts=[fact(2)], commands=[order(4)])
    assert [delivered.command for delivered in await log.read_commands("a", third.cursor)] == [order(4)]


async def test_a_snapshot_only_moves_forward(log: FactLog) -> None:
    assert await log.load_snapshot() is None
    await log.save_snapshot(Position(1, 9), b"nine")
    await log.save_snapshot(Position(1, 10), b"\x00ten")
    await log.save_snapshot(Position(1, 9), b"again nine")
    assert await log.load_snapshot() == (Position(1, 10), b"\x00ten")
    await log.save_snapshot(Position(2, 0), b"two")
    await log.save_snapshot(Position(1, 11), b"eleven")
    assert await log.load_snapshot() == (Position(2, 0), b"two")


async def test_opening_a_generation_above_one_that_is_over_is_done_once(rig: Rig, log: FactLog) -> None:
    await log.tail()
    opened = await asyncio.gather(*(rig.client(name).open_generation(1, cause="test") for name in ("two", "three")))
    assert opened == [2, 2]
    assert await log.open_generation(1, cause="late") == 2
    assert said(await log.read(START)) == ["opened 1", "opened 2"]


async def test_R12_every_server_run_is_a_new_generation(rig: Rig, log: FactLog) -> None:
    end = await log.append([fact(1)])
    await rig.restart()
    with pytest.raises(GenerationChanged) as changed:
        await log.append([fact(2)], generation=1)
    assert changed.value.generation == 2
    assert await log.append([fact(2)], generation=2) == Position(2, 1)
    assert said(await log.read(end)) == ["opened 2", "2"]


async def test_R12_an_append_without_a_generation_lands_in_the_new_one(rig: Rig, log: FactLog) -> None:
    await log.append([fact(1)])
    await rig.restart()
    assert await log.append([fact(2)]) == Position(2, 1)
    assert await rig.client("two").append([fact(3)]) == Position(2, 2)


async def test_R12_a_new_generation_begins_without_a_commit(rig: Rig, log: FactLog) -> None:
    await log.tail()
    old = await log.commit(after=START, facts=[fact(1)], commands=[])
    await rig.restart()
    with pytest.raises(CommitConflict):
        await log.commit(after=old, facts=[fact(2)], commands=[order(1)])
    tail = await log.tail()
    assert (tail.generation, tail.committed) == (2, START)
    assert await log.commit(after=START, facts=[fact(2)], commands=[order(1)], tail=tail.last) == Position(2, 1)


async def test_R12_a_first_commit_made_for_the_generation_before_conflicts(rig: Rig, log: FactLog) -> None:
    tail = await log.tail()
    await rig.restart()
    with pytest.raises(CommitConflict):
        await log.commit(after=START, facts=[fact(1)], commands=[], tail=tail.last)
    other = rig.client("two")
    await other.tail()
    await rig.restart()
    with pytest.raises(CommitConflict):
        await other.commit(after=START, facts=[fact(1)], commands=[order(1)])
    assert said(await log.read(START)) == ["opened 1", "opened 2", "opened 3"]
    assert await log.read_commands("a", "0-0") == []


async def test_R12_a_flushed_log_opens_above_every_generation_its_clients_knew(rig: Rig, log: FactLog) -> None:
    await log.tail()
    await log.open_generation(6, cause="test")
    rig.flush()
    newcomer = rig.client("new")
    assert await newcomer.append([fact(1)]) == Position(1, 1)
    assert await log.append([fact(2)]) == Position(8, 1)
    with pytest.raises(GenerationChanged):
        await newcomer.append([fact(2)], generation=1)


async def test_R12_a_generation_that_a_client_insists_on_is_passed_over(log: FactLog) -> None:
    await log.append([fact(1)])
    with pytest.raises(GenerationChanged) as changed:
        await log.append([fact(2)], generation=6)
    assert changed.value.generation == 7
    assert await log.append([fact(2)], generation=7) == Position(7, 1)


async def test_R12_a_reader_ahead_of_a_flushed_log_does_not_stall(rig: Rig, log: FactLog) -> None:
    end = await log.append([fact(number) for number in range(1, 10)])
    await log.open_generation(3, cause="test")
    reader = rig.client("reader")
    seen = (await reader.read(end))[-1].position
    rig.flush()
    newcomer = rig.client("new")
    await newcomer.append([fact(1)])
    entries = await reader.read(seen, wait_ms=PATIENCE_MS)
    assert said(entries) == ["opened 5"]
    with pytest.raises(GenerationChanged):
        await newcomer.append([fact(2)], generation=1)
    assert await newcomer.append([fact(1), fact(2)], generation=5) == Position(5, 2)
    assert said(await reader.read(entries[-1].position, wait_ms=PATIENCE_MS)) == ["1", "2"]


async def test_R12_a_llumlet_ahead_of_a_flushed_log_gets_its_next_command(rig: Rig, log: FactLog) -> None:
    await log.open_generation(4, cause="test")
    await log.commit(after=START, facts=[fact(1)], commands=[order(1), order(2)])
    llumlet = rig.client("llumlet")
    cursor = (await llumlet.read_commands("a", "0-0"))[-1].cursor
    rig.flush()
    waiting = asyncio.create_task(llumlet.read_commands("a", cursor, wait_ms=PATIENCE_MS))
    assert await log.append([fact(2)]) == Position(6, 1)
    await log.commit(after=START, facts=[fact(3)], commands=[order(3)])
    assert [delivered.command for delivered in await waiting] == [order(3)]
