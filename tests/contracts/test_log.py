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
from midstream.control.commands import Command, StartMigration
from midstream.control.errors import BadInput, CommitConflict, GenerationChanged
from midstream.control.events import Entry, Fact, GenerationOpened, TaskFailed
from midstream.control.ids import START, Owner, Position
from midstream.control.ports import FactLog
from tests.contracts.log_rigs import FakeRedisRig, MemoryRig, Rig, ValkeyRig

PATIENCE_MS = 10_000
AHEAD_MS = 10**9
"""A generation so far above the server's time: its clock was set back."""


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
    return StartMigration(
        id=f"m-1-1-{number}/start",
        instance=instance,
        incarnation=1,
        deadline_ms=9,
        migration="m",
        request="r",
        epoch=2,
        target=Owner("b", 1),
        target_address="tcp://127.0.0.1:1",
    )


async def clock_moves() -> None:
    """Let the server's clock show another millisecond, as it has when a real server is empty again."""
    await asyncio.sleep(0.003)


def said(entries: list[Entry]) -> list[str]:
    """The facts by what they say; openings of generations by their number."""
    return [
        f"opened {entry.fact.event.generation}"
        if isinstance(entry.fact.event, GenerationOpened)
        else str(entry.fact.source_seq)
        for entry in entries
    ]


async def test_P19_facts_come_back_whole_in_append_order_at_dense_positions(log: FactLog) -> None:
    generation, seq = await log.append([fact(1), fact(2)])
    assert seq == 2
    assert await log.append([fact(3)]) == Position(generation, 3)
    entries = await log.read(START)
    assert [entry.position for entry in entries] == [Position(generation, seq) for seq in range(4)]
    assert [entry.fact for entry in entries[1:]] == [fact(1), fact(2), fact(3)]


async def test_the_first_append_opens_a_generation_that_says_who_opened_it(log: FactLog) -> None:
    generation = (await log.append([fact(1)])).generation
    opened = (await log.read(START))[0].fact
    assert (opened.source, opened.incarnation, opened.source_seq) == ("log", generation, 1)
    assert isinstance(opened.event, GenerationOpened)
    assert (opened.event.generation, opened.event.opened_by) == (generation, "one")


async def test_R12_a_generation_is_named_by_the_server_s_time_at_its_opening(log: FactLog) -> None:
    first = (await log.tail()).generation
    await clock_moves()
    second = await log.open_generation(first, cause="test")
    ahead = await log.open_generation(second + AHEAD_MS, cause="test")
    entries = await log.read(START)
    assert [entry.position for entry in entries] == [Position(g, 0) for g in (first, second, ahead)]
    assert [entry.fact.at_ms for entry in entries[:2]] == [first, second]
    assert first < second
    assert ahead == second + AHEAD_MS + 1, "where the clock is behind, one by one"


async def test_reading_goes_on_behind_a_position_in_pages(log: FactLog) -> None:
    generation = (await log.append([fact(number) for number in range(1, 8)])).generation
    first = await log.read(START, count=3)
    second = await log.read(first[-1].position, count=3)
    rest = await log.read(second[-1].position, count=3)
    assert said(first + second + rest) == [f"opened {generation}", *map(str, range(1, 8))]
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
    generation = (await log.tail()).generation
    commands = [order(1), order(2, "b"), order(3)]
    end = await log.commit(after=START, facts=[fact(1), fact(2)], commands=commands)
    assert said(await log.read(START)) == [f"opened {generation}", "1", "2"]
    assert (await log.tail()).committed == end == Position(generation, 2)
    assert [delivered.command for delivered in await log.read_commands("a", "0-0")] == [order(1), order(3)]
    assert [delivered.command for delivered in await log.read_commands("b", "0-0")] == [order(2, "b")]


async def test_P18_a_commit_on_an_old_commit_appends_nothing(log: FactLog) -> None:
    await log.tail()
    first = await log.commit(after=START, facts=[fact(1)], commands=[])
    generation, seq = first
    for stale in (START, Position(generation, 0), Position(generation, seq + 1), Position(generation + 1, 0)):
        with pytest.raises(CommitConflict):
            await log.commit(after=stale, facts=[fact(2)], commands=[order(1)])
    assert said(await log.read(START)) == [f"opened {generation}", "1"]
    assert await log.read_commands("a", "0-0") == []
    assert await log.commit(after=first, facts=[fact(2)], commands=[]) == Position(generation, 2)


async def test_appends_do_not_disturb_a_commit(log: FactLog) -> None:
    generation = (await log.append([fact(1)])).generation
    await log.append([fact(2)])
    first = await log.commit(after=START, facts=[fact(3)], commands=[], generation=generation)
    await log.append([fact(4)])
    await log.commit(after=first, facts=[fact(5)], commands=[])
    assert said(await log.read(START)) == [f"opened {generation}", "1", "2", "3", "4", "5"]


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

    generation = (await rig.client("zero").tail()).generation
    one, two = await asyncio.gather(committer("one"), committer("two"))
    committed = [entry.position for entry in await rig.client("zero").read(Position(generation, 0))]
    assert committed == sorted(one + two)
    assert committed == [Position(generation, seq) for seq in range(1, len(committed) + 1)]
    assert len(await rig.client("zero").read_commands("a", "0-0")) == len(committed) >= 20


