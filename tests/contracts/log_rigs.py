"""One rig per adapter of the log: how to open clients on one server, and how that server loses its memory."""

from __future__ import annotations

import shutil
from importlib import resources
from typing import Any, Final, Protocol

import fakeredis
import redis

from midstream.control.adapters.local_valkey import LocalValkey
from midstream.control.adapters.memory_log import MemoryLog, MemoryLogStore
from midstream.control.adapters.redis_log import LIBRARY_VERSION, RedisLog
from midstream.control.errors import LogUnavailable
from midstream.control.ports import FactLog
from tests.crash import crash, until_written

APPEND_ONLY: Final = "appendonlydir"
"""Where Valkey keeps all it knows. What a client was told is in there, if not yet on the disk."""


class Rig(Protocol):
    def client(self, name: str) -> FactLog: ...

    async def restart(self) -> None:
        """The server dies and comes back with all its data."""

    def flush(self) -> None:
        """The server forgets everything and runs on."""

    def save(self) -> None:
        """Remember what the server holds now."""

    async def rewind(self) -> None:
        """The server dies and comes back with what it held at `save` and nothing since."""

    async def close(self) -> None: ...


class MemoryRig:
    def __init__(self) -> None:
        self.store = MemoryLogStore()
        self._saved = 0

    def client(self, name: str) -> FactLog:
        return MemoryLog(self.store, opened_by=name)

    async def restart(self) -> None:
        self.store.restart()

    def flush(self) -> None:
        self.store.flush()

    def save(self) -> None:
        self._saved = len(self.store.entries)

    async def rewind(self) -> None:
        self.store.restart(lose=len(self.store.entries) - self._saved)

    async def close(self) -> None:
        return


FUNCTIONS_AS_SCRIPT = """
local real, library = redis, {}
local redis = {
  register_function = function(name, callback)
    if type(name) == 'table' then name, callback = name.function_name, name.callback end
    library[name] = callback
  end,
  call = function(command, ...)
    if command == 'INFO' then return 'run_id:RUN_ID' end
    return real.call(command, ...)
  end,
}
LIBRARY
local name = table.remove(ARGV, 1)
return library[name](KEYS, ARGV)
"""


class FakeRedisLog(RedisLog):
    """The real adapter with the real Lua, sent by EVAL: fakeredis knows neither FUNCTION nor INFO."""

    def __init__(self, rig: FakeRedisRig, name: str) -> None:
        super().__init__("redis://fake", cluster="contract", opened_by=name)
        self._client = self._reader = fakeredis.FakeAsyncRedis(server=rig.server, protocol=2)
        self._rig = rig

    async def _function(self, name: str, keys: Any, *args: Any) -> list[str]:
        words = ("EVAL", self._rig.script(), len(keys), *keys, f"midstream_{name}_{LIBRARY_VERSION}", *args)
        reply = await self._client.execute_command(*words)
        return [word.decode() for word in reply] if isinstance(reply, list) else [str(reply)]


async def _until_connected(log: FactLog) -> None:
    """A first call finds out that the pooled connections are dead."""
    for _ in range(10):
        try:
            await log.load_snapshot()
            return
        except LogUnavailable:
            continue
    raise AssertionError("the server is not back")


class FakeRedisRig:
    def __init__(self) -> None:
        self.server = fakeredis.FakeServer()
        self._run = 1
        self._logs: list[RedisLog] = []
        self._saved: dict[bytes, bytes] = {}

    def script(self) -> str:
        lua = resources.files("midstream.control.adapters").joinpath("log.lua").read_text()
        library = lua.partition("\n")[2]
        return FUNCTIONS_AS_SCRIPT.replace("RUN_ID", f"run{self._run}").replace("LIBRARY", library)

    def client(self, name: str) -> FactLog:
        self._logs.append(FakeRedisLog(self, name))
        return self._logs[-1]

    async def restart(self) -> None:
        self._run += 1

    def flush(self) -> None:
        fakeredis.FakeRedis(server=self.server).flushall()

    def save(self) -> None:
        client = fakeredis.FakeRedis(server=self.server)
        self._saved = {key: client.dump(key) for key in client.scan_iter()}

    async def rewind(self) -> None:
        self.flush()
        client = fakeredis.FakeRedis(server=self.server)
        for key, value in self._saved.items():
            client.restore(key, 0, value)
        self._run += 1

    async def close(self) -> None:
        for log in self._logs:
            await log.close()


class ValkeyRig:
    def __init__(self, server: LocalValkey, cluster: str) -> None:
        self._server = server
        self._cluster = cluster
        self._saved = server.directory / "saved"
        self._logs: list[RedisLog] = []

    def client(self, name: str) -> FactLog:
        self._logs.append(RedisLog(self._server.url, cluster=self._cluster, opened_by=name))
        return self._logs[-1]

    async def restart(self) -> None:
        crash(self._server)
        await self._start()

    async def _start(self) -> None:
        self._server.start()
        for log in self._logs:
            await _until_connected(log)

    def flush(self) -> None:
        with redis.Redis.from_url(self._server.url) as client:
            client.flushall()

    def save(self) -> None:
        until_written(self._server)
        shutil.rmtree(self._saved, ignore_errors=True)
        shutil.copytree(self._server.directory / APPEND_ONLY, self._saved)

    async def rewind(self) -> None:
        self._server.kill()
        shutil.rmtree(self._server.directory / APPEND_ONLY)
        shutil.copytree(self._saved, self._server.directory / APPEND_ONLY)
        await self._start()

    async def close(self) -> None:
        for log in self._logs:
            await log.close()
