"""A whole local cluster: which processes there are, in which order they start, with which settings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from urllib.parse import urlsplit

import msgspec
from pydantic import SecretStr

from midstream.api.cli.up import state as up_state
from midstream.api.cli.up.leftover import end_leftover_valkey
from midstream.api.cli.up.parts import READY_S, Part, ServiceProcess, ValkeyProcess
from midstream.api.cli.up.supervisor import Supervisor
from midstream.api.http_server import bind
from midstream.api.keys import create_key
from midstream.api.settings import SECRET_FILE, Settings, child_environment
from midstream.control.errors import BadInput, MidstreamError, ScalerFailed

INSTANCES_MAX = 64
LOG_DIR = "logs"


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How many of what. `sizes` are the KV blocks of each instance, `None` for what the settings say.

    `environment` is set for every process on top of what this one has.
    """

    sizes: tuple[int | None, ...]
    controllers: int = 1
    environment: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        if not 1 <= len(self.sizes) <= INSTANCES_MAX:
            raise BadInput(f"a local cluster has 1 to {INSTANCES_MAX} instances")


class LocalCluster:
    """A cluster under supervision. `state` says where everything is; `kill` ends it at once."""

    def __init__(self, settings: Settings, plan: ClusterPlan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._supervisor = Supervisor(say, self._publish)
        self._scaler = contextlib.AsyncExitStack()
        self._admin_key, key = create_key("up", ("admin",))
        self._data_dir = settings.data_dir.absolute()
        self._admin_keys = ",".join(filter(None, (settings.api_keys, key.line())))
        self._settings = settings.model_copy(
            update={"data_dir": self._data_dir, "secret": SecretStr(ensure_secret(settings))}
        )
        self._gateway: Part | None = None
        self._admin: Part | None = None

    @property
    def state(self) -> up_state.UpState:
        """What other commands need to know. Only once it runs."""
        assert self._gateway and self._gateway.address and self._admin and self._admin.address
        return up_state.UpState(
            pid=os.getpid(),
            gateway=self._gateway.address,
            admin=self._admin.address,
            admin_key=self._admin_key,
            redis_url=self._settings.require_redis(),
            database_url=self._settings.archive_url,
            processes=tuple(self._describe(part) for part in self._supervisor.parts),
        )

    async def start(self) -> None:
        """Start everything. Raises `MidstreamError`, one line; then `stop` cleans up."""
        if self._settings.redis_url is None:
            valkey = ValkeyProcess(self._data_dir / "valkey")
            await self._supervisor.start([valkey])
            self._change(redis_url=valkey.address)
        self._change(database_url=self._settings.archive_url)
        await asyncio.to_thread(_upgrade_database, self._settings.archive_url)
        await self._ask_for_scaling()
        self._gateway = self._listener("gateway", self._settings.gateway_host, self._settings.gateway_port)
        self._admin = self._listener(
            "admin", self._settings.admin_host, self._settings.admin_port, api_keys=self._admin_keys
        )
        llumlets = [self._llumlet(index, blocks) for index, blocks in enumerate(self._plan.sizes)]
        controllers = [self._service("controller", f"controller-{i}") for i in range(self._plan.controllers)]
        keepers = [self._service("archiver", "archiver"), self._service("worker", "worker")]
        if self._settings.engine == "vllm":
            # Engines that load take every core for half a minute; whoever started beside them would miss its deadline.
            await self._supervisor.start(keepers, [self._admin])
            await self._supervisor.start(llumlets)
            await self._supervisor.start(controllers, [self._gateway])
        else:
            await self._supervisor.start(keepers, llumlets, controllers, [self._gateway, self._admin])
        if self._settings.autoscale is not None:
            from midstream.api.processes import scaling

            await self._scaler.enter_async_context(scaling(self._settings, self))

    async def stop(self) -> None:
        """End everything in order: faces, who decides, instances, then who keeps the log, then the log.

        A controller that outlived its instances would want others in their place.
        """
        await self._scaler.aclose()
        await self._supervisor.stop()

    async def add(self, instance: str, scaling: str) -> None:
        """See `control.ports.Scaler`: a local process more."""
        if self._part(instance) is not None:
            return
        if sum(part.kind == "llumlet" for part in self._supervisor.parts) >= INSTANCES_MAX:
            raise ScalerFailed(f"a local cluster has {INSTANCES_MAX} instances at most")
        try:
            await self._supervisor.add(self._service("llumlet", instance, **self._sizes(None)))
        except MidstreamError as error:
            raise ScalerFailed(str(error)) from None

    async def remove(self, instance: str, scaling: str) -> None:
        """See `control.ports.Scaler`: a local process less."""
        part = self._part(instance)
        if part is not None:
            await self._supervisor.remove(part)

    async def _ask_for_scaling(self) -> None:
        if self._settings.autoscale is None:
            return
        from midstream.api.processes import ask_for_scaling

        changed = await ask_for_scaling(self._settings)
        if changed is not None:
            self._say(f"scaling is now {changed.name} {json.dumps(changed.params)}; the other policies stay")

    def _part(self, instance: str) -> Part | None:
        return next((p for p in self._supervisor.parts if (p.kind, p.name) == ("llumlet", instance)), None)

    def kill(self) -> None:
        """End everything now."""
        self._supervisor.kill()

    def _change(self, **changes: object) -> None:
        self._settings = self._settings.model_copy(update=changes)

    def _publish(self) -> None:
        if self._admin and self._admin.address and self._gateway and self._gateway.address:
            up_state.write_state(self._data_dir, self.state)

    def _describe(self, part: Part) -> up_state.ProcessState:
        restarts = self._supervisor.restarts.get(part.name, 0)
        return up_state.ProcessState(
            name=part.name, kind=part.kind, pid=part.pid, address=part.address, restarts=restarts
        )

    def _service(self, kind: str, name: str, **changes: object) -> ServiceProcess:
        return self._process(kind, name, lambda _: [], **changes)

    def _llumlet(self, index: int, blocks: int | None) -> ServiceProcess:
        return self._service("llumlet", f"i{index}", **self._sizes(blocks))

    def _sizes(self, blocks: int | None) -> dict[str, object]:
        changes: dict[str, object] = {} if blocks is None else {f"{self._settings.engine}_blocks": blocks}
        if self._settings.engine == "vllm" and self._settings.vllm_cpu_threads is None:
            changes["vllm_cpu_threads"] = max(1, (os.cpu_count() or 1) // len(self._plan.sizes))
        return changes

    def _listener(self, kind: str, host: str, port: int, **changes: object) -> ServiceProcess:
        """A face keeps its address over restarts, also when the first start took a free port."""
        return self._process(
            kind, kind, lambda address: ["--host", host, "--port", str(_port(address, port))], **changes
        )

    def _process(
        self, kind: str, name: str, arguments: Callable[[str | None], list[str]], **changes: object
    ) -> ServiceProcess:
        env = child_environment(self._settings, name=name, health_file=None, **changes) | dict(self._plan.environment)
        is_slow = self._settings.engine == "vllm" and kind in ("llumlet", "gateway")
        ready_s = READY_S + (self._settings.vllm_boot_s if is_slow else 0.0)
        return ServiceProcess(kind, name, arguments, env, self._data_dir / LOG_DIR / f"{name}.log", ready_s)


@contextlib.asynccontextmanager
async def local_cluster(
    settings: Settings, plan: ClusterPlan, say: Callable[[str], None]
) -> AsyncIterator[LocalCluster]:
    """A running cluster, gone afterwards. Raises `MidstreamError` if the folder or a port is taken."""
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = up_state.lock(settings.data_dir)
    try:
        _prepare(settings)
        cluster = LocalCluster(settings, plan, say)
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.stop()
            up_state.remove_state(settings.data_dir)
    finally:
        os.close(lock)


def ensure_secret(settings: Settings) -> str:
    """The data plane's secret; made and kept privately in `data_dir` when there is none."""
    path = settings.data_dir / SECRET_FILE
    if settings.secret is None and not path.exists():
        up_state.write_private(path, secrets.token_hex(32).encode())
    return settings.data_secret().decode()


def _prepare(settings: Settings) -> None:
    for host, port in (
        (settings.gateway_host, settings.gateway_port),
        (settings.admin_host, settings.admin_port),
    ):
        bind(host, port).close()
    end_leftover_valkey(settings.data_dir.absolute())
    logs = settings.data_dir / LOG_DIR
    logs.mkdir(exist_ok=True)
    for log in logs.glob("*.log"):
        log.unlink()


def _port(address: str | None, asked: int) -> int:
    return asked if address is None else urlsplit(address).port or asked


def _upgrade_database(url: str) -> None:
    from midstream.api.bootstrap import upgrade_database

    upgrade_database(url)
