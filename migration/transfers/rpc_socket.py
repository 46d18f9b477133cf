"""A non-blocking TCP or Unix socket that scatters into memory and gathers from it, with a deadline on every wait."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from midstream.migration.transfers.threads import settled

T = TypeVar("T")

TURN_BYTES_MAX = 1024 * 1024
"""Bytes moved before other callbacks of the event loop get their turn; about a third of a millisecond."""
THREAD_BYTES = 256 * 1024
"""From here on a thread waits in the kernel until all is there: a wake-up of the event loop costs as much as copying so
many bytes, and nobody's turn is taken."""
THREADS = 128
"""Connections of one process on which a thread may send at once, and as many on which one may receive; others wait.

One that sends waits for one that receives elsewhere, which waits for nobody: were they of one pool, two processes that
send to each other could take all threads of both, and none would be left to receive."""
PIECES_MAX = 512
"""Pieces of memory in one system call (Linux takes 1,024)."""
KEEPALIVE_IDLE_S = 1
KEEPALIVE_INTERVAL_S = 1
KEEPALIVE_PROBES = 2
USER_TIMEOUT_MS = 1000
"""Sent bytes that stay unacknowledged for so long end the connection."""


_senders = ThreadPoolExecutor(THREADS, thread_name_prefix="midstream sender")
_receivers = ThreadPoolExecutor(THREADS, thread_name_prefix="midstream receiver")


class PeerGone(ConnectionError):
    """The peer closed, died, or made no progress for too long."""


class PeerClosed(PeerGone):
    """The peer closed, and not in the middle of anything that was being read."""


