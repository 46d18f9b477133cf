"""The `shm` transfer: one copy, out of memory that both processes have mapped. For processes of one host and user.

The source lends its memory for reading; the target, which alone knows which blocks a handle opens, does the copy.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from midstream.migration.transfers.base import Channel, Where
from midstream.migration.transfers.endpoint import BACKLOG, Endpoint
from midstream.migration.transfers.rpc_receiver import Reservation
from midstream.migration.transfers.rpc_socket import PeerGone, Stream
from midstream.migration.transfers.shm_channel import ShmChannel
from midstream.migration.transfers.shm_copier import Copier
from midstream.migration.transfers.shm_mappings import Mappings
from midstream.migration.transfers.shm_memory import Region, Regions, place
from midstream.migration.transfers.shm_receiver import ShmReceiver
from midstream.migration.transfers.slots import Slots

SCHEME = "shm:"
THREADS = 2
"""One core's copy does not fill a memory bus. All moves into an instance share them, frame by frame, in order."""
NAME_BYTES = 16
PLACE_BYTES = 6
PEER = struct.Struct("3i")
"""Linux' `struct ucred`: process, user, group."""


class ShmTransfer(Endpoint):
    """One process's shm endpoint. Blocks inside `regions` are copied once, others through staging.

    It listens on an abstract Unix socket: there is no file to be left behind. Both ends check that the other is of
    the same user, and then what every endpoint checks.
    """

    name = "shm"

    def __init__(self, where: Where, regions: Sequence[Region] = ()) -> None:
        super().__init__(where)
        self._regions = Regions(regions)
        self.staging = Slots(Region)
        self.copier = Copier(self._regions, where.stall_s / 2)
        self.mappings = Mappings(self.copier)
        self._place = hashlib.blake2b(place().encode(), digest_size=PLACE_BYTES).hexdigest()
        self._executor = _threads()

    @property
    def offer(self) -> str:
        """The name and the host: peers elsewhere have another."""
        return f"{self.name}@{self._place}"

    async def start(self) -> str:
        """Listen, and start the copier. Raises `BadInput`."""
        address = await super().start()
        self.copier.start()
        return address

    async def stop(self) -> None:
        """Close all channels, all connections, the listener, threads and copier; unmap peers' memory."""
        await super().stop()
        self.mappings.clear()
        await self.copier.stop()
        self._executor.shutdown(wait=False)
        self._executor = _threads()

    def _listen(self) -> tuple[socket.socket, str]:
        name = f"midstream-{secrets.token_hex(NAME_BYTES)}"
        listener = _unix_socket()
        listener.bind(f"\0{name}")
        listener.listen(BACKLOG)
        return listener, f"{SCHEME}{name}"

    async def _connect(self, address: str) -> Stream:
        scheme, name = address[: len(SCHEME)], address[len(SCHEME) :]
        if scheme != SCHEME or not name:
            raise ValueError(f"an address looks like {SCHEME}midstream-1a2b, not {address!r}")
        sock = _unix_socket()
        try:
            sock.connect(f"\0{name}")
            if not _is_ours(sock):
                raise PeerGone("it is of another user")
            return Stream(sock, self.where.stall_s)
        except BaseException:
            sock.close()
            raise

    async def _channel(self, stream: Stream, handle: bytes, left: Callable[[Channel], None]) -> Channel:
        return await ShmChannel(stream, self.budget, self._regions, self.staging, self._executor, left).introduce()

    async def _receive(self, stream: Stream, handle: bytes, reservation: Reservation) -> None:
        await ShmReceiver(stream, reservation, self.mappings, self.copier, self._executor).serve()

    def _is_welcome(self, sock: socket.socket) -> bool:
        return _is_ours(sock)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="midstream shm")


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def _is_ours(sock: socket.socket) -> bool:
    _, user, _ = PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    return bool(user == os.getuid())
