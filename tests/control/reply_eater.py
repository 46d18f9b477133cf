"""A TCP proxy that forwards every request but can keep a reply to itself: the effect happened, nobody was told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

CHUNK = 65_536


class ReplyEater:
    """Stands between a client and a server. `eat_next(marker)` closes the connection instead of passing on the
    reply to the next request that contains `marker`; `is_mute` passes on nothing at all; `delay_s` delays replies.
    """

    def __init__(self, port: int) -> None:
        self._upstream_port = port
        self._markers: list[bytes] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.eaten = 0
        self.is_mute = False
        self.delay_s = 0.0
        self.port = 0

    def eat_next(self, marker: bytes) -> None:
        self._markers.append(marker)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        eating = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(reader, up_writer, eating))
                group.create_task(self._replies(up_reader, writer, eating))
        except* (ConnectionError, EOFError):
            pass
        finally:
            self._tasks.discard(task)
            up_writer.close()
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader, up: asyncio.StreamWriter, eating: asyncio.Event) -> None:
        while data := await reader.read(CHUNK):
            if self._markers and self._markers[0] in data:
                self._markers.pop(0)
                eating.set()
            up.write(data)
            await up.drain()
        raise EOFError

    async def _replies(self, up: asyncio.StreamReader, writer: asyncio.StreamWriter, eating: asyncio.Event) -> None:
        while data := await up.read(CHUNK):
            if eating.is_set():
                self.eaten += 1
                raise EOFError
            if self.is_mute:
                continue
            await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()
        raise EOFError

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def eating_replies_of(port: int) -> AsyncIterator[ReplyEater]:
    proxy = ReplyEater(port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.stop()
        await server.wait_closed()
