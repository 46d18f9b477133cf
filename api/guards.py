"""What every request passes before it reaches a route: a sane Host header and a bounded body."""

from __future__ import annotations

import re
from collections.abc import Callable

from fastapi import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from midstream.api.problems import Problem

Refuse = Callable[[Problem], Response]

_HOST = re.compile(rb"[A-Za-z0-9._-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?")


class HostGuard:
    """ASGI middleware: refuses a malformed Host header, and names other than `hosts` if given (DNS rebinding)."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...] | None, refuse: Refuse) -> None:
        self._app = app
        self._hosts = hosts
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_good(scope):
            problem = Problem(400, "bad_host", "the Host header is malformed or names another server")
            await self._refuse(problem)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_good(self, scope: Scope) -> bool:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
            return False
        return self._hosts is None or re.sub(r":\d+$", "", hosts[0].decode().lower()) in self._hosts


class BodyGuard:
    """ASGI middleware: refuses a body of more than `bytes_max` bytes, announced or not, before it is held in memory."""

    def __init__(self, app: ASGIApp, bytes_max: int, refuse: Refuse) -> None:
        self._app = app
        self._bytes_max = bytes_max
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._announced(scope) > self._bytes_max:
            problem = Problem(413, "body_too_large", self._detail, {"Connection": "close"})
            await self._refuse(problem)(scope, receive, send)
        else:
            await self._app(scope, self._counted(receive), send)

    @property
    def _detail(self) -> str:
        return f"a body may have {self._bytes_max} bytes at most"

    def _announced(self, scope: Scope) -> int:
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        return int(lengths[0]) if lengths else 0

    def _counted(self, receive: Receive) -> Receive:
        received = 0

        async def counting() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._bytes_max:
                raise HTTPException(413, self._detail, {"Connection": "close"})
            return message

        return counting
