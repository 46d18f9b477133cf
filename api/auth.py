"""Who may do what on the HTTP faces: bearer keys kept as SHA-256, and scopes."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Annotated, Final

import msgspec
from fastapi import Depends
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import Request
from starlette.routing import BaseRoute

from midstream.api.keys import CLASS_DEFAULT, CLASSES, PRIORITY_MIN, SCOPES, Key, hash_key
from midstream.api.problems import Problem
from midstream.api.settings import is_loopback
from midstream.control.errors import BadInput

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")

_bearer = HTTPBearer(auto_error=False, description="`Authorization: Bearer <key>`")


class Caller(msgspec.Struct, frozen=True):
    """Who sent a request."""

    name: str
    scopes: frozenset[str]

    def may(self, scope: str) -> bool:
        """Whether a scope is held; `admin` holds all."""
        return scope in self.scopes or "admin" in self.scopes

    @property
    def priority_min(self) -> int:
        """The best priority that the caller may ask for; `admin` without a class may ask for any."""
        otherwise = PRIORITY_MIN if self.may("admin") else CLASSES[CLASS_DEFAULT]
        return max((CLASSES[scope] for scope in self.scopes if scope in CLASSES), default=otherwise)

    def priority(self, asked: int | None) -> int:
        """The priority of a request: what it asked for, else normal or the best that its key has. Raises `Problem`."""
        if asked is None:
            return max(0, self.priority_min)
        if asked < self.priority_min:
            detail = f"key {self.name!r} may ask for priority {self.priority_min} and above only"
            raise Problem(403, "class_not_allowed", detail)
        return asked


caller_now: ContextVar[Caller | None] = ContextVar("caller_now", default=None)
"""Who sent the request that is being answered, for code that an application in between cannot tell."""

ANONYMOUS: Final = Caller("anonymous", frozenset(SCOPES))


class Keyring:
    """The keys of one face.

    Without any key everybody may do everything, the high class included, but only on loopback, where all callers are
    one tenant: raises `BadInput` for no keys elsewhere.
    """

    def __init__(self, keys: Sequence[Key], *, host: str) -> None:
        if not keys and not is_loopback(host):
            raise BadInput(f"listening on {host} needs API keys: anonymous access is for loopback only")
        self._keys = tuple(keys)

    @property
    def is_open(self) -> bool:
        """Whether callers need no key."""
        return not self._keys

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Host names a request may be for; `None` for all. An open face answers only to loopback names."""
        return LOOPBACK_NAMES if self.is_open else None

    def identify(self, token: str | None) -> Caller:
        """The caller behind a bearer token. Raises `Problem` 401. Takes the same time for every wrong token."""
        if self.is_open:
            return ANONYMOUS
        if token is None:
            raise _unauthorized("key_required", "this route needs a bearer key")
        digest = hash_key(token)
        found = [key for key in self._keys if secrets.compare_digest(key.sha256, digest)]
        if not found:
            raise _unauthorized("key_unknown", "the bearer key is not known")
        return Caller(found[0].name, frozenset(found[0].scopes))

    def authorize(self, token: str | None, scope: str) -> Caller:
        """The caller, if it holds `scope`. Raises `Problem` 401 or 403."""
        caller = self.identify(token)
        if not caller.may(scope):
            raise Problem(403, "scope_missing", f"key {caller.name!r} lacks the scope {scope!r}")
        return caller


class Scoped:
    """A route dependency that lets only holders of `scope` in and gives the caller."""

    def __init__(self, scope: str) -> None:
        if scope not in SCOPES:
            raise ValueError(f"unknown scope {scope}")
        self.scope = scope

    async def __call__(
        self, request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
    ) -> Caller:
        keyring: Keyring = request.app.state.keyring
        return keyring.authorize(credentials.credentials if credentials else None, self.scope)


def check_guarded(routes: Iterable[BaseRoute], open_paths: frozenset[str] = frozenset()) -> None:
    """Default deny: raises `TypeError` if a route other than those named asks for no scope."""
    for route in routes:
        is_guarded = isinstance(route, APIRoute) and _scopes(route.dependant)
        if not is_guarded and getattr(route, "path", "") not in open_paths:
            raise TypeError(f"route {route} asks for no scope")


def _unauthorized(code: str, detail: str) -> Problem:
    return Problem(401, code, detail, {"WWW-Authenticate": "Bearer"})


def _scopes(dependant: Dependant) -> list[str]:
    own = [dependant.call.scope] if isinstance(dependant.call, Scoped) else []
    return own + [scope for inner in dependant.dependencies for scope in _scopes(inner)]
