"""A small cluster as the admin API sees it: a log in memory whose fold and archive follow at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
from fastapi import FastAPI

from midstream.api.admin.app import create_admin
from midstream.api.admin.deps import AdminDeps, AdminSettings
from midstream.api.http_server import Served, serve
from midstream.control.adapters.clock import SystemClock
from midstream.control.adapters.memory_archive import MemoryArchive
from midstream.control.adapters.sql_operations import Operation
from midstream.control.codec import decode_fact, encode_fact
from midstream.control.errors import UnknownThing
from midstream.control.events import Entry, Event, Fact, GenerationOpened, InstanceRegistered, RequestDispatched
from midstream.control.fold import apply
from midstream.control.ids import Owner, Position
from midstream.control.state import Fingerprint, State

FINGERPRINT = Fingerprint(
    engine="sim", engine_version="1", model="sim", weights_revision="1", dtype="bf16",
    block_tokens=16, block_bytes=64, layout="paged",
)  # fmt: skip


class Log:
    """Plays log, follower and recorder. `is_stuck` holds facts back, as a slow log would."""

    def __init__(self) -> None:
        self.state = State()
        self.archive = MemoryArchive()
        self.recorded: list[Event] = []
        self.is_stuck = False
        self.entries: list[Entry] = []
        self._held: list[Event] = []
        self._seqs: dict[str, int] = {}
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def record(self, event: object) -> None:
        """As `Recorder`: a fact of the admin API."""
        assert isinstance(event, Event)
        self.recorded.append(event)
        if self.is_stuck:
            self._held.append(event)
        else:
            self.say("admin", event)

    def say(self, source: str, event: Event) -> Entry:
        """A fact of any source."""
        seq = self._seqs[source] = self._seqs.get(source, 0) + 1
        at_ms = 1_000_000 + len(self.entries)
        fact = decode_fact(encode_fact(Fact(source, 1, seq, at_ms, event)))
        entry = Entry(Position(1, len(self.entries) + 1), fact)
        self.entries.append(entry)
        apply(self.state, entry)
        self._store(entry)
        self._changed.set()
        return entry

    def _store(self, entry: Entry) -> None:
        """`MemoryArchive.store` never really waits, so it can be driven to its end at once."""
        with contextlib.suppress(StopIteration):
            self.archive.store([entry]).send(None)

    def release(self) -> None:
        """The log moves again."""
        self.is_stuck = False
        held, self._held = self._held, []
        for event in held:
            self.say("admin", event)

    # --- a cluster ---------------------------------------------------------------------------

    def instance(
        self, name: str, *, incarnation: int = 1, fingerprint: Fingerprint = FINGERPRINT, blocks: int = 100
    ) -> Owner:
        owner = Owner(name, incarnation)
        self.say(
            f"llumlet/{name}",
            InstanceRegistered(
                owner=owner, address=f"tcp://{name}", fingerprint=fingerprint, blocks_total=blocks, slots_max=8
            ),
        )
        return owner

    def request(self, name: str, owner: Owner, *, prompt_tokens: int = 32) -> None:
        self.say(
            "gateway/g1",
            RequestDispatched(
                request=name, gateway="g1", owner=owner, epoch=2, prompt_tokens=prompt_tokens,
                delivered_tokens=0, output_tokens_max=64,
            ),
        )  # fmt: skip


class MemoryJobs:
    """Slow jobs that never run by themselves."""

    def __init__(self) -> None:
        self.jobs: dict[str, Operation] = {}

    async def enqueue_replay(self, operation: str, overrides: Mapping[str, Any], actor: str) -> Operation:
        fresh = Operation(
            id=operation, kind="replay", params={"overrides": dict(overrides), "actor": actor}, status="accepted",
            progress=0.0, result=None, error=None, created_at_ms=1, updated_at_ms=1,
        )  # fmt: skip
        return self.jobs.setdefault(operation, fresh)

    async def operation(self, id: str) -> Operation:
        if id not in self.jobs:
            raise UnknownThing(f"no operation {id!r}")
        return self.jobs[id]


def small_cluster() -> Log:
    """Instances i1, i2 (equal), a request r1 on i1."""
    log = Log()
    log.say("control", GenerationOpened(generation=1, cause="new", opened_by="test"))
    owner = log.instance("i1")
    log.instance("i2")
    log.request("r1", owner)
    return log


def admin_app(log: Log, jobs: MemoryJobs | None = None, archive: Any = None, **settings: Any) -> FastAPI:
    """The app on this cluster."""
    deps = AdminDeps(
        follower=log, archive=archive or log.archive, recorder=log, jobs=jobs or MemoryJobs(), clock=SystemClock(),
        settings=AdminSettings(**settings),
    )  # fmt: skip
    return create_admin(deps)


@contextlib.asynccontextmanager
async def client_of(log: Log, jobs: MemoryJobs | None = None, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app without a socket between: for everything that is no stream."""
    transport = httpx.ASGITransport(admin_app(log, jobs, **options))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/api/v1") as client:
        yield client


@contextlib.asynccontextmanager
async def serving(log: Log, **options: Any) -> AsyncIterator[Served]:
    """The admin API on a free port."""
    served = await serve(admin_app(log, **options), "127.0.0.1", 0)
    try:
        yield served
    finally:
        await served.stop()


@contextlib.asynccontextmanager
async def live_client_of(log: Log, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a real server."""
    async with (
        serving(log, **options) as served,
        httpx.AsyncClient(base_url=f"{served.url}/api/v1", timeout=20) as client,
    ):
        yield client


def code_of(response: httpx.Response) -> tuple[int, str]:
    """Status and code of a problem; anything that is no well-formed problem fails."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    body = response.json()
    assert set(body) == {"type", "title", "status", "detail", "code"}
    assert body["status"] == response.status_code
    return response.status_code, body["code"]
