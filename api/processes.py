"""Whole processes as async context managers: entered, they serve; left, they said their last facts and are gone."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

import structlog
from msgspec.structs import replace

from midstream.api import bootstrap
from midstream.api.bootstrap import Voice
from midstream.api.health import beat, end
from midstream.api.process import Running, Service
from midstream.api.settings import Settings
from midstream.api.waiting import until_there
from midstream.control.errors import UnknownThing
from midstream.control.events import PolicyConfigured
from midstream.control.ports import Scaler
from midstream.control.publisher import Publisher
from midstream.control.state import PolicyChoice, PolicySettings, State
from midstream.control.supervise import Supervisor

CAUGHT_UP_S: Final = 20.0
"""A process that starts and has found Redis gets so long to fold what is in the log."""
GATEWAY_REST_S: Final = 0.01
"""A gateway learns of facts so much later, and spends its time on tokens."""
FLUSH_S: Final = 3.0
"""A process that stops gets so long to say its last facts."""

logger = structlog.get_logger(__name__)


@contextlib.asynccontextmanager
async def speaking(settings: Settings, kind: str) -> AsyncIterator[Voice]:
    """A process that can say facts; on the way out it says its last ones.

    Raises `BadInput` for a server that will not do, `LogUnavailable` when there is none for `start_wait_ms`.
    """
    name = bootstrap.name_of(settings)
    source, incarnation = f"{kind}/{name}", bootstrap.CLOCK.now_ms()
    log = bootstrap.make_log(settings, source)
    try:
        await _until_there(settings, log.check)
        recorder = Publisher(log, source, incarnation, bootstrap.CLOCK)
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

    archive = bootstrap.make_archive(settings)
    try:
        async with speaking(settings, "archiver") as voice:
            await _until_there(settings, archive.position)
            voice.tasks.loop("archiver", Archiver(voice.log, archive, bootstrap.CLOCK, voice.recorder).run)
            yield Running()
    finally:
        await archive.close()


@contextlib.asynccontextmanager
async def open_controller(settings: Settings) -> AsyncIterator[Running]:
    """The process of one controller replica. On a fresh log it says which policies the settings ask for."""
    bootstrap.check_policies(settings)
    async with speaking(settings, "controller") as voice:
        follower = bootstrap.make_follower(settings, voice.log)
        voice.tasks.loop("follower", follower.run)
        await follower.caught_up(CAUGHT_UP_S)
        if _is_unset(follower.state):
            if settings.policies != PolicySettings():
                voice.recorder.record(PolicyConfigured(policies=settings.policies, actor="settings"))
        elif _scaled_as_asked(follower.state, settings) is not None:
            logger.warning(
                "the log has policies of its own, so autoscale changes nothing: see `midstream policies set`",
                autoscale=settings.autoscale, in_force=follower.state.policies.scale,
            )  # fmt: skip
        voice.tasks.loop("controller", bootstrap.make_controller(settings, voice, follower).run)
        yield Running()


async def ask_for_scaling(settings: Settings) -> PolicyChoice | None:
    """Put `autoscale` in force where the log has policies already, and return what changed.

    For whoever starts a cluster by hand and before its controllers run; on a new log those say it. Raises `BadInput`
    for bounds that cannot hold.
    """
    from midstream.control.policies import check

    async with speaking(settings, "up") as voice:
        follower = bootstrap.make_follower(settings, voice.log)
        voice.tasks.loop("follower", follower.run)
        await follower.caught_up(CAUGHT_UP_S)
        wanted = None if _is_unset(follower.state) else _scaled_as_asked(follower.state, settings)
        if wanted is None:
            return None
        check(wanted)
        voice.recorder.record(PolicyConfigured(policies=wanted, actor="up"))
        return wanted.scale


def _is_unset(state: State) -> bool:
    """Has nobody said yet which policies are in force."""
    return state.control_seq == 0 and state.policies == PolicySettings()


def _scaled_as_asked(state: State, settings: Settings) -> PolicySettings | None:
    """The policies in force, scaling as the settings ask: other parameters of it stay, but it acts. None: they do."""
    asked, now = settings.policies.scale, state.policies.scale
    if asked is None:
        return None
    kept = dict(now.params) if now is not None and now.name == asked.name else {}
    kept.pop("is_dry_run", None)
    wanted = replace(state.policies, scale=PolicyChoice(asked.name, {**kept, **asked.params}))
    return None if wanted == state.policies else wanted


@contextlib.asynccontextmanager
async def open_scaler(settings: Settings) -> AsyncIterator[Running]:
    """The process of one scaler. Raises `BadInput` when it is not said whom to call."""
    scaler = bootstrap.make_scaler(settings)
    async with scaling(settings, scaler):
        yield Running()


@contextlib.asynccontextmanager
async def scaling(settings: Settings, scaler: Scaler) -> AsyncIterator[None]:
    """A scaler at work, in a process of its own or beside the supervisor that starts and ends local instances."""
    from midstream.control.scaler import ScalerService

    async with speaking(settings, "scaler") as voice:
        follower = bootstrap.make_follower(settings, voice.log)
        voice.tasks.loop("follower", follower.run)
        await follower.caught_up(CAUGHT_UP_S)
        service = ScalerService(follower=follower, scaler=scaler, recorder=voice.recorder)
        voice.tasks.loop("scaler", service.run)
        yield


@contextlib.asynccontextmanager
async def open_llumlet(settings: Settings) -> AsyncIterator[Running]:
    """The process of one instance. Fails when its engine has died; stopped, it lets its requests move away first."""
    async with speaking(settings, "llumlet") as voice:
        llumlet = bootstrap.make_llumlet(settings, voice)
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
    async with speaking(settings, "gateway") as voice:
        follower = bootstrap.make_follower(settings, voice.log, rest_s=GATEWAY_REST_S)
        gateway = bootstrap.make_gateway(settings, voice, follower)
        await gateway.start()
        voice.tasks.loop("follower", follower.run)
        try:
            await follower.caught_up(CAUGHT_UP_S)
            served = await bootstrap.serve_openai(settings, voice, gateway)
            try:
                yield Running(served.url)
            finally:
                await served.stop()
        finally:
            await gateway.stop()


@contextlib.asynccontextmanager
async def open_admin(settings: Settings) -> AsyncIterator[Running]:
    """The process of the admin API."""
    from midstream.api.http_server import serve
    from midstream.api.queued_jobs import QueuedJobs

    async with speaking(settings, "admin") as voice, contextlib.AsyncExitStack() as stack:
        archive = bootstrap.make_archive(settings)
        stack.push_async_callback(archive.close)
        queue = bootstrap.make_job_queue(settings)
        stack.callback(queue.close)
        follower = bootstrap.make_follower(settings, voice.log)
        voice.tasks.loop("follower", follower.run)
        await follower.caught_up(CAUGHT_UP_S)
        jobs = QueuedJobs(archive, queue, bootstrap.CLOCK)
        app = bootstrap.make_admin_app(settings, voice, follower, archive, jobs)
        served = await serve(app, settings.admin_host, settings.admin_port)
        stack.push_async_callback(served.stop)
        yield Running(served.url)


def run_jobs(settings: Settings) -> None:
    """The worker process's life: jobs one after the other until a signal."""
    from midstream.control.jobs import WORKER_TTL_S, run_worker

    def on_beat() -> None:
        if settings.health_file is not None:
            beat(settings.health_file, "worker", bootstrap.name_of(settings), good_s=WORKER_TTL_S)

    try:
        run_worker(
            settings.require_redis(), cluster=settings.cluster, database_url=settings.archive_url,
            clock=bootstrap.CLOCK, on_beat=on_beat,
        )  # fmt: skip
    finally:
        if settings.health_file is not None:
            end(settings.health_file)


