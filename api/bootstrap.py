"""The composition root: the only place that picks adapters and wires them together. Nothing else names a concrete one.

Every `make_…` builds one part from the settings; every `open_…` is a whole process as an async context manager.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from midstream.api.process import Running, Service
from midstream.api.settings import Settings
from midstream.control.adapters.clock import SystemClock
from midstream.control.adapters.redis_log import RedisLog
from midstream.control.errors import ArchiveUnavailable, LogUnavailable, UnknownThing
from midstream.control.events import PolicyConfigured
from midstream.control.follower import Follower
from midstream.control.ports import FactLog
from midstream.control.publisher import Publisher
from midstream.control.state import PolicySettings, State
from midstream.control.supervise import Supervisor

if TYPE_CHECKING:
    from fastapi import FastAPI

    from midstream.api.gateway.gateway import Gateway
    from midstream.control.adapters.sql import SqlArchive
    from midstream.control.service import Controller
    from midstream.instance.engines.base import Engine
    from midstream.instance.llumlet import Llumlet
    from midstream.migration.wires.base import Wire

CLOCK: Final = SystemClock()
AWAY_S: Final = 20.0
"""A process that starts waits so long for Redis and the archive before it gives up."""
AWAY_POLL_S: Final = 0.2
SEED_BITS: Final = 32
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


def make_archive(settings: Settings) -> SqlArchive:
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
        tokens_max=settings.context_tokens_max,
        time_scale=settings.sim_time_scale,
        secret=settings.data_secret(),
    )
    transfer = RpcTransfer(settings.bind_host, advertise_host=settings.advertise_host, secret=settings.data_secret())
    return SimEngine(config, {"rpc": transfer})


def make_follower(settings: Settings, log: FactLog) -> Follower:
    """A fold of the log that falls back on the archive where the log no longer reaches."""

    async def from_archive() -> State | None:
        archive = make_archive(settings)
        try:
            return await archive.state_at(await archive.position())
        except ArchiveUnavailable as error:
            logger.warning("no archive to start from", error=str(error))
            return None
        finally:
            await archive.close()

    return Follower(log, bootstrap=from_archive)


def make_llumlet(settings: Settings, voice: Voice) -> Llumlet:
    """One instance's agent."""
    from midstream.instance.llumlet import Llumlet
    from midstream.instance.settings import LlumletSettings

    return Llumlet(
        instance=voice.name,
        engine=make_engine(settings),
        wire=make_wire(settings, f"llumlet/{voice.name}", voice.incarnation),
        log=voice.log,
        recorder=voice.recorder,
        clock=CLOCK,
        settings=LlumletSettings(report_min_ms=settings.load_report_min_ms, report_max_ms=settings.load_report_max_ms),
    )


def make_controller(settings: Settings, voice: Voice, follower: Follower) -> Controller:
    """One controller replica."""
    from midstream.control.service import Controller

    return Controller(
        log=voice.log,
        follower=follower,
        clock=CLOCK,
        name=voice.name,
        seed_source=lambda: secrets.randbits(SEED_BITS),
        tick_ms=settings.tick_ms,
    )


def make_gateway(settings: Settings, voice: Voice, follower: Follower) -> Gateway:
    """The gateway's core."""
    from midstream.api.gateway.gateway import Gateway
    from midstream.api.gateway.settings import GatewaySettings

    return Gateway(
        name=voice.name,
        wire=make_wire(settings, f"gateway/{voice.name}", voice.incarnation),
        follower=follower,
        recorder=voice.recorder,
        clock=CLOCK,
        settings=GatewaySettings(requests_max=settings.requests_max),
        models=(settings.model,),
    )


def make_openai_app(settings: Settings, voice: Voice, gateway: Gateway) -> FastAPI:
    """The gateway's HTTP face."""
    from midstream.api.gateway.http import FaceSettings, create_openai_app

    face = FaceSettings(
        gateway=voice.name,
        incarnation=voice.incarnation,
        host=settings.gateway_host,
        keys=settings.keys,
        context_tokens=settings.context_tokens_max,
        body_bytes_max=settings.body_bytes_max,
        open_max=settings.requests_max,
    )
    return create_openai_app(gateway, face, CLOCK)


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
async def open_controller(settings: Settings) -> AsyncIterator[Running]:
    """The process of one controller replica. On a fresh log it says which policies the settings ask for."""
    check_policies(settings.policies)
    async with speaking(settings, "controller") as voice:
        follower = make_follower(settings, voice.log)
        voice.tasks.loop("follower", follower.run)
        await follower.caught_up(AWAY_S)
        state = follower.state
        if state.control_seq == 0 and state.policies == PolicySettings() != settings.policies:
            voice.recorder.record(PolicyConfigured(policies=settings.policies, actor="settings"))
        voice.tasks.loop("controller", make_controller(settings, voice, follower).run)
        yield Running()


@contextlib.asynccontextmanager
async def open_llumlet(settings: Settings) -> AsyncIterator[Running]:
    """The process of one instance. Fails when its engine has died; stopped, it lets its requests move away first."""
    async with speaking(settings, "llumlet") as voice:
        llumlet = make_llumlet(settings, voice)
        await llumlet.start()

        async def failed() -> str:
            return str(await asyncio.shield(llumlet.ended))

        try:
            yield Running(llumlet.wire.node.address, failed)
        finally:
            if not llumlet.ended.done():
                await llumlet.drain(settings.stop_drain_ms / 1000)
            await llumlet.stop()


@contextlib.asynccontextmanager
async def open_gateway(settings: Settings) -> AsyncIterator[Running]:
    """The process of one gateway: data plane, core and HTTP face."""
    from midstream.api.http_server import serve

    async with speaking(settings, "gateway") as voice:
        follower = make_follower(settings, voice.log)
        gateway = make_gateway(settings, voice, follower)
        await gateway.start()
        voice.tasks.loop("follower", follower.run)
        try:
            await follower.caught_up(AWAY_S)
            served = await serve(
                make_openai_app(settings, voice, gateway), settings.gateway_host, settings.gateway_port
            )
            try:
                yield Running(served.url)
            finally:
                await served.stop()
        finally:
            await gateway.stop()


def run_jobs(settings: Settings) -> None:
    """The worker process's life: jobs one after the other until a signal."""
    from midstream.control.jobs import run_worker

    run_worker(settings.require_redis(), cluster=settings.cluster, database_url=settings.archive_url, clock=CLOCK)


OPENERS: Final[dict[str, Callable[[Settings], AbstractAsyncContextManager[Running]]]] = {
    "archiver": open_archiver,
    "controller": open_controller,
    "gateway": open_gateway,
    "llumlet": open_llumlet,
}
"""Every kind of asyncio process."""


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
