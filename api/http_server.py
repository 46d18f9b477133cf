"""Serves an ASGI app inside a running event loop: binds first, installs no signal handlers, stops cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from midstream.api.closing import closing_of
from midstream.control.errors import BadInput

CONNECTIONS_MAX: Final = 4_096
HEAD_BYTES_MAX: Final = 32 * 1024
BACKLOG: Final = 512
KEEP_ALIVE_S: Final = 30
READ_S: Final = 20.0
"""A client has so long to send a whole request, head and body (uvicorn itself waits for ever)."""
GRACE_S: Final = 5
"""Responses that have not ended by themselves so long after `stop` are cut."""
START_S: Final = 10.0


class Served:
    """A listening HTTP server; `host` and `port` are what was bound."""

    def __init__(self, app: Starlette, server: uvicorn.Server, bound: socket.socket) -> None:
        self._app = app
        self._server = server
        self.host: str = bound.getsockname()[0]
        self.port: int = bound.getsockname()[1]
        self._task = asyncio.get_running_loop().create_task(server.serve(sockets=[bound]), name=f"http:{self.port}")

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{self.port}"

    async def started(self) -> None:
        """Wait until connections are accepted."""
        async with asyncio.timeout(START_S):
            while not self._server.started:
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.001)

    async def wait(self) -> None:
        """Return when the server has ended."""
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Take no more connections, let streams end with an error event, then close. May be called twice."""
        closing_of(self._app).begin()
        self._server.should_exit = True
        await self.wait()


async def serve(app: Starlette, host: str, port: int) -> Served:
    """Bind `host:port` (0: any free port) and serve. Raises `BadInput` if the address cannot be bound."""
    bound = bind(host, port)
    config = uvicorn.Config(
        app,
        http=_PatientProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS_MAX,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    served = Served(app, _Server(config), bound)
    await served.started()
    return served


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises `BadInput` with one clear line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, because asyncio sets TCP_NODELAY only then: else each small event waits 40 ms for an ACK.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setblocking(False)
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        bound.close()
        raise BadInput(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}") from error
    return bound


class _Server(uvicorn.Server):
    """Signals belong to the process's own main, not to one of its servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _PatientProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with a deadline for the arrival of each request and a bound on its head."""

    _deadline: asyncio.TimerHandle | None = None
    _is_in_request = False
    _is_in_head = True
    _head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._arm()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data) if self._is_in_head else 0
        super().data_received(data)
        if self._is_in_head and self._head_bytes > HEAD_BYTES_MAX:
            self.send_400_response("Head too large.")
        if not self._is_in_request:
            self._disarm()
        elif self._deadline is None:
            self._arm()

    def on_message_begin(self) -> None:
        self._is_in_request = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The parser answers 400 to what is raised here."""
        self._is_in_head, self._head_bytes = False, 0
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES_MAX:
            raise ValueError("head too large")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_request, self._is_in_head = False, True
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(READ_S, self._give_up)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        self.transport.close()
