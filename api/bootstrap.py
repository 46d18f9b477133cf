"""The composition root: the only place that picks adapters and wires them together. Nothing else names a concrete one.

Every `make_…` builds one part from the settings, connecting to nothing; `api.processes` puts parts together.
"""

from __future__ import annotations

import secrets
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from midstream.api.settings import ENV_PREFIX, Settings, child_environment
from midstream.control.adapters.clock import SystemClock
from midstream.control.adapters.redis_log import RedisLog
from midstream.control.errors import ArchiveUnavailable, BadInput
from midstream.control.follower import Follower
from midstream.control.ports import FactLog, Scaler
from midstream.control.publisher import Publisher
from midstream.control.state import State
from midstream.control.supervise import Supervisor

if TYPE_CHECKING:
    from fastapi import FastAPI

    from midstream.api.admin.deps import Jobs
    from midstream.api.gateway.gateway import Gateway
    from midstream.api.gateway.vllm.face import FaceConfig
    from midstream.control.adapters.sql import SqlArchive
    from midstream.control.jobs import JobQueue
    from midstream.control.service import Controller
    from midstream.instance.engines.base import Engine
    from midstream.instance.llumlet import Llumlet
    from midstream.migration.wires.base import Wire

CLOCK: Final = SystemClock()
SEED_BITS: Final = 32

logger = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Voice:
    """What a process says facts with: `recorder` is its source, `tasks` its supervised loops."""

    name: str
    incarnation: int
    log: RedisLog
    recorder: Publisher
    tasks: Supervisor


class Face(Protocol):
    """A listening HTTP face."""

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        ...

    async def stop(self) -> None:
        """Let open streams end with an error event, then close."""
        ...


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
    """The engine of a llumlet, with its transfers. Raises `BadInput` for settings that it does not take."""
    return _vllm_engine(settings) if settings.engine == "vllm" else _sim_engine(settings)


def _vllm_engine(settings: Settings) -> Engine:
    from midstream.instance.engines.vllm.config import VllmConfig
    from midstream.instance.engines.vllm.engine import VllmEngine
    from midstream.instance.engines.vllm.flags import EngineSizes, read_flags

    sizes = EngineSizes(blocks=settings.vllm_blocks, kv_gib=settings.vllm_kv_gib, cpu_threads=settings.vllm_cpu_threads)
    flags = read_flags(settings.vllm_flags, sizes)
    return VllmEngine(
        VllmConfig(
            model=flags.model,
            name=flags.served_name,
            engine_args=flags.engine_args,
            environment=flags.environment,
            is_untested_vllm_allowed=settings.vllm_any_version,
            secret=settings.data_secret(),
            transfers=settings.transfer_names,
            transfer_bytes_per_s=settings.copy_bytes_per_s,
            transfer_host=settings.bind_host,
            transfer_advertise_host=settings.advertise_host or "",
            boot_s=settings.vllm_boot_s,
        )
    )


def _sim_engine(settings: Settings) -> Engine:
    from midstream.instance.engines.sim.config import SimConfig
    from midstream.instance.engines.sim.engine import SimEngine
    from midstream.migration.transfers.base import Where
    from midstream.migration.transfers.registry import make_transfers
    from midstream.migration.transfers.shm_memory import Region

    config = SimConfig(
        model=settings.served_model,
        blocks_total=settings.sim_blocks,
        block_tokens=settings.sim_block_tokens,
        slots_max=settings.sim_slots,
        tokens_max=settings.context_tokens_max,
        time_scale=settings.sim_time_scale,
        secret=settings.data_secret(),
    )
    where = Where(
        bind_host=settings.bind_host,
        advertise_host=settings.advertise_host,
        secret=settings.data_secret(),
        bytes_per_s=settings.copy_bytes_per_s,
    )
    region = Region(config.kv_bytes)
    return SimEngine(config, make_transfers(settings.transfer_names, where, [region]), memory=region.view)


def make_follower(settings: Settings, log: FactLog, *, rest_s: float = 0.0) -> Follower:
    """A fold of the log that falls back on the archive where the log no longer reaches. `rest_s`: see `Follower`."""

    async def from_archive() -> State | None:
        archive = make_archive(settings)
        try:
            return await archive.state_at(await archive.position())
        except ArchiveUnavailable as error:
            logger.warning("no archive to start from", error=str(error))
            return None
        finally:
            await archive.close()

    return Follower(log, bootstrap=from_archive, rest_s=rest_s)


