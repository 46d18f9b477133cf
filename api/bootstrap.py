"""The composition root: the only place that picks adapters and wires them together. Nothing else names a concrete one.

Every `make_…` builds one part from the settings; every `open_…` is a whole process as an async context manager.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

import structlog

from midstream.api.process import Running, Service
from midstream.api.settings import Settings
from midstream.control.adapters.clock import SystemClock
from midstream.control.adapters.redis_log import RedisLog
from midstream.control.errors import ArchiveUnavailable, LogUnavailable, UnknownThing
from midstream.control.ports import Archive
from midstream.control.publisher import Publisher
from midstream.control.state import PolicySettings
from midstream.control.supervise import Supervisor
from midstream.instance.engines.base import Engine
from midstream.instance.llumlet import Llumlet
from midstream.instance.settings import LlumletSettings
from midstream.migration.wires.base import Wire

CLOCK: Final = SystemClock()
AWAY_S: Final = 20.0
"""A process that starts waits so long for Redis and the archive before it gives up."""
AWAY_POLL_S: Final = 0.2
FLUSH_S: Final = 3.0
"""A process that stops gets so long to say its last facts."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Voice:
    """What a process says facts with: `recorder` is its source, `tasks` its supervised loops."""

    name: str
    incarnation: int
    log: RedisLog
    recorder: Publisher
    tasks: Supervisor


def name_of(settings: Settings) -> str:
    """This process's name."""
    return settings.name or socket.gethostname()


def make_log(settings: Settings, opened_by: str) -> RedisLog:
    """The log. Raises `BadInput` when no Redis is set."""
    return RedisLog(settings.require_redis(), cluster=settings.cluster, opened_by=opened_by)


def make_archive(settings: Settings) -> Archive:
    """The archive in SQL. Raises `BadInput` for a bad URL."""
    from midstream.control.adapters.sql import SqlArchive

    return SqlArchive(settings.archive_url)


def make_wire(settings: Settings, node: str, incarnation: int) -> Wire:
    """The data plane's end of this process. Raises `BadInput` without a secret."""
    from midstream.migration.wires.zmq import ZmqWire

    return ZmqWire(
        node, incarnation, settings.bind_host, settings.data_port,
        secret=settings.data_secret(), advertise_host=settings.advertise_host,
    )  # fmt: skip


def make_engine(settings: Settings) -> Engine:
    """The engine of a llumlet, with its transfers."""
    from midstream.instance.engines.sim.config import SimConfig
    from midstream.instance.engines.sim.engine import SimEngine
    from midstream.migration.transfers.rpc import RpcTransfer

    config = SimConfig(
        model=settings.model,
        blocks_total=settings.sim_blocks,
        block_tokens=settings.sim_block_tokens,
        slots_max=settings.sim_slots,
        time_scale=settings.sim_time_scale,
        secret=settings.data_secret(),
    )
    transfer = RpcTransfer(settings.bind_host, advertise_host=settings.advertise_host, secret=settings.data_secret())
    return SimEngine(config, {"rpc": transfer})


def make_llumlet(settings: Settings, voice: Voice) -> Llumlet:
    """One instance's agent."""
    return Llumlet(
        instance=voice.name,
        engine=make_engine(settings),
        wire=make_wire(settings, f"llumlet/{voice.name}", voice.incarnation),
        log=voice.log,
        recorder=voice.recorder,
        clock=CLOCK,
        settings=LlumletSettings(report_min_ms=settings.load_report_min_ms, report_max_ms=settings.load_report_max_ms),
    )


def check_policies(policies: PolicySettings) -> None:
    """Raises `UnknownThing` or `BadInput` for a policy or a parameter that does not exist."""
    from midstream.control.policies import check

    check(policies)


def upgrade_database(url: str) -> str:
    """Create or upgrade the archive's tables; return the revision reached."""
    from midstream.migrations.schema import upgrade

    return upgrade(url)


@contextlib.asynccontextmanager
async def speaking(settings: Settings, kind: str) -> AsyncIterator[Voice]:
    """A process that can say facts; on the way out it says its last ones.

    Raises `BadInput` for a server that will not do, `LogUnavailable` when there is none for `AWAY_S`.
    """
    name = name_of(settings)
    source, incarnation = f"{kind}/{name}", CLOCK.now_ms()
    log = make_log(settings, source)
    try:
        await _until_there(log.check)
        recorder = Publisher(log, source, incarnation, CLOCK)
        tasks = Supervisor(recorder)
        tasks.loop("publisher", recorder.run)
        try:
            yield Voice(name, incarnation, log, recorder, tasks)
        finally:
            await tasks.stop()
            await recorder.flush(FLUSH_S)
    finally:
        await log.close()


@contextlib.asynccontextmanager
async def open_archiver(settings: Settings) -> AsyncIterator[Running]:
    """The archiver process."""
    from midstream.control.archive import Archiver

    archive = make_archive(settings)
    try:
        async with speaking(settings, "archiver") as voice:
            await _until_there(archive.position)
            voice.tasks.loop("archiver", Archiver(voice.log, archive, CLOCK, voice.recorder).run)
            yield Running()
    finally:
        await archive.close()


@contextlib.asynccontextmanager
async def open_llumlet(settings: Settings) -> AsyncIterator[Running]:
    """The process of one instance. Fails when its engine has died."""
    async with speaking(settings, "llumlet") as voice:
        llumlet = make_llumlet(settings, voice)
        await llumlet.start()
        try:
            yield Running(llumlet.wire.node.address, llumlet.engine.failed)
        finally:
            await llumlet.stop()


OPENERS: Final[dict[str, Callable[[Settings], AbstractAsyncContextManager[Running]]]] = {
    "archiver": open_archiver,
    "llumlet": open_llumlet,
}
"""Every kind of process."""


def service_of(kind: str, settings: Settings) -> Service:
    """The service of one kind of process."""
    if kind not in OPENERS:
        raise UnknownThing(f"no process {kind}; there are {', '.join(OPENERS)}")
    return lambda: OPENERS[kind](settings)


async def _until_there(ask: Callable[[], Awaitable[object]]) -> None:
    """Ask again until what is asked answers. Raises its last answer after `AWAY_S`."""
    deadline = asyncio.get_running_loop().time() + AWAY_S
    while True:
        try:
            await ask()
        except (LogUnavailable, ArchiveUnavailable) as error:
            if asyncio.get_running_loop().time() > deadline:
                raise
            logger.warning("waiting", error=str(error))
            await asyncio.sleep(AWAY_POLL_S)
        else:
            return
