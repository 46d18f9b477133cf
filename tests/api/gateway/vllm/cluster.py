"""A whole cluster in one process: vLLM's application, gateway, two llumlets with real vLLM engines, a memory log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from midstream.api.gateway.gateway import Gateway
from midstream.api.gateway.live import Live
from midstream.api.gateway.settings import GatewaySettings
from midstream.api.gateway.vllm.face import FaceConfig, VllmFace, serve_vllm_face
from midstream.control.adapters.clock import SystemClock
from midstream.control.adapters.memory_log import MemoryLog, MemoryLogStore
from midstream.control.commands import StartMigration
from midstream.control.events import Event
from midstream.control.follower import Follower
from midstream.control.publisher import Publisher
from midstream.instance.engines.vllm.config import VllmConfig
from midstream.instance.engines.vllm.engine import VllmEngine
from midstream.instance.llumlet import Llumlet
from midstream.instance.settings import LlumletSettings
from midstream.migration.plan import PlanLimits
from midstream.migration.protocol.seat import Start
from midstream.migration.wires.zmq import ZmqWire

SECRET = b"a secret of sixteen bytes or more"
NAME = "tiny"
TOKENS_MAX = 1024
CLOCK = SystemClock()
MOVE_MS = 60_000
"""A slow machine may take so long to begin a move."""
BOOT_S = 400.0

PACE_MS = 120
"""Each step takes at least so long: two such small engines would give tokens faster than one process can hand on."""
LLUMLET = LlumletSettings(
    plan=PlanLimits(stop_budget_ms=100, stop_max_ms=2_000),
    checksum=True,
    prepare_ms=10_000,
    freeze_ms=10_000,
    decision_ms=5_000,
    lease_ms=60_000,
)
"""Patient: the machine may be busy."""

ENGINE_ARGS = {
    "additional_config": {"pace_ms": PACE_MS},
    "block_size": 32,
    "dtype": "float32",
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "max_model_len": TOKENS_MAX,
    "max_num_batched_tokens": TOKENS_MAX,
    "max_num_seqs": 64,
    "num_gpu_blocks_override": 2000,
    "served_model_name": [NAME],
    "worker_extension_cls": "tests.instance.engines.vllm.paced.PacedExtension",
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[4]),
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
FACE_FLAGS = (
    "--served-model-name", NAME, "--max-model-len", str(TOKENS_MAX), "--dtype", "float32",
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
)  # fmt: skip


class Cluster:
    """Started by `running`. Moves are ordered by the test, there is no controller."""

    def __init__(self, store: MemoryLogStore, gateway: Gateway, llumlets: tuple[Llumlet, ...], face: VllmFace) -> None:
        self.store = store
        self.gateway = gateway
        self.llumlets = {llumlet.me.instance: llumlet for llumlet in llumlets}
        self.face = face
        self._moves = 0

    def events(self, *kinds: type[Event]) -> list[Any]:
        """All facts of these kinds so far."""
        return [entry.fact.event for entry in self.store.entries if isinstance(entry.fact.event, kinds)]

    def live(self) -> list[Live]:
        """Requests that run, in order of admission."""
        return list(self.gateway.live.values())

    def owner(self, live: Live) -> str:
        """The instance where a request runs."""
        return live.ledger.owner.instance

    def move(self, live: Live) -> str:
        """Order one move to the other instance, as the controller's command would; return the move's id."""
        source = self.llumlets[self.owner(live)]
        target = next(llumlet for name, llumlet in self.llumlets.items() if name != source.me.instance)
        self._moves += 1
        command = StartMigration(
            id=f"m{self._moves}-start",
            instance=source.me.instance,
            incarnation=source.me.incarnation,
            deadline_ms=CLOCK.now_ms() + MOVE_MS,
            migration=f"m{self._moves}",
            request=live.request,
            epoch=live.ledger.epoch,
            target=target.me,
            target_address=target.wire.node.address,
        )
        source.feed(live.request, Start(command, target.wire.node))
        return command.migration

    async def at_rest(self, seconds: float = 60.0) -> None:
        """Wait until nothing runs and no block is held anywhere (P07). Raises `TimeoutError`."""
        async with asyncio.timeout(seconds):
            while not self._is_empty():
                await asyncio.sleep(0.05)

    def _is_empty(self) -> bool:
        accounts = [llumlet.engine.account() for llumlet in self.llumlets.values()]
        seats = [seat for llumlet in self.llumlets.values() for seat in llumlet.seats.values()]
        return (
            not self.gateway.live
            and all(seat.is_empty for seat in seats)
            and all(account.free == account.total for account in accounts)
        )


@contextlib.asynccontextmanager
async def running(model: Path) -> AsyncIterator[Cluster]:
    """Boot both engines and everything around them; end all of it, whatever happened."""
    store = MemoryLogStore()
    async with contextlib.AsyncExitStack() as stack:
        llumlets = await asyncio.gather(*(_llumlet(store, stack, name, model) for name in ("a", "b")))
        gateway = await _gateway(store, stack)
        config = FaceConfig(gateway="g1", incarnation=1, models=((str(model), *FACE_FLAGS),))
        face = await serve_vllm_face(gateway, config, "127.0.0.1", 0)
        stack.push_async_callback(face.stop)
        async with asyncio.timeout(30):
            while len(gateway.follower.state.instances) < len(llumlets):
                await asyncio.sleep(0.05)
        yield Cluster(store, gateway, tuple(llumlets), face)


def _publisher(store: MemoryLogStore, stack: contextlib.AsyncExitStack, source: str) -> tuple[MemoryLog, Publisher]:
    log = MemoryLog(store, opened_by=source)
    publisher = Publisher(log, source, 1, CLOCK)
    _in_background(stack, publisher.run())
    return log, publisher


def _in_background(stack: contextlib.AsyncExitStack, work: object) -> None:
    task = asyncio.ensure_future(work)  # type: ignore[call-overload]

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)


async def _llumlet(store: MemoryLogStore, stack: contextlib.AsyncExitStack, name: str, model: Path) -> Llumlet:
    log, publisher = _publisher(store, stack, f"llumlet/{name}")
    config = VllmConfig(
        model=str(model), name=NAME, engine_args=ENGINE_ARGS, environment=ENVIRONMENT, secret=SECRET, boot_s=BOOT_S
    )
    llumlet = Llumlet(
        instance=name,
        engine=VllmEngine(config),
        wire=ZmqWire(f"llumlet/{name}", 1, "127.0.0.1", secret=SECRET),
        log=log,
        recorder=publisher,
        clock=CLOCK,
        settings=LLUMLET,
    )
    await llumlet.start()
    stack.push_async_callback(llumlet.stop)
    return llumlet


async def _gateway(store: MemoryLogStore, stack: contextlib.AsyncExitStack) -> Gateway:
    log, publisher = _publisher(store, stack, "gateway/g1")
    follower = Follower(log)
    gateway = Gateway(
        name="g1",
        wire=ZmqWire("gateway/g1", 1, "127.0.0.1", secret=SECRET),
        follower=follower,
        recorder=publisher,
        clock=CLOCK,
        settings=GatewaySettings(),
        models=(NAME,),
    )
    await gateway.start()
    stack.push_async_callback(gateway.stop)
    _in_background(stack, follower.run())
    return gateway
