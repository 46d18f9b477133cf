"""`up.json`: what a running `midstream up` publishes for other commands, and the lock that makes it the only one."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from midstream.api.health import is_alive
from midstream.control.errors import BadInput, MidstreamError

STATE_FILE = "up.json"
LOCK_FILE = "up.lock"
PRIVATE = 0o600


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the cluster. `restarts` counts how often it was started again."""

    name: str
    kind: str
    pid: int | None
    address: str | None = None
    restarts: int = 0


class UpState(msgspec.Struct, frozen=True, kw_only=True):
    """A running cluster: where to find what. The file is private, as it holds a key."""

    pid: int
    gateway: str
    """Base URL of the OpenAI endpoint, without `/v1`."""
    admin: str
    admin_key: str
    redis_url: str
    database_url: str
    processes: tuple[ProcessState, ...]

    def process(self, name: str) -> ProcessState:
        """One process by its name. Raises `BadInput`."""
        for process in self.processes:
            if process.name == name:
                return process
        raise BadInput(f"no process {name}; there are {', '.join(p.name for p in self.processes)}")


def read_state(data_dir: Path) -> UpState | None:
    """What the `up` of this folder published; None if none runs there."""
    state = last_state(data_dir)
    return state if state is not None and is_alive(state.pid) else None


def last_state(data_dir: Path) -> UpState | None:
    """The same, also if that `up` is gone without having cleaned up."""
    try:
        return msgspec.json.decode((data_dir / STATE_FILE).read_bytes(), type=UpState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise MidstreamError(f"{data_dir / STATE_FILE} cannot be read: {error}") from None


def write_state(data_dir: Path, state: UpState) -> None:
    """Publish, atomically and privately."""
    text = msgspec.json.format(msgspec.json.encode(state), indent=2)
    write_private(data_dir / STATE_FILE, text)


def remove_state(data_dir: Path) -> None:
    """Nothing runs here any more."""
    (data_dir / STATE_FILE).unlink(missing_ok=True)


def write_private(path: Path, content: bytes) -> None:
    """Replace a file by one that only its owner can read."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
        file.write(content)
    fresh.replace(path)


def lock(data_dir: Path) -> int:
    """Become the only `up` of a folder; the lock goes with the process. Raises `MidstreamError` if there is one."""
    descriptor = os.open(data_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        state = read_state(data_dir)
        who = f" (pid {state.pid}, gateway {state.gateway})" if state else ""
        raise MidstreamError(
            f"a cluster already runs in {data_dir}{who}; end it, or use another folder with --data-dir"
        ) from None
    return descriptor
