"""Runs the services of a compose file as processes of this machine, each in a process group of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.e2e.compose import HERE, Places, Runnable, Service, translate
from tests.e2e.images import postgres_user, prepare_postgres, programs

POLL_S = 0.2
SERVERS = ("redis", "postgres")
PGDATA = "18/docker"
"""Where the image keeps its data, below the mount."""


class Stack:
    """Services are started one by one, in whatever order; `close` leaves nothing behind."""

    def __init__(self, services: Mapping[str, Service]) -> None:
        self.services = services
        # Not below pytest's own folder, which PostgreSQL's user may not enter.
        self._root = Path(tempfile.mkdtemp(prefix="midstream-stack-"))
        self._root.chmod(0o755)
        self._path = programs(self._root / "bin")
        self._ports = {(name, port): _free_port() for name, service in services.items() for port in service.ports}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def port(self, service: str, port: int) -> int:
        """The port here that stands for a container's."""
        return self._ports[service, port]

    def folder(self, service: str, mount: str) -> Path:
        """The folder here that stands for a container's mount."""
        found = self._root / service / mount.strip("/").replace("/", "-")
        found.mkdir(parents=True, exist_ok=True)
        return found

    def url(self, service: str, port: int) -> str:
        """Base URL of a published port."""
        return f"http://{HERE}:{self.port(service, port)}"

    def runnable(self, name: str) -> Runnable:
        """A service as it runs here."""
        return translate(self.services[name], self.services, Places(self.port, self.folder))

    def start(self, name: str) -> None:
        """Start one service's command."""
        run, user = self.runnable(name), None
        environment = self._environment(run, name)
        if name == "postgres":
            user = postgres_user()
            environment["PGDATA"] = str(self.folder(name, "/var/lib/postgresql") / PGDATA)
            prepare_postgres(Path(environment["PGDATA"]), self.folder(name, "/run/postgresql"), run.environment)
        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                run.argv, env=environment, cwd=self._root / name, user=user,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def is_healthy(self, name: str) -> bool:
        """Its own health check passes."""
        run = self.runnable(name)
        try:
            done = subprocess.run(
                run.health.argv, env=self._environment(run, name), cwd=self._root / name,
                capture_output=True, check=False, timeout=run.health.timeout_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def wait_healthy(self, names: Iterable[str], deadline_s: float) -> None:
        """Until all are; none may end meanwhile, except one that is done."""
        left, deadline = list(names), time.monotonic() + deadline_s
        while left:
            assert time.monotonic() < deadline, f"not healthy: {left}\n{self.said(left[0])}"
            for name in left:
                assert self._processes[name].poll() in {None, 0}, f"{name} ended:\n{self.said(name)}"
            left = [name for name in left if not self.is_healthy(name)]
            time.sleep(POLL_S)

    def wait_said(self, name: str, text: str, deadline_s: float) -> None:
        """Until a service has logged `text`."""
        deadline = time.monotonic() + deadline_s
        while text not in self.said(name):
            assert time.monotonic() < deadline, f"{name} never said {text!r}:\n{self.said(name)}"
            time.sleep(POLL_S)

    def said(self, name: str) -> str:
        """Everything a service wrote."""
        return self._log(name).read_text()

    def pid(self, name: str) -> int:
        """The process of a service, and its process group."""
        return self._processes[name].pid

    def exit_code(self, name: str) -> int | None:
        """How it ended, if it did."""
        return self._processes[name].poll()

    def stop(self) -> dict[str, float]:
        """End all as `docker compose stop` does, the servers last; return how long each took, seconds."""
        others = [name for name in self._processes if name not in SERVERS]
        return self._stop(others) | self._stop([name for name in SERVERS if name in self._processes])

    def leftover(self) -> list[str]:
        """Services of which a process is still there."""
        return [name for name, process in self._processes.items() if _is_group_alive(process.pid)]

    def close(self) -> None:
        """End everything hard and remove all files."""
        for process in self._processes.values():
            if _is_group_alive(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self._root)

    def _stop(self, names: list[str]) -> dict[str, float]:
        started = time.monotonic()
        for name in names:
            if self._processes[name].poll() is None:
                self._processes[name].send_signal(signal.Signals[self.services[name].stop_signal])
        took = {}
        for name in names:
            self._processes[name].wait(started + self.services[name].stop_grace_s - time.monotonic())
            took[name] = time.monotonic() - started
        return took

    def _environment(self, run: Runnable, name: str) -> dict[str, str]:
        return {"PATH": self._path, "HOME": str(self._root / name), "LANG": "C.UTF-8", **run.environment}

    def _log(self, name: str) -> Path:
        (self._root / name).mkdir(exist_ok=True)
        return self._root / name / "log"


def _is_group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])