async def test_the_tail_shows_where_the_log_begins_and_ends(log: FactLog) -> None:
    empty = await log.tail()
    generation, opening = empty.generation, Position(empty.generation, 0)
    assert (empty.first, empty.last, empty.committed) == (opening, opening, START)
    await log.append([fact(1), fact(2)])
    tail = await log.tail()
    assert (tail.generation, tail.first, tail.last) == (generation, opening, Position(generation, 2))


async def test_R11_trimming_forgets_only_what_is_below(log: FactLog) -> None:
    second = (await log.append([fact(1), fact(2), fact(3)]))._replace(seq=2)
    assert await log.trim(second) == 2
    assert said(await log.read(START)) == ["2", "3"]
    assert (await log.tail()).first == second
    assert await log.trim(second) == 0


async def test_positions_go_on_behind_a_log_trimmed_to_nothing(log: FactLog) -> None:
    end = await log.append([fact(1)])
    following = Position(end.generation, end.seq + 1)
    await log.trim(Position(end.generation, 9))
    tail = await log.tail()
    assert (tail.first, tail.last) == (following, end)
    assert await log.append([fact(2)]) == following


async def test_commands_are_read_behind_a_cursor_and_forgotten_through_it(log: FactLog) -> None:
    await log.tail()
    committed = await log.commit(after=START, facts=[fact(1)], commands=[order(1), order(2), order(3)])
    first, second, third = await log.read_commands("a", "0-0")
    assert await log.read_commands("a", first.cursor) == [second, third]
    assert await log.read_commands("a", "0-0", count=1) == [first]
    await log.forget_commands("a", second.cursor)
    assert await log.read_commands("a", "0-0") == [third]
    await log.forget_commands("a", third.cursor)
    await log.commit(after=committed, facts=[fact(2)], commands=[order(4)])
    assert [delivered.command for delivered in await log.read_commands("a", third.cursor)] == [order(4)]


async def test_a_snapshot_only_moves_forward(log: FactLog) -> None:
    assert await log.load_snapshot() is None
    one, two = 1_764_579_000_123, 1_764_579_000_124
    await log.save_snapshot(Position(one, 9), b"nine")
    await log.save_snapshot(Position(one, 10), b"\x00ten")
    await log.save_snapshot(Position(one, 9), b"again nine")
    assert await log.load_snapshot() == (Position(one, 10), b"\x00ten")
    await log.save_snapshot(Position(two, 0), b"two")
    await log.save_snapshot(Position(one, 11), b"eleven")
    assert await log.load_snapshot() == (Position(two, 0), b"two")


async def test_opening_a_generation_above_one_that_is_over_is_done_once(rig: Rig, log: FactLog) -> None:
    over = (await log.tail()).generation
    opened = await asyncio.gather(*(rig.client(name).open_generation(over, cause="test") for name in ("two", "three")))
    assert over < opened[0] == opened[1]
    assert await log.open_generation(over, cause="late") == opened[0]
    assert said(await log.read(START)) == [f"opened {over}", f"opened {opened[0]}"]


async def test_R12_every_server_run_is_a_new_generation(rig: Rig, log: FactLog) -> None:
    end = await log.append([fact(1)])
    await rig.restart()
    with pytest.raises(GenerationChanged) as changed:
        await log.append([fact(2)], generation=end.generation)
    generation = changed.value.generation
    assert generation > end.generation
    assert await log.append([fact(2)], generation=generation) == Position(generation, 1)
    assert said(await log.read(end)) == [f"opened {generation}", "2"]


async def test_R12_an_append_without_a_generation_lands_in_the_new_one(rig: Rig, log: FactLog) -> None:
    end = await log.append([fact(1)])
    await rig.restart()
    generation, seq = await log.append([fact(2)])
    assert (generation > end.generation, seq) == (True, 1)
    assert await rig.client("two").append([fact(3)]) == Position(generation, 2)


async def test_R12_a_new_generation_begins_without_a_commit(rig: Rig, log: FactLog) -> None:
    await log.tail()
    old = await log.commit(after=START, facts=[fact(1)], commands=[])
    await rig.restart()
    with pytest.raises(CommitConflict):
        await log.commit(after=old, facts=[fact(2)], commands=[order(1)])
    tail = await log.tail()
    assert (tail.generation > old.generation, tail.committed) == (True, START)
    first = await log.commit(after=START, facts=[fact(2)], commands=[order(1)], generation=tail.generation)
    assert first == Position(tail.generation, 1)


