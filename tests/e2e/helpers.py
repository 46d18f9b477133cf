"""A whole local cluster for end-to-end tests: real processes, clients that read streams, an operator, the archive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx

from midstream.api.cli.client import AdminClient
from midstream.api.cli.up.cluster import ClusterPlan, LocalCluster, local_cluster
from midstream.api.cli.up.state import UpState
from midstream.api.settings import load_settings
from midstream.api.traces import TraceRow
from midstream.api.traces.send import prompt_of, request_body
from midstream.control.adapters.clock import SystemClock
from midstream.control.adapters.redis_log import RedisLog
from midstream.control.adapters.sql_store import ArchiveStore
from midstream.control.events import Entry, Event
from midstream.control.ids import parse_position
from midstream.control.publisher import Publisher
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.reference import reference_output
from midstream.migration.protocol.messages import RequestSpec, Sampling

DEADLINE_S = 60.0
POLL_S = 0.05
SEED = 31
MODEL = "sim"
CLUSTER = "midstream"
FAST = 0.15
"""Factor on step times: a decode step of about 4.5 ms."""

T = TypeVar("T")


async def until(condition: Callable[[], T | Awaitable[T]], deadline_s: float = DEADLINE_S) -> T:
    """Wait until it is truthy, and return it."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    while True:
        found = condition()
        value = await found if isinstance(found, Awaitable) else found
        if value:
            return value
        assert loop.time() < deadline, "it did not happen"
        await asyncio.sleep(POLL_S)


class Done(NamedTuple):
    """A command line that has ended."""

    code: int
    out: str
    err: str

    def assert_one_line(self, code: int, *told: str) -> None:
        """It failed as it should: with this exit code, one line on stderr that says so much, nothing on stdout."""
        assert self.code == code, self
        assert self.err.count("\n") == 1, self
        assert self.err.startswith("midstream: "), self
        assert all(text in self.err for text in told), self
        assert self.out == "", self


async def cli(*arguments: str, **environment: str) -> Done:
    """Run `midstream` as a process of its own, with variables set."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "midstream.api.cli", *arguments,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | environment,  # noqa: TID251 - a child's
    )  # fmt: skip
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return Done(process.returncode, out.decode(), err.decode())


class Client:
    """One streamed completion, read to its end by a task of its own."""

    def __init__(self, http: httpx.AsyncClient, index: int, tokens: int, prompt_tokens: int) -> None:
        self.index = index
        self.tokens = tokens
        self.prompt_tokens = prompt_tokens
        self.request = ""
        self.ids: list[int] = []
        self.times: list[float] = []
        """When each chunk came, by the event loop's clock, seconds."""
        self.finish: str | None = None
        self.usage: dict[str, int] = {}
        self.error: str | None = None
        self._http = http
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        row = TraceRow(arrival_s=0.0, prompt_tokens=self.prompt_tokens, output_tokens=self.tokens)
        body = request_body(MODEL, self.index, row, SEED) | {"stream_options": {"include_usage": True}}
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                await self._take(response)
        except httpx.HTTPError as error:
            self.error = f"{type(error).__name__}: {error}"

    async def _take(self, response: httpx.Response) -> None:
        self.request = response.headers.get("x-request-id", "")
        if response.status_code != 200:
            self.error = (await response.aread()).decode()
            return
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                self._chunk(json.loads(line.removeprefix("data: ")))
        self.error = self.error or "the stream ended without [DONE]"

    def _chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = str(chunk["error"])
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            self.finish = choice["finish_reason"] or self.finish
            if fresh := choice.get("token_ids"):
                self.ids += fresh
                self.times.append(asyncio.get_running_loop().time())

    @property
    def is_over(self) -> bool:
        """Nothing more will come."""
        return self._reading.done()

    async def has(self, tokens: int) -> None:
        """Wait until so many tokens came, or the end."""
        await until(lambda: len(self.ids) >= tokens or self.is_over)

    async def end(self) -> None:
        """Wait for the end."""
        async with asyncio.timeout(DEADLINE_S):
            await self._reading

    async def leave(self) -> None:
        """Go away, whether it is over or not."""
        self._reading.cancel()
        await asyncio.wait({self._reading})

    def assert_undisturbed(self) -> None:
        """It got exactly what it would have got if nothing had ever happened (P02, P03, P04, P06)."""
        assert self.error is None
        assert self.finish == "length"
        assert tuple(self.ids) == self.expected()
        assert self.usage["completion_tokens"] == self.tokens
        assert self.usage["prompt_tokens"] == self.prompt_tokens

    def expected(self) -> tuple[int, ...]:
        """The tokens of the undisturbed run."""
        sampling = Sampling(max_tokens=self.tokens, temperature=1.0, seed=SEED + self.index, ignore_eos=True)
        prompt = tuple(prompt_of(self.index, self.prompt_tokens, SEED))
        spec = RequestSpec(request="", prompt=prompt, sampling=sampling)
        return reference_output(spec, SimConfig(model=MODEL))[0]


