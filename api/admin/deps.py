"""What the admin API is given: the live fold, the archive, a way to say facts, and the jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Protocol

import msgspec
from fastapi import Depends
from starlette.requests import Request

from midstream.api.auth import Caller, Scoped
from midstream.api.keys import Key
from midstream.control.ports import Archive, Clock, Recorder
from midstream.control.state import State

BODY_BYTES_MAX: Final = 64 * 1024
STREAMS_MAX: Final = 64
"""Live event streams at once."""
PAGE_MAX: Final = 1_000
PAGE_DEFAULT: Final = 100


class Follower(Protocol):
    """A live fold of the log."""

    @property
    def state(self) -> State: ...

    async def changed(self) -> None:
        """Return when an entry has been folded after the call."""
        ...


class Job(Protocol):
    """A slow job as it stands: `status` is `accepted running succeeded failed`, `progress` 0 to 1."""

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def params(self) -> dict[str, Any]: ...
    @property
    def status(self) -> str: ...
    @property
    def progress(self) -> float: ...
    @property
    def result(self) -> dict[str, Any] | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def created_at_ms(self) -> int: ...


class Jobs(Protocol):
    """Slow, offline work. Both raise `ArchiveUnavailable` or `LogUnavailable` when it cannot be asked for now."""

    async def enqueue_replay(self, operation: str, overrides: Mapping[str, Any], actor: str) -> Job:
        """Verify the archive's decisions under `overrides`, as operation `operation`; a known id changes nothing."""
        ...

    async def operation(self, id: str) -> Job:
        """Raises `UnknownThing`."""
        ...


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and keys of one admin API."""

    host: str = "127.0.0.1"
    keys: tuple[Key, ...] = ()
    body_bytes_max: int = BODY_BYTES_MAX
    streams_max: int = STREAMS_MAX
    heartbeat_s: float = 15.0
    """A silent event stream says so with a comment this often."""


class AdminDeps(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the admin API needs from outside."""

    follower: Follower
    archive: Archive
    recorder: Recorder
    jobs: Jobs
    clock: Clock
    settings: AdminSettings = AdminSettings()


async def _deps(request: Request) -> AdminDeps:
    deps: AdminDeps = request.app.state.deps
    return deps


Deps = Annotated[AdminDeps, Depends(_deps)]
Reader = Annotated[Caller, Depends(Scoped("read"))]
Mover = Annotated[Caller, Depends(Scoped("migrate"))]
Replayer = Annotated[Caller, Depends(Scoped("replay"))]
Admin = Annotated[Caller, Depends(Scoped("admin"))]