async def test_R12_a_first_commit_made_for_the_generation_before_conflicts(rig: Rig, log: FactLog) -> None:
    tail = await log.tail()
    await rig.restart()
    with pytest.raises(CommitConflict):
        await log.commit(after=START, facts=[fact(1)], commands=[], generation=tail.generation)
    other = rig.client("two")
    second = (await other.tail()).generation
    await rig.restart()
    with pytest.raises(CommitConflict):
        await other.commit(after=START, facts=[fact(1)], commands=[order(1)])
    third = (await log.tail()).generation
    assert tail.generation < second < third
    assert said(await log.read(START)) == [f"opened {number}" for number in (tail.generation, second, third)]
    assert await log.read_commands("a", "0-0") == []


async def test_R12_a_flushed_log_opens_above_every_generation_its_clients_knew(rig: Rig, log: FactLog) -> None:
    known = await log.open_generation((await log.tail()).generation + AHEAD_MS, cause="test")
    rig.flush()
    newcomer = rig.client("new")
    low = await newcomer.append([fact(1)])
    assert (low.generation < known, low.seq) == (True, 1)
    assert await log.append([fact(2)]) == Position(known + 1, 1)
    with pytest.raises(GenerationChanged):
        await newcomer.append([fact(2)], generation=low.generation)


async def test_P19_R12_a_newcomer_on_a_flushed_log_opens_above_all_that_was(rig: Rig, log: FactLog) -> None:
    """It knows no generation and the server none either: only time tells the new history from the old one."""
    first = await log.append([fact(1)])
    await rig.restart()
    seen = await log.append([fact(2), fact(3)])
    rig.flush()
    await clock_moves()
    end = await rig.client("new").append([fact(number) for number in range(10, 20)])
    assert end.generation > seen.generation > first.generation
    entries = await log.read(seen)
    assert entries[0].position == Position(end.generation, 0)
    assert said(entries) == [f"opened {end.generation}", *map(str, range(10, 20))]
    with pytest.raises(GenerationChanged):
        await log.append([fact(4)], generation=seen.generation)


async def test_P19_R12_a_newcomer_on_a_rewound_log_does_not_open_the_lost_generation_again(
    rig: Rig, log: FactLog
) -> None:
    first = await log.append([fact(1)])
    rig.save()
    await rig.restart()
    lost = await log.append([fact(2), fact(3)])
    await rig.rewind()
    await clock_moves()
    end = await rig.client("new").append([fact(number) for number in range(10, 20)])
    assert end.generation > lost.generation > first.generation
    entries = await log.read(lost)
    assert entries[0].position == Position(end.generation, 0)
    assert said(entries) == [f"opened {end.generation}", *map(str, range(10, 20))]
    assert said(await rig.client("reader").read(START)) == [f"opened {first.generation}", "1", *said(entries)]
    with pytest.raises(GenerationChanged):
        await log.append([fact(4)], generation=lost.generation)


async def test_R12_a_generation_that_a_client_insists_on_is_passed_over(log: FactLog) -> None:
    wanted = (await log.append([fact(1)])).generation + AHEAD_MS
    with pytest.raises(GenerationChanged) as changed:
        await log.append([fact(2)], generation=wanted)
    assert changed.value.generation == wanted + 1
    assert await log.append([fact(2)], generation=wanted + 1) == Position(wanted + 1, 1)


async def test_R12_a_reader_ahead_of_a_flushed_log_does_not_stall(rig: Rig, log: FactLog) -> None:
    end = await log.append([fact(number) for number in range(1, 10)])
    await log.open_generation(end.generation + AHEAD_MS, cause="test")
    reader = rig.client("reader")
    seen = (await reader.read(end))[-1].position
    rig.flush()
    newcomer = rig.client("new")
    low = await newcomer.append([fact(1)])
    assert low.generation < seen.generation
    entries = await reader.read(seen, wait_ms=PATIENCE_MS)
    above = seen.generation + 1
    assert said(entries) == [f"opened {above}"]
    with pytest.raises(GenerationChanged):
        await newcomer.append([fact(2)], generation=low.generation)
    assert await newcomer.append([fact(1), fact(2)], generation=above) == Position(above, 2)
    assert said(await reader.read(entries[-1].position, wait_ms=PATIENCE_MS)) == ["1", "2"]


async def test_R12_a_llumlet_ahead_of_a_flushed_log_gets_its_next_command(rig: Rig, log: FactLog) -> None:
    known = await log.open_generation((await log.tail()).generation + AHEAD_MS, cause="test")
    await log.commit(after=START, facts=[fact(1)], commands=[order(1), order(2)])
    llumlet = rig.client("llumlet")
    cursor = (await llumlet.read_commands("a", "0-0"))[-1].cursor
    rig.flush()
    waiting = asyncio.create_task(llumlet.read_commands("a", cursor, wait_ms=PATIENCE_MS))
    assert await log.append([fact(2)]) == Position(known + 1, 1)
    await log.commit(after=START, facts=[fact(3)], commands=[order(3)])
    assert [delivered.command for delivered in await waiting] == [order(3)]
