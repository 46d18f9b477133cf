"""The admin API on the real publisher, follower, archiver and SQL archive."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from midstream.api.admin.app import create_admin
from midstream.api.admin.deps import AdminDeps
from midstream.api.http_server import serve
from midstream.control.adapters.clock import SystemClock
from midstream.control.adapters.memory_log import MemoryLog, MemoryLogStore
from midstream.control.adapters.sql import SqlArchive
from midstream.control.archive import Archiver
from midstream.control.events import InstanceRegistered, RequestDispatched
from midstream.control.follower import Follower
from midstream.control.ids import Owner
from midstream.control.publisher import Publisher
from midstream.control.supervise import Supervisor
from midstream.migrations.schema import upgrade
from tests.api.admin.cluster import FINGERPRINT, MemoryJobs

CLOCK = SystemClock()


@contextlib.asynccontextmanager
async def admin_on_real_parts(path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """An API whose facts go through the log, the archiver and SQLite, with two instances and a request in it."""
    url = f"sqlite:///{path / 'archive.sqlite3'}"
    upgrade(url)
    store = MemoryLogStore(clock=CLOCK)
    log, archive, follower = (
        MemoryLog(store, opened_by="test"),
        SqlArchive(url),
        Follower(MemoryLog(store, opened_by="test")),
    )
    voices = {name: Publisher(log, name, 1, CLOCK) for name in ("admin/a", "archiver/a", "llumlet/i1", "gateway/g1")}
    tasks = Supervisor(voices["archiver/a"])
    for name, voice in voices.items():
        tasks.loop(name, voice.run)
    tasks.loop("follower", follower.run)
    tasks.loop("archiver", Archiver(log, archive, CLOCK, voices["archiver/a"]).run)
    for name in ("i1", "i2"):
        fact = InstanceRegistered(
            owner=Owner(name, 1), address=name, fingerprint=FINGERPRINT, blocks_total=100, slots_max=8
        )
        voices["llumlet/i1"].record(fact)
    voices["gateway/g1"].record(
        RequestDispatched(
            request="r1", gateway="g1", owner=Owner("i1", 1), epoch=2, prompt_tokens=32, delivered_tokens=0,
            output_tokens_max=64,
        )
    )  # fmt: skip
    deps = AdminDeps(follower=follower, archive=archive, recorder=voices["admin/a"], jobs=MemoryJobs(), clock=CLOCK)
    served = await serve(create_admin(deps), "127.0.0.1", 0)
    try:
        async with asyncio.timeout(20):
            while not ("r1" in follower.state.requests and len(follower.state.instances) == 2):
                await follower.changed()
        async with httpx.AsyncClient(base_url=f"{served.url}/api/v1", timeout=20) as client:
            yield client
    finally:
        await served.stop()
        await tasks.stop()
        await archive.close()


async def facts(client: httpx.AsyncClient, until: str, **headers: str) -> list[str]:
    """Positions and kinds from the live stream, up to and with the first fact of a kind."""
    seen: list[str] = []
    async with (
        asyncio.timeout(20),
        client.stream("GET", "/events/stream", headers=headers, params={} if headers else {"after": "0-0"}) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                fact = json.loads(line.removeprefix("data: "))
                seen.append(f"{fact['position']} {fact['kind']}")
                if fact["kind"] == until:
                    return seen
    raise AssertionError("the stream ended")


async def test_P19_an_order_goes_through_the_log_into_fold_archive_and_stream(tmp_path: Path) -> None:
    async with admin_on_real_parts(tmp_path) as client:
        order = {"request": "r1", "target": "i2"}
        accepted = await client.post("/migrations", json=order, headers={"Idempotency-Key": "k"})
        again = await client.post("/migrations", json=order, headers={"Idempotency-Key": "k"})
        assert accepted.status_code == again.status_code == 202 and accepted.json() == again.json()
        operation = (await client.get(f"/operations/{accepted.json()['operation']}")).json()
        assert (operation["kind"], operation["subject"], operation["status"]) == ("move", "r1", "accepted")
        seen = await facts(client, "MoveRequested")
        resumed = asyncio.create_task(facts(client, "DrainRequested", **{"Last-Event-ID": seen[-1].split()[0]}))
        drained = await client.post("/instances/i2/drain", headers={"Idempotency-Key": "d"})
        assert drained.status_code == 202
        seen += await resumed
        listed = (await client.get("/events", params={"limit": 1_000})).json()["items"]
        then = (await client.get("/state", params={"at": seen[-2].split()[0]})).json()
        now = (await client.get("/state")).json()
    assert seen == [f"{fact['position']} {fact['kind']}" for fact in listed]
    assert sum(line.endswith(" MoveRequested") for line in seen) == 1
    assert not then["state"]["instances"]["i2"]["is_draining"]
    assert now["state"]["instances"]["i2"]["is_draining"]
