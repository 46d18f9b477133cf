"""One rig per adapter of the log: how to open clients on one server, and how that server loses its memory."""

from __future__ import annotations

from importlib import resources
from typing import Any, Protocol

import fakeredis
import redis

from midstream.control.adapters.local_valkey import LocalValkey
from midstream.control.adapters.memory_log import MemoryLog, MemoryLogStore
from midstream.control.adapters.redis_log import RedisLog
from midstream.control.errors import LogUnavailable
from midstream.control.ports import FactLog


class Rig(Protocol):
    def client(self, name: str) -> FactLog: ...

    async def restart(self) -> None:
        """The server dies and comes back with all its data."""

    def flush(self) -> None:
        """The server forgets everything and runs on."""

    async def close(self) -> None: ...


class MemoryRig:
    def __init__(self) -> None:
        self.store = MemoryLogStore()

    def client(self, name: str) -> FactLog:
        return MemoryLog(self.store, opened_by=name)

    async def restart(self) -> None:
        self.store.restart()

    def flush(self) -> None:
        self.store.flush()

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
        words = ("EVAL", self._rig.script(), len(keys), *keys, f"midstream_{name}_1", *args)
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

    async def close(self) -> None:
        for log in self._logs:
            await log.close()


class ValkeyRig:
    def __init__(self, server: LocalValkey, cluster: str) -> None:
        self._server = server
        self._cluster = cluster
        self._logs: list[RedisLog] = []

    def client(self, name: str) -> FactLog:
        self._logs.append(RedisLog(self._server.url, cluster=self._cluster, opened_by=name))
        return self._logs[-1]

    async def restart(self) -> None:
        self._server.kill()
        self._server.start()
        for log in self._logs:
            await _until_connected(log)

    def flush(self) -> None:
        with redis.Redis.from_url(self._server.url) as client:
            client.flushall()

    async def close(self) -> None:
        for log in self._logs:
            await log.close()
