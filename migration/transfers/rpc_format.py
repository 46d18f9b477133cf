"""What travels on an rpc transfer connection: a mutual HMAC handshake, then frames of equally long blocks.

All numbers are little-endian.

    server  GREETING   magic, version, server nonce
    client  CLAIM      magic, version, client nonce, handle, HMAC(secret, "client" + nonces + handle)
    server  VERDICT    code, HMAC(secret, "server" + nonces + handle); code 0 lets the client in
    client  BLOCKS     header, `count` indexes, `count` times `length` bytes, and with `FLAG_CHECKSUM` their CRC-32
    client  END        header, `count` = blocks since the last END
    server  REPLY      code, blocks stored since the last END

The secret authenticates both ends; bytes are not encrypted, so this belongs on a network of the cluster's own.
"""

from __future__ import annotations

import asyncio
import hmac
import struct
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

MAGIC = 0x4B56_534D
"""`MSVK` on the wire."""
VERSION = 2
NONCE_BYTES = 16
PROOF_BYTES = 32
HANDLE_BYTES = 32

OP_BLOCKS = 1
OP_END = 2
FLAG_CHECKSUM = 1

FRAME_BLOCKS_MAX = 1024
"""Blocks in one frame, which one thread at each end moves in a few system calls."""
FRAME_BYTES_MAX = 16 * 1024 * 1024
"""Small blocks are grouped up to here; one larger block is a frame of its own. Between two frames both ends hand over
from event loop to thread and back, while nothing moves: as long as a megabyte takes."""
CHECKED_BYTES_MAX = 1024 * 1024
"""A checksum is made of so many bytes without giving way to others."""
BLOCK_BYTES_MAX = 1024 * 1024 * 1024

GREETING = struct.Struct(f"<IB{NONCE_BYTES}s")
CLAIM = struct.Struct(f"<IB{NONCE_BYTES}s{HANDLE_BYTES}s{PROOF_BYTES}s")
VERDICT = struct.Struct(f"<B{PROOF_BYTES}s")
HEADER = struct.Struct(f"<IBBBB{HANDLE_BYTES}sIQ")
REPLY = struct.Struct("<BI")
CHECKSUM = struct.Struct("<I")

STORED = 0
UNKNOWN_HANDLE = 1
BAD_CHECKSUM = 2
BAD_FRAME = 3
BAD_PROOF = 4

REASONS = {
    UNKNOWN_HANDLE: "the target does not know this handle (any more)",
    BAD_CHECKSUM: "a checksum did not match",
    BAD_FRAME: "the target could not make sense of a frame",
    BAD_PROOF: "the target has another secret",
}


class BadFrame(ValueError):
    """A peer sent something that is no frame of this protocol."""


class Header(NamedTuple):
    """Start of a frame. `length` is the bytes of each block."""

    op: int
    flags: int
    handle: bytes
    blocks: int
    length: int


def wire_handle(handle: str) -> bytes:
    """A handle as it travels: fixed length, whatever the text."""
    return blake2b(handle.encode(), digest_size=HANDLE_BYTES, person=b"midstream-handl").digest()


def proof(secret: bytes, side: bytes, nonces: bytes, handle: bytes) -> bytes:
    """What only a holder of the secret can say about this very connection."""
    return hmac.digest(secret, side + nonces + handle, "sha256")


def reason(code: int) -> str:
    """A code in words."""
    return REASONS.get(code, f"code {code}")


def refusal(reply: bytes) -> str | None:
    """What a `REPLY` that came unasked refuses; None if it is not whole, or no refusal."""
    if len(reply) != REPLY.size:
        return None
    code, _ = REPLY.unpack(reply)
    return None if code == STORED else f"refused: {reason(code)}"


async def checksum(table: bytes, views: Sequence[memoryview]) -> bytes:
    """CRC-32 of a frame's indexes and blocks; gives way to other tasks every `CHECKED_BYTES_MAX` bytes.

    It guards against faults, not against forgers, and is ten times as fast as a cryptographic hash.
    """
    crc = zlib.crc32(table)
    for number in range(len(views)):  # by number: no local name may hold on to a view
        for start in range(0, len(views[number]), CHECKED_BYTES_MAX):
            crc = zlib.crc32(views[number][start : start + CHECKED_BYTES_MAX], crc)
            if start:
                await asyncio.sleep(0)
    return CHECKSUM.pack(crc)


def pack_header(op: int, handle: bytes, count: int, length: int, *, flags: int = 0) -> bytes:
    """The bytes of a frame's start."""
    return HEADER.pack(MAGIC, VERSION, op, flags, 0, handle, count, length)


def unpack_header(data: bytes | bytearray | memoryview) -> Header:
    """Read a frame's start. Raises `BadFrame` when any field is out of its bounds."""
    magic, version, op, flags, zero, handle, count, length = HEADER.unpack(data)
    if (magic, version, zero) != (MAGIC, VERSION, 0) or flags & ~FLAG_CHECKSUM:
        raise BadFrame("not a frame of this version")
    if op == OP_BLOCKS and not (1 <= count <= FRAME_BLOCKS_MAX and 1 <= length <= BLOCK_BYTES_MAX):
        raise BadFrame(f"{count} blocks of {length} bytes")
    if op == OP_BLOCKS and count > 1 and count * length > FRAME_BYTES_MAX:
        raise BadFrame(f"{count} blocks of {length} bytes in one frame")
    if op not in (OP_BLOCKS, OP_END):
        raise BadFrame(f"op {op}")
    return Header(op, flags, handle, count, length)
