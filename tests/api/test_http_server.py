"""The HTTP server beneath all faces."""

from __future__ import annotations

import asyncio
import socket

from starlette.applications import Starlette

from midstream.api.http_server import serve


async def test_small_events_are_sent_at_once() -> None:
    """Without TCP_NODELAY each event of a stream waits for the client's acknowledgement, 40 ms on Linux."""
    served = await serve(Starlette(), "127.0.0.1", 0)
    try:
        _, writer = await asyncio.open_connection(served.host, served.port)
        async with asyncio.timeout(10):
            while not served._server.server_state.connections:
                await asyncio.sleep(0.01)
        (connection,) = served._server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
    finally:
        await served.stop()
