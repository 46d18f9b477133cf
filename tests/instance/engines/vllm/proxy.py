"""A hand in the way between two engines' transfers: their connections pass here and can be held, cut or altered."""

from __future__ import annotations

import asyncio
import contextlib

from midstream.migration.transfers import rpc_format as wire


class VllmLink:
    """Stands before the transfer of one engine's target. Knobs as in `engine_links.Link`."""

    name = "rpc"

    def __init__(self) -> None:
        self.channels_open = 0
        self.gate = asyncio.Event()
        self.sending = asyncio.Event()
        self._targets: dict[str, tuple[asyncio.Server, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.reset()

    def reset(self) -> None:
        """As new."""
        self.gate.set()
        self.sending.clear()
        self.flip: tuple[int, int] | None = None
        self.swaps = False
        self.is_broken = False

    async def before(self, address: str) -> str:
        """An address that leads to `address` by way of us."""
        if address not in self._targets:
            host, port = address.removeprefix("tcp://").rsplit(":", 1)

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await self._pass_on(reader, writer, *await asyncio.open_connection(host, int(port)))

            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            self._targets[address] = (server, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        return self._targets[address][1]

    async def stop(self) -> None:
        """Close everything."""
        for server, _ in self._targets.values():
            server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        self.channels_open += 1
        ways = [asyncio.ensure_future(self._out(reader, far_writer)), asyncio.ensure_future(_copy(far_reader, writer))]
        self._tasks.update(ways)
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.channels_open -= 1
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)
            self._tasks.difference_update(ways)
            writer.close()
            far_writer.close()

    async def _out(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            writer.write(await reader.readexactly(wire.CLAIM.size))
            while True:
                data = await reader.readexactly(wire.HEADER.size)
                header = wire.unpack_header(data)
                if header.op == wire.OP_BLOCKS:
                    self.sending.set()
                    await self.gate.wait()
                    if self.is_broken:
                        return
                    trailer = wire.CHECKSUM.size if header.flags & wire.FLAG_CHECKSUM else 0
                    body = await reader.readexactly(header.blocks * (4 + header.length) + trailer)
                    data += self._spoilt(header, bytearray(body))
                writer.write(data)
                await writer.drain()

    def _spoilt(self, header: wire.Header, body: bytearray) -> bytearray:
        first = 4 * header.blocks
        second = first + header.length
        if self.swaps and header.blocks > 1:
            body[first:second], body[second : second + header.length] = (
                body[second : second + header.length],
                body[first:second],
            )
        if self.flip is not None:
            for at in range(first + 3, second, 4):
                body[at] ^= (
                    0x80  # signs of floats: one bit of a mantissa might change no token, of an exponent make NaN
                )
        return body


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