class Rig:
    """A running cluster and everything a test does with it."""

    def __init__(self, cluster: LocalCluster, http: httpx.AsyncClient, said: list[str]) -> None:
        self.cluster = cluster
        self.admin = AdminClient(self.state.admin, self.state.admin_key)
        self.said = said
        """What the supervisor told its user."""
        self._http = http
        self._clients: list[Client] = []

    @property
    def state(self) -> UpState:
        return self.cluster.state

    @property
    def data_dir(self) -> Path:
        return Path(self.state.database_url.removeprefix("sqlite:///")).parent

    # --- clients -----------------------------------------------------------------------------

    def stream(self, tokens: int, prompt_tokens: int = 40) -> Client:
        """A new client; no two ask for the same."""
        client = Client(self._http, len(self._clients), tokens, prompt_tokens)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.leave()
        self.admin.close()

    # --- the operator ------------------------------------------------------------------------

    async def get(self, path: str, **params: object) -> dict[str, Any]:
        """GET from the admin API."""
        return await asyncio.to_thread(lambda: self.admin.get(path, **params))

    async def items(self, path: str, **params: object) -> list[dict[str, Any]]:
        """A whole list of the admin API."""
        return await asyncio.to_thread(lambda: list(self.admin.items(path, **params)))

    async def order(self, path: str, **body: object) -> dict[str, Any]:
        """POST to the admin API and wait for what becomes of the operation. Raises `AdminProblem`."""

        def submit() -> dict[str, Any]:
            return self.admin.finished(self.admin.post(path, body)["operation"], DEADLINE_S)

        return await asyncio.to_thread(submit)

    async def move(self, client: Client, target: str) -> dict[str, Any]:
        """Order one move and wait for its outcome."""
        return await self.order("/migrations", request=client.request, target=target)

    async def owner(self, client: Client) -> str:
        """The instance that owns a client's request, as the log has it."""
        return str((await self.get(f"/requests/{client.request}"))["owner"]["instance"])

    async def all_up(self) -> None:
        """Wait until every instance may be dispatched to."""

        async def are_up() -> bool:
            found = await self.items("/instances")
            return len(found) == len(self.llumlets) and all(one["health"] == "up" for one in found)

        await until(are_up)

    async def say(self, *events: Event) -> None:
        """Put facts into the log as another program would."""
        log = RedisLog(self.state.redis_url, cluster=CLUSTER, opened_by="test")
        recorder = Publisher(log, "test", SystemClock().now_ms(), SystemClock())
        try:
            for event in events:
                recorder.record(event)
            assert await recorder.flush(DEADLINE_S)
        finally:
            await log.close()

    async def cli(self, *arguments: str) -> Done:
        """Run `midstream` against this cluster."""
        return await cli("--data-dir", str(self.data_dir), *arguments)

    # --- processes ---------------------------------------------------------------------------

    @property
    def llumlets(self) -> list[str]:
        return [process.name for process in self.state.processes if process.kind == "llumlet"]

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one process."""
        pid = self.state.process(name).pid
        assert pid is not None
        os.kill(pid, number)

    async def kill(self, *names: str) -> None:
        """`kill -9`, and wait until each is back."""
        before = {name: self._returns(name) for name in names}
        for name in names:
            self.signal(name, signal.SIGKILL)
        for name in names:
            await until(lambda name=name: self._returns(name) > before[name])

    def _returns(self, name: str) -> int:
        return sum(line.startswith(f"{name} is back") for line in self.said)

    # --- what the archive says ---------------------------------------------------------------

    @contextlib.contextmanager
    def archive(self) -> Any:
        """The archive, opened beside its owner."""
        store = ArchiveStore(self.state.database_url)
        try:
            yield store
        finally:
            store.close()

    async def facts(self) -> list[Entry]:
        """The whole history up to now, once the archiver has all of it; no hole is in it (P19)."""
        wanted = parse_position(str((await self.get("/state"))["position"]))
        with self.archive() as store:
            await until(lambda: store.position() >= wanted)
            await until(lambda: store.holes() == [])
            return list(store.iterate())

    async def idle(self) -> None:
        """Wait until no instance holds anything (P07)."""
        await until(self._is_idle)

    async def _is_idle(self) -> bool:
        found = await self.items("/instances")
        loads = [(one["load"], one["blocks_total"]) for one in found if one["health"] == "up"]
        return all(
            load["blocks_free"] == total and not (load["blocks_reserved"] or load["running"] or load["waiting"])
            for load, total in loads
        )


@contextlib.asynccontextmanager
async def running(folder: Path, sizes: tuple[int, ...], *, controllers: int = 1, **changes: Any) -> AsyncIterator[Rig]:
    """A cluster of instances with so many KV blocks, gone afterwards. `changes` are settings."""
    defaults = {"sim_time_scale": FAST, "tick_ms": 100, "move_policies": "drain"}
    settings = load_settings(data_dir=folder / "data", gateway_port=0, admin_port=0, **(defaults | changes))
    said: list[str] = []
    async with local_cluster(settings, ClusterPlan(sizes=sizes, controllers=controllers), said.append) as cluster:
        limits = httpx.Limits(max_connections=256)
        timeout = httpx.Timeout(DEADLINE_S)
        gateway = cluster.state.gateway
        async with httpx.AsyncClient(base_url=gateway, limits=limits, timeout=timeout, trust_env=False) as http:
            rig = Rig(cluster, http, said)
            try:
                await rig.all_up()
                yield rig
            finally:
                await rig.close()
