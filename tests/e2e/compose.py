"""Reads docker-compose.yml and says how each service would run as a process of this machine.

Commands, environments and health checks stay as they are written. Replaced is only what containers add: names of hosts
by 127.0.0.1, declared ports by free ones, mounts by folders. What is read is checked: a key this module does not know
is refused, so that nothing in the file is silently not tested.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = "127.0.0.1"
ANYWHERE = "0.0.0.0"
_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?:(:[?-])([^}]*))?\})")
_PORT_OPTION = re.compile(r"(?<=-p )\d+|(?<=--port )\d+|(?<=--port=)\d+")
_DURATION = re.compile(r"(?:(\d+)m)?(?:(\d+)s)?")

# Keys that only a container engine can carry out. `depends_on` is ignored on purpose: services start in any order.
CARRIED_OUT_BY_DOCKER = frozenset(
    {
        *("build", "cap_drop", "depends_on", "init", "logging", "pids_limit", "read_only", "restart", "security_opt"),
        *("shm_size", "user"),
    }
)
READ = frozenset(
    {
        *("command", "environment", "expose", "healthcheck", "image", "networks", "ports", "stop_grace_period"),
        *("stop_signal", "tmpfs", "volumes"),
    }
)


@dataclass(frozen=True)
class Health:
    """A health check: what to run, and for how long it may run."""

    argv: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True)
class Service:
    """One service as the file has it, with variables filled in. `raw` is everything that was written."""

    name: str
    image: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    health: Health
    ports: tuple[int, ...]
    mounts: tuple[str, ...]
    names: tuple[str, ...]
    stop_signal: str
    stop_grace_s: float
    raw: Mapping[str, Any]


@dataclass(frozen=True)
class Places:
    """Where a service's things are on this machine."""

    port_of: Callable[[str, int], int]
    """(service, port in its container) → port here."""
    folder_of: Callable[[str, str], Path]
    """(service, mount in its container) → folder here."""


@dataclass(frozen=True)
class Runnable:
    """A service that can be started here."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    health: Health


def load(path: Path, variables: Mapping[str, str]) -> dict[str, Service]:
    """All services of a file. Raises `KeyError` for a variable that must be set, `ValueError` for what is not read."""
    document = _filled(yaml.safe_load(path.read_text()), variables)
    return {name: _service(name, raw) for name, raw in document["services"].items()}


def translate(service: Service, services: Mapping[str, Service], places: Places) -> Runnable:
    """How to run one of `services` here."""
    hosts = {name: other.name for other in services.values() for name in other.names}
    fitted = _Fitted(service, hosts, places)
    arguments = [fitted.text(text) for text in service.argv]
    argv = [fitted.port(now) if before in {"-p", "--port"} else now for before, now in _with_previous(arguments)]
    environment = {name: fitted.variable(name, value) for name, value in service.environment.items()}
    check = [fitted.text(text) for text in service.health.argv]
    return Runnable(tuple(argv), environment, Health(tuple(check), service.health.timeout_s))


class _Fitted:
    """Replaces what containers add, in one service's texts."""

    def __init__(self, service: Service, hosts: Mapping[str, str], places: Places) -> None:
        self._service = service
        self._hosts = hosts
        self._places = places
        known = "|".join(re.escape(name) for name in sorted(hosts, key=len, reverse=True))
        self._address = re.compile(rf"(?<![\w.-])({known}):(\d+)\b")

    def text(self, text: str) -> str:
        """Mounts, addresses of other services, own ports after `-p`, and the interface to listen on."""
        for mount in self._service.mounts:
            if text == mount or text.startswith(f"{mount}/"):
                return f"{self._places.folder_of(self._service.name, mount)}{text.removeprefix(mount)}"
        if text == ANYWHERE:
            return HERE
        text = self._address.sub(lambda found: f"{HERE}:{self._there(found[1], int(found[2]))}", text)
        return _PORT_OPTION.sub(lambda found: self.port(found[0]), text)

    def variable(self, name: str, value: str) -> str:
        """A value of the environment; its name says whether it is a host or a port."""
        if name.endswith("_HOST") and value in self._hosts:
            return HERE
        return self.port(value) if name.endswith("PORT") else self.text(value)

    def port(self, text: str) -> str:
        """One of the service's own ports."""
        return str(self._there(self._service.name, int(text)))

    def _there(self, host: str, port: int) -> int:
        return self._places.port_of(self._hosts[host], port)


def _service(name: str, raw: Mapping[str, Any]) -> Service:
    unread = set(raw) - READ - CARRIED_OUT_BY_DOCKER
    if unread:
        raise ValueError(f"{name}: {', '.join(sorted(unread))} would not be tested")
    networks = raw["networks"]
    options = networks.values() if isinstance(networks, dict) else ()
    return Service(
        name=name,
        image=raw["image"],
        argv=_words(raw["command"]),
        environment=_environment(raw.get("environment", {})),
        health=_health(raw["healthcheck"]),
        ports=tuple(int(str(port).rpartition(":")[2]) for port in (*raw.get("expose", ()), *raw.get("ports", ()))),
        mounts=tuple(_mount(text) for text in (*raw.get("volumes", ()), *raw.get("tmpfs", ()))),
        names=(name, *(alias for network in options for alias in network.get("aliases", ()))),
        stop_signal=raw.get("stop_signal", "SIGTERM"),
        stop_grace_s=_seconds(raw["stop_grace_period"]),
        raw=raw,
    )


def _filled(value: Any, variables: Mapping[str, str]) -> Any:
    """The file with `${X:?why}`, `${X:-default}`, `${X}` and `$$` filled in, as Compose does it."""
    if isinstance(value, dict):
        return {name: _filled(inner, variables) for name, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, variables) for inner in value]
    return _VARIABLE.sub(lambda found: _fill(found, variables), value) if isinstance(value, str) else value


def _fill(found: re.Match[str], variables: Mapping[str, str]) -> str:
    dollar, name, how, rest = found.groups()
    if dollar:
        return "$"
    value = variables.get(name, "")
    if how == ":?" and not value:
        raise KeyError(f"{name}: {rest}")
    return value or (rest if how == ":-" else "")


def _words(command: str | list[str]) -> tuple[str, ...]:
    return tuple(shlex.split(command) if isinstance(command, str) else command)


def _environment(raw: Mapping[str, Any] | list[str]) -> dict[str, str]:
    pairs = raw.items() if isinstance(raw, dict) else (line.split("=", 1) for line in raw)
    return {name: str(value) for name, value in pairs}


def _health(raw: Mapping[str, Any]) -> Health:
    how, *words = raw["test"]
    argv = {"CMD": tuple(words), "CMD-SHELL": ("/bin/sh", "-c", *words)}[how]
    return Health(argv, _seconds(raw["timeout"]))


def _mount(text: str) -> str:
    """`volume:/path` or, of a tmpfs, `/path:options`."""
    parts = text.split(":")
    return parts[0] if parts[0].startswith("/") else parts[1]


def _seconds(text: str) -> float:
    found = _DURATION.fullmatch(text)
    if not text or found is None:
        raise ValueError(f"not a duration: {text!r}")
    return 60.0 * int(found[1] or 0) + int(found[2] or 0)


def _with_previous(words: list[str]) -> list[tuple[str, str]]:
    return list(zip(["", *words], words, strict=False))
