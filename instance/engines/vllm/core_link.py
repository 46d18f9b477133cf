"""The llumlet's end of one engine core: the process group, calls to it, and the certainty of when it has died."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from midstream.control.errors import EngineFailed, Refused
from midstream.instance.engines.vllm import calls
from midstream.instance.engines.vllm.config import VllmConfig
from midstream.instance.engines.vllm.core_process import CoreOrder
from midstream.instance.engines.vllm.processes import release, shared_memory_of
from midstream.instance.engines.vllm.seams.kv_events import publisher_args

if TYPE_CHECKING:
    from midstream.instance.engines.vllm.seams import host

CORE_MODULE = "midstream.instance.engines.vllm.core_process"
Value = TypeVar("Value")


class CoreLink:
    """One core in a session of its own, so that it and its workers can be ended as a group."""

    def __init__(self, config: VllmConfig, engine_args: dict[str, Any], core_module: str = CORE_MODULE) -> None:
        self._module = core_module
        self._config = config
        self._engine_args = engine_args
        self._folder = Path(tempfile.mkdtemp(prefix="midstream-engine-"))
        self.cache_events_endpoint = f"ipc://{self._folder / 'cache'}" if config.has_cache_events else None
        if self.cache_events_endpoint is not None:
            self._engine_args = {**engine_args, "kv_events_config": publisher_args(self.cache_events_endpoint)}
        self._process: asyncio.subprocess.Process | None = None
        self._client: host.AsyncMPClient | None = None
        self._watch: asyncio.Task[None] | None = None
        self._host: Any = None
        self._segments: frozenset[Path] = frozenset()
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.on_report: Callable[[calls.Report], None] = lambda report: None

    @property
    def copier_socket(self) -> str:
        """Path where the copiers of the workers connect."""
        return str(self._folder / "copiers")

    @property
    def process_group(self) -> int | None:
        """Of core and workers; for tests that kill."""
        return None if self._process is None else self._process.pid

    # --- life --------------------------------------------------------------------------------------

    async def start(self) -> host.VllmConfig:
        """Start the process; return, with vLLM's configuration, when its core is ready. Raises `EngineFailed`."""
        inputs, outputs, handshake = (f"ipc://{self._folder / name}" for name in ("inputs", "outputs", "handshake"))
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.bind(handshake)
            await self._spawn(handshake)
            # This process needs the same seconds of imports as the core: it spends them while the core starts.
            self._host = await asyncio.to_thread(import_module, "midstream.instance.engines.vllm.seams.host")
            self._host.check_host(is_untested_allowed=self._config.is_untested_vllm_allowed)
            config: host.VllmConfig = await asyncio.to_thread(self._host.engine_config, self._engine_args)
            await self._until_ready(self._host.shake_hands(socket, inputs, outputs))
        self._client = await asyncio.to_thread(self._host.connect, config, inputs, outputs)
        await self._note_segments()
        return config

    async def _note_segments(self) -> None:
        """Killed processes leave their shared memory behind; later nobody could say whose it was."""
        if self._process is not None:
            self._segments |= await asyncio.to_thread(shared_memory_of, self._process.pid)

    async def _until_ready(self, handshake: Coroutine[Any, Any, None]) -> None:
        ready = asyncio.ensure_future(handshake)
        either: set[asyncio.Future[Any]] = {ready, self.died}
        await asyncio.wait(either, timeout=self._config.boot_s, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            reason = self.died.result() if self.died.done() else f"not ready after {self._config.boot_s:.0f} s"
            await self.stop()
            raise EngineFailed(f"the engine did not start: {reason}")
        ready.result()

    async def _spawn(self, handshake: str) -> None:
        order = CoreOrder(engine_args=self._engine_args, handshake=handshake)
        settings = [f"{name}={value}" for name, value in self._config.environment.items()]
        self._process = await asyncio.create_subprocess_exec(
            "env", *settings, sys.executable, "-m", self._module, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        await self._process.stdin.drain()
        self._watch = asyncio.get_running_loop().create_task(self._wait_for_end())

    async def _wait_for_end(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        self.declare_dead(f"the engine core ended with {code}")

    def declare_dead(self, reason: str) -> None:
        """Nothing more can come from it: end what is left of the group, fail every call."""
        if not self.died.done():
            self.died.set_result(reason)
        if self._client is not None:
            self._host.declare_dead(self._client)
        self._kill(signal.SIGKILL)

    def _kill(self, how: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # none of the group is left
                os.killpg(self._process.pid, how)

    async def stop(self) -> None:
        """End the core in good order, or at once if it does not; nothing of it is left afterwards."""
        if self._process is not None and self._process.returncode is None:
            await self._note_segments()
            with contextlib.suppress(ProcessLookupError, TimeoutError):  # then it is killed
                self._process.terminate()
                await asyncio.wait_for(self._process.wait(), self._config.stop_s)
        self.declare_dead("stopped")
        if self._watch is not None:
            await asyncio.wait({self._watch})
        await asyncio.to_thread(release, self._segments)
        if self._client is not None:
            await self._host.disconnect(self._client)
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- calls -------------------------------------------------------------------------------------

    async def call(self, method: str, what: msgspec.Struct | None, kind: type[Value]) -> Value:
        """Call one of our methods of the core. Raises `Refused` as it did, `EngineFailed` when it is dead or hangs."""
        arguments = () if what is None else (msgspec.msgpack.encode(what),)
        answer = msgspec.msgpack.decode(await self.utility(method, *arguments), type=calls.Answer)
        self.on_report(answer.report)
        if answer.refused is not None:
            raise Refused(*answer.refused)
        return msgspec.msgpack.decode(answer.value, type=kind)

    async def utility(self, method: str, *arguments: Any) -> Any:
        """Call any method of the core. Raises `EngineFailed` when it failed, or is dead or hangs."""
        client = self._living()
        work = asyncio.ensure_future(client.call_utility_async(method, *arguments))
        try:
            await asyncio.wait({work, self.died}, timeout=self._config.call_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                work.cancel()
        if work.done() and not work.cancelled():
            return self._result(method, work)
        if not self.died.done():
            self.declare_dead(f"no answer to {method} within {self._config.call_s:.0f} s")
        raise EngineFailed(self.died.result())

    def _result(self, method: str, work: asyncio.Future[bytes]) -> bytes:
        try:
            return work.result()
        except self._host.EngineDeadError:
            self.declare_dead("the engine core said that it is dead")
            raise EngineFailed(self.died.result()) from None
        except Exception as error:  # vLLM raises the bare class for a method that failed
            raise EngineFailed(f"{method}: {error}") from error

    async def add(self, request: host.EngineCoreRequest) -> None:
        """Give a fresh request to vLLM's own door. Raises `EngineFailed`."""
        try:
            await self._living().add_request_async(request)
        except self._host.EngineDeadError:
            raise EngineFailed(self._reason()) from None

    async def outputs(self) -> list[host.EngineCoreOutput]:
        """Outputs of the next step that has any. Raises `EngineFailed` when there will be none."""
        try:
            batch = await self._living().get_output_async()
        except self._host.EngineDeadError:
            self.declare_dead("the engine core said that it is dead")
            raise EngineFailed(self._reason()) from None
        return list(batch.outputs)

    def _living(self) -> host.AsyncMPClient:
        if self._client is None or self.died.done():
            raise EngineFailed(self._reason())
        return self._client

    def _reason(self) -> str:
        return self.died.result() if self.died.done() else "not started"
