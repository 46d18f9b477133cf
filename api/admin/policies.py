"""Putting policies in force: checked against the registry, guarded by ETags, recorded as a fact."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import msgspec

from midstream.api.admin.deps import AdminDeps
from midstream.api.admin.judge import require_json
from midstream.api.admin.models import PolicySettingsBody
from midstream.api.auth import Caller
from midstream.api.problems import Problem
from midstream.control import policies
from midstream.control.codec import digest
from midstream.control.errors import BadInput
from midstream.control.events import PolicyConfigured
from midstream.control.state import PolicySettings

SEEN_S: Final = 2.0
"""How long an answer waits for its own fact to come back with the log."""


class Policies:
    """Writes policies. One change at a time: the next must know the one before."""

    def __init__(self, deps: AdminDeps) -> None:
        self._deps = deps
        self._pending: PolicySettings | None = None

    async def configure(self, body: PolicySettingsBody, caller: Caller, if_match: str | None) -> PolicySettings:
        """Record new settings and wait until the fold shows them. Raises `Problem` 409, 412 or 422."""
        settings = read_settings(body)
        if self._pending is not None and self._deps.follower.state.policies != self._pending:
            raise Problem(409, "change_pending", "another change is not in force yet; look again")
        if if_match not in (None, "*", etag_of(self._deps.follower.state.policies)):
            raise Problem(412, "etag_mismatch", "the policies have changed since; look again")
        self._pending = settings
        try:
            self._deps.recorder.record(PolicyConfigured(policies=settings, actor=caller.name))
            await self._seen(settings)
        finally:
            self._pending = None
        return settings

    async def _seen(self, settings: PolicySettings) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SEEN_S):
                while self._deps.follower.state.policies != settings:
                    await self._deps.follower.changed()


def read_settings(body: PolicySettingsBody) -> PolicySettings:
    """Settings that the registry knows. Raises `Problem` 422."""
    require_json(body.model_dump())
    settings = msgspec.convert(body.model_dump(), PolicySettings)
    try:
        policies.check(settings)
    except BadInput as error:
        raise Problem(422, "bad_policy", str(error)) from error
    if settings.suspect_after_ms >= settings.lost_after_ms:
        raise Problem(422, "bad_policy", "suspect_after_ms must be less than lost_after_ms")
    return settings


def etag_of(settings: PolicySettings) -> str:
    """A strong ETag: equal settings have equal ones."""
    return f'"{digest(msgspec.json.encode(settings))}"'