def make_llumlet(settings: Settings, voice: Voice) -> Llumlet:
    """One instance's agent."""
    from midstream.instance.llumlet import Llumlet

    return Llumlet(
        instance=voice.name,
        engine=make_engine(settings),
        wire=make_wire(settings, f"llumlet/{voice.name}", voice.incarnation),
        log=voice.log,
        recorder=voice.recorder,
        clock=CLOCK,
        settings=settings.llumlet_with(_usual_timers(settings)),
    )


def _usual_timers(settings: Settings) -> Mapping[str, float]:
    if settings.engine != "vllm":
        return {}
    from midstream.instance.engines.vllm.flags import usual_timers

    return usual_timers()


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


def make_scaler(settings: Settings) -> Scaler:
    """Who starts and ends instances for `midstream scaler`. Raises `BadInput` unless exactly one is set, and usable.

    A command gets the settings for an instance, without what is the scaler's own: its name, its health, its token.
    """
    from midstream.control.adapters.scaler_calls import CommandScaler, WebhookScaler

    if (settings.scale_command is None) == (settings.scale_webhook is None):
        raise BadInput("a scaler needs MIDSTREAM_SCALE_COMMAND or MIDSTREAM_SCALE_WEBHOOK, one of them")
    if settings.scale_webhook is not None:
        token = settings.scale_token
        return WebhookScaler(settings.scale_webhook, None if token is None else token.get_secret_value())
    own = ("health_file", "scale_command", "scale_webhook", "scale_token")
    environment = child_environment(settings, **dict.fromkeys(own))
    return CommandScaler(shlex.split(settings.scale_command or ""), environment, named_in=f"{ENV_PREFIX}NAME")


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
        settings=GatewaySettings(
            requests_max=settings.requests_max,
            tenant_waiting_max=settings.tenant_waiting_max,
            queue_depth=settings.queue_depth,
        ),
        models=(settings.served_model,),
    )


async def serve_openai(settings: Settings, voice: Voice, gateway: Gateway) -> Face:
    """Serve the gateway's HTTP face: vLLM's own application for vLLM, the light one otherwise. Raises `BadInput`."""
    host, port = settings.gateway_host, settings.gateway_port
    if settings.engine == "vllm":
        from midstream.api.gateway.vllm.face import serve_vllm_face

        return await serve_vllm_face(gateway, _vllm_face(settings, voice), host, port)
    from midstream.api.http_server import serve

    return await serve(make_openai_app(settings, voice, gateway), host, port)


def _vllm_face(settings: Settings, voice: Voice) -> FaceConfig:
    from midstream.api.gateway.vllm.face import FaceConfig

    return FaceConfig(
        gateway=voice.name,
        incarnation=voice.incarnation,
        models=(settings.vllm_flags, *(tuple(shlex.split(line)) for line in settings.vllm_more_models)),
        keys=settings.keys,
        body_bytes_max=settings.body_bytes_max,
        open_max=settings.requests_max,
        any_version=settings.vllm_any_version,
    )


def make_openai_app(settings: Settings, voice: Voice, gateway: Gateway) -> FastAPI:
    """The light HTTP face, which needs no vLLM."""
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


def make_admin_app(settings: Settings, voice: Voice, follower: Follower, archive: SqlArchive, jobs: Jobs) -> FastAPI:
    """The admin API."""
    from midstream.api.admin.app import create_admin
    from midstream.api.admin.deps import AdminDeps, AdminSettings

    return create_admin(
        AdminDeps(
            follower=follower,
            archive=archive,
            recorder=voice.recorder,
            jobs=jobs,
            clock=CLOCK,
            settings=AdminSettings(host=settings.admin_host, keys=settings.keys),
        )
    )


def make_job_queue(settings: Settings) -> JobQueue:
    """Where slow jobs are put."""
    from midstream.control.jobs import JobQueue

    return JobQueue(settings.require_redis(), cluster=settings.cluster)


def check_policies(settings: Settings) -> None:
    """Raises `UnknownThing` or `BadInput` for a policy or a parameter that does not exist or is out of its range."""
    from midstream.control.policies import check, check_params

    check_params(settings.policy_params)
    check(settings.policies)


def upgrade_database(url: str) -> str:
    """Create or upgrade the archive's tables; return the revision reached."""
    from midstream.migrations.schema import upgrade

    return upgrade(url)