def wait_for_log(settings: Settings) -> bool:
    """Return once Redis is there and will do, or `False` when SIGTERM came first. Raises as `speaking` does."""

    async def wait() -> bool:
        log = bootstrap.make_log(settings, f"worker/{bootstrap.name_of(settings)}")
        waiting = asyncio.ensure_future(_until_there(settings, log.check))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, waiting.cancel)
        try:
            await waiting
        except asyncio.CancelledError:
            return False
        finally:
            await log.close()
        return True

    return asyncio.run(wait())


OPENERS: Final[dict[str, Callable[[Settings], AbstractAsyncContextManager[Running]]]] = {
    "admin": open_admin,
    "archiver": open_archiver,
    "controller": open_controller,
    "gateway": open_gateway,
    "llumlet": open_llumlet,
    "scaler": open_scaler,
}
"""Every kind of asyncio process."""


def service_of(kind: str, settings: Settings) -> Service:
    """The service of one kind of process."""
    if kind not in OPENERS:
        raise UnknownThing(f"no process {kind}; there are {', '.join(OPENERS)}")
    return lambda: OPENERS[kind](settings)


async def _until_there(settings: Settings, ask: Callable[[], Awaitable[object]]) -> None:
    await until_there(ask, settings.start_wait_ms / 1000, lambda reason: logger.warning("waiting", error=reason))
