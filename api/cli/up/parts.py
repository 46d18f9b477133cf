"""The parts of a local cluster: processes that can be started, waited for and stopped, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from midstream.api.process import STOP_LIMIT_S
from midstream.control.adapters.local_valkey import LocalValkey
from midstream.control.errors import MidstreamError

READY_S = 30.0
STOP_S = STOP_LIMIT_S + 1.0
"""A process that has not ended so long after SIGTERM, when it should have given up by itself, is killed."""
POLL_S = 0.05
LINE_BYTES_MAX = 64 * 1024
TAIL_BYTES = 4096


class Part(Protocol):
    """One process of the cluster. After `wait` returned it can be started again."""

    name: str
    kind: str

    @property
    def pid(self) -> int | None: ...

    @property
    def address(self) -> str | None: ...

    async def start(self) -> None:
        """Start it and return when it serves. Raises `MidstreamError`, one line, with nothing left behind."""
        ...

    async def wait(self) -> str:
        """Return, saying how, when it has ended by itself."""
        ...

    async def stop(self) -> None:
        """End it in good order, or hard after `STOP_S`."""
        ...

    def kill(self) -> None:
        """End it now, with all that it started."""
        ...


class ServiceProcess:
    """`midstream KIND` in a process group of its own, its log in a file. It must say on stdout when it is ready."""

    def __init__(
        self,
        kind: str,
        name: str,
        arguments: Callable[[str | None], list[str]],
        env: Mapping[str, str],
        log: Path,
        ready_s: float = READY_S,
    ) -> None:
        self.kind = kind
        self.name = name
        self._arguments = arguments
        self._env = dict(env)
        self._log = log
        self._ready_s = ready_s
        self._process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None
        self._address: str | None = None

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process and self._process.returncode is None else None

    @property
    def address(self) -> str | None:
        """What it said that it listens on; a later start is asked to take the same."""
        return self._address

    async def start(self) -> None:
        """See `Part`."""
        with self._log.open("ab") as log:
            log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "midstream.api.cli", self.kind, "--supervised", *self._arguments(self._address),
                env=self._env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log,
                start_new_session=True, limit=LINE_BYTES_MAX,
            )  # fmt: skip
        try:
            async with asyncio.timeout(self._ready_s):
                self._address = await self._ready(self._process)
        except TimeoutError:
            await self._end()
            raise MidstreamError(f"{self.name} was not ready within {self._ready_s:g} s; see {self._log}") from None
        except MidstreamError as error:
            await self._end()
            raise MidstreamError(f"{self.name} did not start: {self._last_words(log_start) or error}") from None
        except asyncio.CancelledError:
            self.kill()
            raise
        self._drain = asyncio.create_task(self._read_on(self._process))

    async def wait(self) -> str:
        """See `Part`."""
        assert self._process is not None
        code = await self._process.wait()
        await self._end()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def stop(self) -> None:
        """See `Part`."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
        await self._end()

    def kill(self) -> None:
        """See `Part`."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _end(self) -> None:
        """Leave nothing of the process group behind."""
        self.kill()
        if self._process is not None:
            await self._process.wait()
        if self._drain is not None:
            await self._drain
            self._drain = None

    async def _ready(self, process: asyncio.subprocess.Process) -> str | None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            said = _decoded(line)
            if said.get("ready") is True:
                address = said.get("address")
                return None if address is None else str(address)
        raise MidstreamError(f"it ended with exit code {await process.wait()}")

    async def _read_on(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while await process.stdout.read(LINE_BYTES_MAX):
            pass

    def _last_words(self, log_start: int) -> str:
        """The last line it logged in this start."""
        with self._log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(log_start, end - TAIL_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("midstream: ") if lines else ""


class ValkeyProcess:
    """A Valkey of our own: same data, same port, whenever it is started again."""

    kind = "valkey"
    name = "valkey"

    def __init__(self, directory: Path) -> None:
        self._valkey = LocalValkey(directory)

    @property
    def pid(self) -> int | None:
        """Of the running server."""
        return self._valkey.pid

    @property
    def address(self) -> str | None:
        """Its URL."""
        return self._valkey.url

    async def start(self) -> None:
        """See `Part`."""
        starting = asyncio.ensure_future(asyncio.to_thread(self._valkey.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait({starting})
            raise

    async def wait(self) -> str:
        """See `Part`."""
        while self._valkey.is_running:
            await asyncio.sleep(POLL_S)
        self._valkey.kill()
        return "its process is gone"

    async def stop(self) -> None:
        """See `Part`."""
        await asyncio.to_thread(self._valkey.stop)

    def kill(self) -> None:
        """See `Part`."""
        self._valkey.kill()


def _decoded(line: bytes) -> dict[str, object]:
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
