"""Scalers that leave it to the operator's own orchestrator: a command that is run, a URL that is called."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

import httpx

from midstream.control.errors import ScalerFailed

OUTPUT_CHARS_MAX: Final = 500
REQUEST_S: Final = 30.0


class CommandScaler:
    """Runs `COMMAND… add|remove INSTANCE SCALING`, without a shell; exit code 0 means done or begun."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = tuple(command)
        self._environment = dict(environment)

    async def add(self, instance: str, scaling: str) -> None:
        """See `Scaler`."""
        await self._run("add", instance, scaling)

    async def remove(self, instance: str, scaling: str) -> None:
        """See `Scaler`."""
        await self._run("remove", instance, scaling)

    async def _run(self, *words: str) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, *words, env=self._environment, stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
        except OSError as error:
            raise ScalerFailed(f"{self._command[0]}: {error.strerror}") from None
        try:
            said, _ = await process.communicate()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        if process.returncode:
            last = said.decode(errors="replace").strip()[-OUTPUT_CHARS_MAX:]
            raise ScalerFailed(f"{self._command[0]} ended with exit code {process.returncode}: {last}")


class WebhookScaler:
    """POSTs `{"action", "instance", "scaling"}` as JSON, with the decision as `Idempotency-Key`; 2xx means taken on."""

    def __init__(self, url: str, token: str | None = None) -> None:
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
