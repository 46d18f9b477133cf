"""What all transfers between processes share: a listener, a mutual handshake, and who may write where.

A backend says how to listen and connect, and what passes over a connection once both ends have proven themselves.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from midstream.control.errors import BadInput, CannotConnect, TransferFailed
from midstream.migration.transfers import rpc_format as wire
from midstream.migration.transfers.base import Channel, Sink, Where
from midstream.migration.transfers.budget import Budget
from midstream.migration.transfers.rpc_receiver import Refusal, Reservation, admit
from midstream.migration.transfers.rpc_socket import Stream, connect, listen
from midstream.migration.transfers.shm_memory import Region

CONNECT_S = 1.0
"""Connecting and the handshake, on either side."""
CONNECTIONS_MAX = 256
"""Incoming connections; more are closed at once."""
BACKLOG = 128
ACCEPT_RETRY_S = 0.1
ANY_HOST = ("0.0.0.0", "::", "")

logger = structlog.get_logger(__name__)


class Endpoint(ABC):
    """One process's end of one backend, both directions.

    Both ends of a connection prove that they hold `secret`; the handle is checked in the handshake and before every
    write into reserved memory. `counters` counts connections: `admitted`, `refused`, `refused_too_many`, `broken`.
    """

    name: str
    connect_s = CONNECT_S
    is_on_device = False
    """Whether blocks are `DeviceRange`s of `where.kv_device`, at both ends."""

    def __init__(self, where: Where, regions: Sequence[Region] = ()) -> None:
        """`regions`: memory of ours that a backend may let peers map."""
        if not where.secret:
            raise BadInput("a transfer needs a shared secret")
        self.counters: Counter[str] = Counter()
        self.where = where
        self.budget = Budget(where.bytes_per_s)
        """Of what leaves; endpoints of one instance share one."""
        self._listener: socket.socket | None = None
        self._reservations: dict[bytes, Reservation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._channels: set[Channel] = set()

    @property
    def offer(self) -> str:
        """See `Transfer.offer`."""
        return self.name

    @abstractmethod
    def _listen(self) -> tuple[socket.socket, str]:
        """A listening socket and the address peers use. Raises `BadInput`."""

    @abstractmethod
    async def _connect(self, address: str) -> Stream:
        """Raises `ValueError` for what is no address, `OSError` when nobody answers."""

    @abstractmethod
    async def _channel(self, stream: Stream, handle: bytes, left: Callable[[Channel], None]) -> Channel:
        """The source's end of an admitted connection; it calls `left` once it is closed."""

    @abstractmethod
    async def _receive(self, stream: Stream, handle: bytes, reservation: Reservation) -> None:
        """The target's end of an admitted connection, until the peer closes it. Raises `Refusal`, `OSError`."""

    def _is_welcome(self, sock: socket.socket) -> bool:
        """Whether the kernel says of a peer what we want to hear."""
        return True

    async def start(self) -> str:
        """Listen; return the address as bound. Raises `BadInput` when it cannot be bound."""
        self._listener, address = self._listen()
        self._spawn(self._accept(self._listener))
        return address

    def expect(self, handle: str, sink: Sink) -> None:
        """Let the holder of `handle` write through `sink` from now on."""
        self._reservations[wire.wire_handle(handle)] = Reservation(sink)

    async def forget(self, handle: str) -> None:
        """Refuse the handle from now on; returns when no connection holds its memory any more."""
        reservation = self._reservations.pop(wire.wire_handle(handle), None)
        if reservation is not None:
            reservation.is_open = False
            await _end(reservation.tasks)

    async def open(self, address: str, handle: str) -> Channel:
        """Connect and prove ourselves. Raises `TransferFailed` for a no, `CannotConnect` within `connect_s`."""
        try:
            async with asyncio.timeout(self.connect_s):
                channel = await self._introduced(address, wire.wire_handle(handle))
        except TimeoutError:
            raise CannotConnect(f"no answer from {address} within {self.connect_s} s") from None
        except (OSError, ValueError) as error:
            raise CannotConnect(f"cannot open {address}: {error}") from error
        self._channels.add(channel)
        return channel

    async def _introduced(self, address: str, handle: bytes) -> Channel:
        stream = await self._connect(address)
        try:
            await introduce(stream, handle, self.where.secret)
            return await self._channel(stream, handle, self._channels.discard)
        except BaseException:
            stream.abort()
            raise

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
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        if len(self._tasks) > CONNECTIONS_MAX:
            self.counters["refused_too_many"] += 1
            sock.close()
        elif not self._is_welcome(sock):
            self.counters["refused"] += 1
            sock.close()
        else:
            self._spawn(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        """One incoming connection, to its end. Nothing that a peer does gets further than this."""
        stream = Stream(sock, self.where.stall_s)
        try:
            async with asyncio.timeout(self.connect_s):
                handle, reservation = await admit(stream, self.where.secret, self._reservations.get)
            self.counters["admitted"] += 1
            await self._held(stream, handle, reservation)
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

    async def _held(self, stream: Stream, handle: bytes, reservation: Reservation) -> None:
        task = asyncio.current_task()
        assert task is not None
        reservation.tasks.add(task)
        try:
            await self._receive(stream, handle, reservation)
        finally:
            reservation.tasks.discard(task)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def introduce(stream: Stream, handle: bytes, secret: bytes) -> None:
    """The client's half of the handshake. Raises `TransferFailed` for a no, `BadFrame`, `OSError`."""
    magic, version, server_nonce = wire.GREETING.unpack(await stream.read(wire.GREETING.size))
    if (magic, version) != (wire.MAGIC, wire.VERSION):
        raise wire.BadFrame("whoever answers speaks another protocol or version")
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    nonces = server_nonce + nonce
    mine = wire.proof(secret, b"client", nonces, handle)
    await stream.write([memoryview(wire.CLAIM.pack(wire.MAGIC, wire.VERSION, nonce, handle, mine))])
    code, theirs = wire.VERDICT.unpack(await stream.read(wire.VERDICT.size))
    if not hmac.compare_digest(theirs, wire.proof(secret, b"server", nonces, handle)):
        raise TransferFailed(f"refused: {wire.REASONS[wire.BAD_PROOF]}")
    if code != wire.STORED:
        raise TransferFailed(f"refused: {wire.reason(code)}")


class TcpEndpoint(Endpoint):
    """An endpoint on a TCP port."""

    def __init__(self, where: Where, regions: Sequence[Region] = ()) -> None:
        if where.bind_host in ANY_HOST and not where.advertise_host:
            raise BadInput(f"bound to {where.bind_host!r}, a transfer needs an advertised host that peers can reach")
        super().__init__(where)

    def _listen(self) -> tuple[socket.socket, str]:
        """Bound and shown as `tcp://host:port`. Raises `BadInput`."""
        host, port = self.where.bind_host, self.where.port
        try:
            listener = listen(host, port, BACKLOG)
        except OSError as error:
            raise BadInput(f"cannot listen on {host}:{port}: {error}") from None
        reached = self.where.advertise_host or host
        shown = f"[{reached}]" if ":" in reached else reached
        return listener, f"tcp://{shown}:{listener.getsockname()[1]}"

    async def _connect(self, address: str) -> Stream:
        return await connect(address, self.where.stall_s)


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
