"""The target's side of an rpc transfer: let in who knows secret and handle, and store blocks while the handle holds."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
from collections.abc import Callable, Iterable

from midstream.migration.transfers import rpc_format as wire
from midstream.migration.transfers.base import Bytes, Sink
from midstream.migration.transfers.rpc_socket import PeerClosed, Stream


class Refusal(Exception):
    """The peer gets this code, and the connection ends."""

    def __init__(self, code: int) -> None:
        super().__init__(wire.reason(code))
        self.code = code


class Reservation:
    """Memory that the holder of a handle may write, and the connections that do."""

    __slots__ = ("is_open", "sink", "tasks")

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.is_open = True
        self.tasks: set[asyncio.Task[None]] = set()


Find = Callable[[bytes], Reservation | None]


async def admit(stream: Stream, secret: bytes, find: Find) -> tuple[bytes, Reservation]:
    """Shake hands; return the handle and what it opens. Raises `Refusal` after having told a member why.

    A peer that does not know the secret learns nothing: neither whether a handle exists, nor our proof.
    """
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    await stream.write([memoryview(wire.GREETING.pack(wire.MAGIC, wire.VERSION, nonce))])
    magic, version, theirs, handle, proof = wire.CLAIM.unpack(await stream.read(wire.CLAIM.size))
    if (magic, version) != (wire.MAGIC, wire.VERSION):
        raise Refusal(wire.BAD_FRAME)
    nonces = nonce + theirs
    if not hmac.compare_digest(proof, wire.proof(secret, b"client", nonces, handle)):
        stream.write_now(wire.VERDICT.pack(wire.BAD_PROOF, bytes(wire.PROOF_BYTES)))
        raise Refusal(wire.BAD_PROOF)
    reservation = find(handle)
    code = wire.STORED if reservation is not None else wire.UNKNOWN_HANDLE
    await stream.write([memoryview(wire.VERDICT.pack(code, wire.proof(secret, b"server", nonces, handle)))])
    if reservation is None:
        raise Refusal(wire.UNKNOWN_HANDLE)
    return handle, reservation


async def receive(stream: Stream, handle: bytes, reservation: Reservation) -> None:
    """Store frame after frame until the peer closes between two batches.

    Raises `PeerGone` when it closes or stalls elsewhere, and `Refusal`, after telling it, when it must be refused.
    """
    stored = 0
    try:
        while True:
            header = wire.unpack_header(await stream.read(wire.HEADER.size, is_idle=True))
            if not reservation.is_open or not hmac.compare_digest(header.handle, handle):
                raise Refusal(wire.UNKNOWN_HANDLE)
            if header.op == wire.OP_BLOCKS:
                await _store(stream, header, reservation)
                stored += header.blocks
                continue
            if header.blocks != stored:
                raise Refusal(wire.BAD_FRAME)
            await stream.write([memoryview(wire.REPLY.pack(wire.STORED, stored))])
            stored = 0
    except PeerClosed:
        if stored:
            raise
    except wire.BadFrame:
        stream.write_now(wire.REPLY.pack(wire.BAD_FRAME, 0))
        raise Refusal(wire.BAD_FRAME) from None
    except Refusal as refusal:
        stream.write_now(wire.REPLY.pack(refusal.code, 0))
        raise
    except asyncio.CancelledError:
        stream.write_now(wire.REPLY.pack(wire.UNKNOWN_HANDLE, 0))
        raise


async def _store(stream: Stream, header: wire.Header, reservation: Reservation) -> None:
    table = await stream.read(4 * header.blocks)
    indexes = struct.unpack(f"<{header.blocks}I", table)
    views = places(reservation, indexes, header.length)
    try:
        if not await stream.read_into(views, may_write=lambda: reservation.is_open):
            raise Refusal(wire.UNKNOWN_HANDLE)
        if header.flags & wire.FLAG_CHECKSUM:
            theirs = await stream.read(wire.CHECKSUM.size)
            if theirs != await wire.checksum(table, views):
                raise Refusal(wire.BAD_CHECKSUM)
    finally:
        views.clear()  # a traceback that outlives us must not hold on to the engine's memory


def places(reservation: Reservation, indexes: Iterable[int], length: int) -> list[Bytes]:
    """The reserved memory of blocks that have so many bytes each at their source. Raises `Refusal`."""
    if not reservation.is_open:
        raise Refusal(wire.UNKNOWN_HANDLE)
    sink = reservation.sink
    try:
        views = [sink(index).cast("B") for index in indexes]
    except IndexError:
        raise Refusal(wire.BAD_FRAME) from None
    if set(map(len, views)) != {length}:
        raise Refusal(wire.BAD_FRAME)
    return views