class Stream:
    """One end of a connection. Every call may be cancelled at any byte; then only `abort` makes sense.

    A wait that sees no progress within `stall_s` seconds raises `PeerGone`.
    """

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        self._sock = sock
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._turn_bytes = 0
        self._job: asyncio.Future[Any] | None = None
        self._is_closing = False
        limit = struct.pack("@ll", int(stall_s), int(stall_s % 1 * 1_000_000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._waiting: _Waiting | None = None
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            _notice_dead_hosts(sock)

    async def read(self, count: int, *, is_idle: bool = False) -> bytes:
        """Exactly `count` bytes. With `is_idle` the first of them may take for ever."""
        data = bytearray(count)
        await self.read_into([memoryview(data)], is_idle=is_idle)
        return bytes(data)

    async def read_into(
        self, views: Sequence[memoryview], *, may_write: Callable[[], bool] | None = None, is_idle: bool = False
    ) -> bool:
        """Fill all views, straight from the kernel.

        `may_write` is asked before every single write to them; when it says no, the answer is False.
        """
        left, is_whole = list(views), True
        try:
            if not is_idle and sum(map(len, left)) >= THREAD_BYTES:
                return await self._in_thread(partial(self._receive_all, left, may_write), _receivers, socket.SHUT_RD)
            while left:
                if may_write is not None and not may_write():
                    return False
                count = self._receive(left)
                if count is None:
                    wait_s = None if is_idle else self._stall_s
                    await self._wait(self._loop.add_reader, self._loop.remove_reader, wait_s)
                    continue
                if count == 0:
                    raise PeerClosed("closed by the peer") if is_whole else PeerGone("closed in the middle")
                is_idle = is_whole = False
                _advance(left, count)
                await self._take_turns(count)
            return True
        finally:
            left.clear()  # a traceback that outlives us must not hold on to somebody's memory

    async def _in_thread(self, work: Callable[[], T], threads: Executor, how: int) -> T:
        """Run blocking reads or writes; a cancellation shuts the connection down (`how`) and waits until they end."""
        self._sock.setblocking(True)
        self._job = self._loop.run_in_executor(threads, work)
        try:
            return await asyncio.shield(self._job)
        except asyncio.CancelledError:
            self._shut(how)
            await settled({self._job})
            raise
        except BlockingIOError:
            raise PeerGone(f"no progress for {self._stall_s} s") from None
        finally:
            self._job = None
            if self._is_closing:
                self._sock.close()
            else:
                self._sock.setblocking(False)

    def _receive_all(self, left: list[memoryview], may_write: Callable[[], bool] | None) -> bool:
        while left:
            if may_write is not None and not may_write():
                return False
            count = self._sock.recvmsg_into(_head(left), 0, socket.MSG_WAITALL)[0]
            if count == 0:
                raise PeerGone("closed in the middle")
            _advance(left, count)
        return True

    def _send_all(self, left: list[memoryview]) -> None:
        while left:
            _advance(left, self._sock.sendmsg(_head(left)))

    def _shut(self, how: int) -> None:
        try:
            self._sock.shutdown(how)
        except OSError:
            return  # the peer was first

    def _receive(self, left: list[memoryview]) -> int | None:
        """Take what is there; 0 at the end of the stream, None if nothing is there yet."""
        try:
            return self._sock.recvmsg_into(_head(left))[0]
        except BlockingIOError:
            return None

    async def write(self, views: Sequence[memoryview]) -> None:
        """Send all views in order, straight from memory."""
        left = list(views)
        try:
            if sum(map(len, left)) >= THREAD_BYTES:
                await self._in_thread(partial(self._send_all, left), _senders, socket.SHUT_RDWR)
            while left:
                count = self._send(left)
                if count == 0:
                    await self._wait(self._loop.add_writer, self._loop.remove_writer, self._stall_s)
                    continue
                _advance(left, count)
                await self._take_turns(count)
        finally:
            left.clear()

    def _send(self, left: list[memoryview]) -> int:
        """Give the kernel what it takes; 0 if nothing."""
        try:
            return self._sock.sendmsg(_head(left))
        except BlockingIOError:
            return 0

    def read_now(self, count: int) -> bytes:
        """What has arrived already, at most `count` bytes; empty if nothing. Never waits, never raises."""
        try:
            return self._sock.recv(count, socket.MSG_DONTWAIT)
        except OSError:
            return b""

    async def read_descriptor(self) -> int:
        """The open file that the peer sends with its next byte, on a Unix socket. Raises `PeerGone` for none."""
        while True:
            try:
                _, numbers, _, _ = socket.recv_fds(self._sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await self._wait(self._loop.add_reader, self._loop.remove_reader, self._stall_s)
                continue
            if not numbers:
                raise PeerGone("closed, or sent no file")
            return numbers[0]

    async def write_descriptor(self, number: int) -> None:
        """Give the peer an open file."""
        while True:
            try:
                socket.send_fds(self._sock, [b"f"], [number])
                return
            except BlockingIOError:
                await self._wait(self._loop.add_writer, self._loop.remove_writer, self._stall_s)

    def write_now(self, data: bytes) -> None:
        """Send a few last bytes if the kernel takes them at once."""
        try:
            self._sock.send(data, socket.MSG_DONTWAIT)
        except OSError:
            return

    async def _wait(
        self, add: Callable[[int, Callable[[], None]], None], remove: Callable[[int], bool], timeout_s: float | None
    ) -> None:
        number = self._sock.fileno()
        if number < 0:
            raise PeerGone("closed")
        self._waiting = waiting = _Waiting(self._loop.create_future(), remove)
        add(number, waiting.wake)
        try:
            async with asyncio.timeout(timeout_s):
                await waiting.ready
        except TimeoutError:
            raise PeerGone(f"no progress for {timeout_s} s") from None
        finally:
            self._waiting = None
            if self._sock.fileno() == number:
                remove(number)

    async def _take_turns(self, count: int) -> None:
        self._turn_bytes += count
        if self._turn_bytes >= TURN_BYTES_MAX:
            self._turn_bytes = 0
            await asyncio.sleep(0)

    @property
    def peer_host(self) -> str:
        """The other end's address."""
        return str(self._sock.getpeername()[0])

    @property
    def is_closed(self) -> bool:
        """Whether our end was closed."""
        return self._is_closing or self._sock.fileno() < 0

    def say_goodbye(self) -> None:
        """We send no more."""
        self._shut(socket.SHUT_WR)

    async def drain(self) -> None:
        """Return when the peer has closed its end. Raises `OSError` if it does not within the stall time."""
        async with asyncio.timeout(self._stall_s):
            while await self._loop.sock_recv(self._sock, PIECES_MAX):
                pass

    def close(self) -> None:
        """Close in good order; whoever waits on the stream gets `PeerGone`."""
        if self._waiting is not None:
            self._waiting.remove(self._sock.fileno())  # before the number can be given to another socket
            self._waiting.fail(PeerGone("closed"))
        if self._job is None:
            self._sock.close()
        else:
            self._is_closing = True  # the thread must not meet another socket under the same number
            self._shut(socket.SHUT_RDWR)

    def abort(self) -> None:
        """Close at once: what the kernel has not sent yet is thrown away, and the peer is told."""
        if not self.is_closed:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()


def _notice_dead_hosts(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


class _Waiting:
    """The one wait that may be going on."""

    __slots__ = ("ready", "remove")

    def __init__(self, ready: asyncio.Future[None], remove: Callable[[int], bool]) -> None:
        self.ready = ready
        self.remove = remove

    def wake(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)


def _head(left: list[memoryview]) -> list[memoryview]:
    """The next pieces for one system call."""
    if len(left[0]) >= TURN_BYTES_MAX:
        return [left[0][:TURN_BYTES_MAX]]
    return left[:PIECES_MAX]


def _advance(left: list[memoryview], count: int) -> None:
    """Drop the first `count` bytes of the pieces."""
    done = 0
    while done < len(left) and count >= len(left[done]):
        count -= len(left[done])
        done += 1
    del left[:done]
    if count:
        left[0] = left[0][count:]


async def connect(address: str, stall_s: float) -> Stream:
    """Connect to `tcp://host:port`. Raises `ValueError` for another form, `OSError` when nobody answers."""
    host, port = parse_address(address)
    loop = asyncio.get_running_loop()
    family, *_, target = (await _resolve(loop, host, port))[0]
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        await loop.sock_connect(sock, target)
        return Stream(sock, stall_s)
    except BaseException:
        sock.close()
        raise


async def _resolve(
    loop: asyncio.AbstractEventLoop, host: str, port: int
) -> Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]]:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)


def parse_address(address: str) -> tuple[str, int]:
    """`tcp://host:port` as (host, port). Raises `ValueError`."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if scheme != "tcp" or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError(f"an address looks like tcp://10.0.0.1:4000, not {address!r}")
    return host, int(port)


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """A non-blocking listening socket. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock
