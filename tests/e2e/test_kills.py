"""`kill -9` of whatever keeps the log, decides, or serves, while streams run: no client sees anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from midstream.control.events import GenerationOpened, RequestDispatched
from midstream.control.replay import verify
from tests.e2e.helpers import Client, Rig, running, until

TOKENS = 600
STREAMS = 5
CONTROL = ("controller-0", "archiver", "valkey")
"""Everything of the control plane that a stream might wait for, and must not."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with running(tmp_path_factory.mktemp("kills"), (500, 500, 500)) as rig:
        yield rig


async def started(rig: Rig) -> list[Client]:
    """Streams that run on every instance."""
    clients = [rig.stream(TOKENS, prompt_tokens=30 + 20 * i) for i in range(STREAMS)]
    for client in clients:
        await client.has(20)
    return clients


async def ended_undisturbed(clients: list[Client]) -> None:
    for client in clients:
        await client.end()
        client.assert_undisturbed()


async def moves_again(rig: Rig) -> None:
    """Re-scheduling goes on: a move ordered now commits."""
    await rig.all_up()
    client = rig.stream(TOKENS)
    await client.has(5)
    await until(lambda: knows(rig, client))
    source = await rig.owner(client)
    target = next(name for name in rig.llumlets if name != source)
    done = await rig.move(client, target)
    assert done["status"] == "succeeded", done
    assert await rig.owner(client) == target
    await client.leave()


async def knows(rig: Rig, client: Client) -> bool:
    """Has the log heard of the request."""
    return any(one["request"] == client.request for one in await rig.items("/requests"))


@pytest.mark.parametrize("name", CONTROL)
async def test_P19_P20_a_killed_part_of_the_control_plane_is_not_seen_by_clients(rig: Rig, name: str) -> None:
    clients = await started(rig)
    await rig.kill(name)
    assert any(name in said for said in rig.said)
    late = [rig.stream(50) for _ in range(3)]
    await ended_undisturbed([*late, *clients])
    await moves_again(rig)
    await rig.facts()


async def test_P20_all_of_the_control_plane_killed_at_once_is_not_seen_either(rig: Rig) -> None:
    clients = await started(rig)
    killing = asyncio.create_task(rig.kill(*CONTROL, "admin", "worker"))
    late = [rig.stream(50) for _ in range(3)]
    await ended_undisturbed([*late, *clients])
    await killing
    await moves_again(rig)
    entries = await rig.facts()
    assert sum(isinstance(entry.fact.event, GenerationOpened) for entry in entries) >= 2
    assert verify(entries).is_equal


@pytest.mark.parametrize("victim", ["i0", "i1"])
async def test_P04_the_requests_of_a_killed_instance_go_on_elsewhere(rig: Rig, victim: str) -> None:
    clients = await started(rig)
    orphans = [client for client in clients if await rig.owner(client) == victim]
    assert orphans, "the streams are spread over all instances"
    await rig.kill(victim)
    await ended_undisturbed(clients)
    entries = await rig.facts()
    again = {
        entry.fact.event.request
        for entry in entries
        if isinstance(entry.fact.event, RequestDispatched) and entry.fact.event.cause in ("lost", "gone")
    }
    assert again >= {client.request for client in orphans}
    await moves_again(rig)


async def test_P07_P17_afterwards_nothing_is_held_and_every_decision_is_derived_again(rig: Rig) -> None:
    await rig.idle()
    entries = await rig.facts()
    report = verify(entries)
    assert report.is_equal
    assert report.ticks > 0
