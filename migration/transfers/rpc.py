"""The `rpc` transfer: TCP straight from block memory into block memory, between any two hosts."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import structlog

from midstream.control.errors import BadInput, TransferFailed
from midstream.migration.transfers import rpc_format as wire
from midstream.migration.transfers.base import Sink
from midstream.migration.transfers.rpc_channel import RpcChannel, open_channel
from midstream.migration.transfers.rpc_receiver import Refusal, Reservation, admit, receive
from midstream.migration.transfers.rpc_socket import Stream, listen

CONNECT_S = 1.0
"""Connecting and the handshake, on either side."""
STALL_S = 1.0
"""A copy without progress for so long has failed. A link must carry what kernels buffer, about 4 MB, in that time."""
CONNECTIONS_MAX = 256
"""Incoming connections; more are closed at once."""
BACKLOG = 128
ACCEPT_RETRY_S = 0.1
ANY_HOST = ("0.0.0.0", "::", "")

logger = structlog.get_logger(__name__)


class RpcTransfer:
    """One process's rpc endpoint, both directions.

    Both ends of a connection prove that they hold `secret`; the handle is checked in the handshake, with every
    frame, and before every single write into reserved memory. `counters` has incoming connections: `admitted`,
    `refused`, `refused_too_many`, `broken`.
    """

    name = "rpc"

    def __init__(
        self,
        bind_host: str,
        port: int = 0,
        *,
        secret: bytes,
        advertise_host: str | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        if not secret:
            raise BadInput("a transfer needs a shared secret")
        if bind_host in ANY_HOST and not advertise_host:
            raise BadInput(f"bound to {bind_host!r}, a transfer needs an advertised host that peers can reach")
        self.counters: Counter[str] = Counter()
        self._bind = (bind_host, port)
        self._advertise_host = advertise_host or bind_host
        self._secret = secret
        self._stall_s = stall_s
        self._listener: socket.socket | None = None
        self._reservations: dict[bytes, Reservation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._channels: set[RpcChannel] = set()

    async def start(self) -> str:
        """Listen; return `tcp://host:port` as bound. Raises `BadInput` when the address cannot be bound."""
        host, port = self._bind
        try:
            self._listener = listen(host, port, BACKLOG)
        except OSError as error:
            raise BadInput(f"cannot listen on {host}:{port}: {error}") from None
        self._spawn(self._accept(self._listener))
        shown = f"[{self._advertise_host}]" if ":" in self._advertise_host else self._advertise_host
        return f"tcp://{shown}:{self._listener.getsockname()[1]}"

    def expect(self, handle: str, sink: Sink) -> None:
        """Let the holder of `handle` write through `sink` from now on."""
        self._reservations[wire.wire_handle(handle)] = Reservation(sink)

    async def forget(self, handle: str) -> None:
        """Refuse the handle from now on; returns when no connection holds its memory any more."""
        reservation = self._reservations.pop(wire.wire_handle(handle), None)
        if reservation is not None:
            reservation.is_open = False
            await _end(reservation.tasks)

    async def open(self, address: str, handle: str) -> RpcChannel:
        """Connect and prove ourselves. Raises `TransferFailed` within `CONNECT_S` for a no, or no answer."""
        try:
            async with asyncio.timeout(CONNECT_S):
                channel = await open_channel(address, wire.wire_handle(handle), self._secret, self._stall_s)
        except TimeoutError:
            raise TransferFailed(f"no answer from {address} within {CONNECT_S} s") from None
        except (OSError, ValueError) as error:
            raise TransferFailed(f"cannot open {address}: {error}") from error
        self._channels.add(channel)
        channel.on_close = self._channels.discard
        return channel

    async def stop(self) -> None:
        """Close all channels, all connections and the listener."""
        for channel in list(self._channels):
            await channel.close()
        for reservation in self._reservations.values():
            reservation.is_open = False
        self._reservations.clear()
        await _end(self._tasks)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                logger.error("cannot accept a transfer connection", error=repr(error))
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            if len(self._tasks) > CONNECTIONS_MAX:
                self.counters["refused_too_many"] += 1
                sock.close()
            else:
                self._spawn(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        """One incoming connection, to its end. Nothing that a peer does gets further than this."""
        stream = Stream(sock, self._stall_s)
        try:
            async with asyncio.timeout(CONNECT_S):
                handle, reservation = await admit(stream, self._secret, self._reservations.get)
            self.counters["admitted"] += 1
            await self._receive(stream, handle, reservation)
        except Refusal as refusal:
            self.counters["refused"] += 1
            logger.warning("transfer refused", reason=str(refusal))
        except OSError as error:  # closed by the peer, a timeout, a reset
            self.counters["broken"] += 1
            logger.debug("transfer connection ended", reason=str(error))
        except Exception as error:  # noqa: BLE001 - one connection's failure must not pass in silence
            self.counters["broken"] += 1
            logger.error("transfer connection failed", error=repr(error), exc_info=error)
        finally:
            stream.close()

    async def _receive(self, stream: Stream, handle: bytes, reservation: Reservation) -> None:
        task = asyncio.current_task()
        assert task is not None
        reservation.tasks.add(task)
        try:
            await receive(stream, handle, reservation)
        finally:
            reservation.tasks.discard(task)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
