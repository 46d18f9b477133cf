"""Scalers that leave it to the operator's own orchestrator: a command that is run, a URL that is called."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Final

import httpx

from midstream.control.errors import BadInput, ScalerFailed

OUTPUT_BYTES_MAX: Final = 500
REQUEST_S: Final = 30.0
PORT_MAX: Final = 65_535


class CommandScaler:
    """Runs `COMMAND… add|remove INSTANCE SCALING`, without a shell; exit code 0 means done or begun.

    The variable `named_in` holds the instance's name. The command alone is waited for: what it leaves running, in its
    process group, lives on, and may go on writing to where the command wrote. Cancelled, all of the group ends.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, named_in: str) -> None:
        self._command = tuple(command)
        self._environment = dict(environment)
        self._named_in = named_in

    async def add(self, instance: str, scaling: str) -> None:
        """See `Scaler`."""
        await self._run("add", instance, scaling)

    async def remove(self, instance: str, scaling: str) -> None:
        """See `Scaler`."""
        await self._run("remove", instance, scaling)

    async def _run(self, action: str, instance: str, scaling: str) -> None:
        environment = self._environment | {self._named_in: instance}
        # A file, not a pipe: whoever inherits a pipe keeps it open, and is killed by it when nobody reads any more.
        with tempfile.TemporaryFile() as said:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command, action, instance, scaling, env=environment, start_new_session=True,
                    stdin=asyncio.subprocess.DEVNULL, stdout=said, stderr=asyncio.subprocess.STDOUT,
                )  # fmt: skip
            except OSError as error:
                raise ScalerFailed(f"{self._command[0]}: {error.strerror}") from None
            code = await _ended(process)
            if code:
                raise ScalerFailed(f"{self._command[0]} ended with exit code {code}: {_last_words(said)}")


async def _ended(process: asyncio.subprocess.Process) -> int:
    try:
        return await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise


def _last_words(said: IO[bytes]) -> str:
    end = said.seek(0, os.SEEK_END)
    said.seek(max(0, end - OUTPUT_BYTES_MAX))
    return said.read(OUTPUT_BYTES_MAX).decode(errors="replace").strip()


class WebhookScaler:
    """POSTs `{"action", "instance", "scaling"}` as JSON, with the decision as `Idempotency-Key`; 2xx means taken on.

    Raises `BadInput` for a URL that nobody can be called at.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        _check(url)
        self._url = url
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    async def add(self, instance: str, scaling: str) -> None:
        """See `Scaler`."""
        await self._post("add", instance, scaling)

    async def remove(self, instance: str, scaling: str) -> None:
        """See `Scaler`."""
        await self._post("remove", instance, scaling)

    async def _post(self, action: str, instance: str, scaling: str) -> None:
        body = {"action": action, "instance": instance, "scaling": scaling}
        try:
            async with httpx.AsyncClient(timeout=REQUEST_S) as client:
                headers = {**self._headers, "Idempotency-Key": scaling}
                answer = await client.post(self._url, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise ScalerFailed(f"{self._url}: {type(error).__name__} {error}") from None
        if not answer.is_success:
            raise ScalerFailed(f"{self._url} answered {answer.status_code}")


def _check(url: str) -> None:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise BadInput(f"no webhook can be called at {url!r}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise BadInput(f"no webhook can be called at {url!r}: it needs http or https, and a host")
    if parsed.port is not None and not 0 < parsed.port <= PORT_MAX:
        raise BadInput(f"no webhook can be called at {url!r}: there is no port {parsed.port}")
