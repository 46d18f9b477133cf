"""The HTTP server beneath all faces."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

import pytest
from starlette.applications import Starlette

from midstream.api.http_server import HEAD_BYTES_MAX, serve

GET = b"GET / HTTP/1.1\r\nhost: here\r\n"
ENDLESS = [b"x-long: "] + [b"y" * 1_000] * (2 * HEAD_BYTES_MAX // 1_000)


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


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    served = await serve(Starlette(), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(served.host, served.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await served.stop()


@pytest.mark.parametrize(
    ("parts", "answers"),
    [
        ([GET, *ENDLESS], 0),
        ([b"".join([GET, *ENDLESS, b"\r\n\r\n"])], 0),
        ([GET + b"\r\n", GET, *ENDLESS], 1),
    ],
    ids=["never whole", "at once", "of a second request"],
)
async def test_P28_a_head_is_bounded(parts: Sequence[bytes], answers: int) -> None:
    """The client may hear a 400, or of a reset: it was still sending."""
    said = b""
    async with connected() as (reader, writer), asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            while more := await reader.read(1_000):
                said += more
    assert said.count(b"HTTP/1.1 404") <= answers
    assert b"HTTP/1.1 2" not in said


async def test_P13_every_request_of_a_connection_must_arrive_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as (reader, writer), asyncio.timeout(10):
        writer.write(GET + b"\r\n")
        await reader.readuntil(b"\r\n\r\nNot Found")
        monkeypatch.setattr("midstream.api.http_server.READ_S", 0.1)
        writer.write(GET)
        assert await reader.read() == b""
