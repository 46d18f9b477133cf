"""What transfers say on a connection, after the handshake of `rpc_format`, whose bytes take another way.

All numbers are little-endian.

    source  REGION  header; one byte that carries a descriptor: memory that later frames speak of, by its turn (`shm`)
    source  BLOCKS  header, `pieces` indexes, `pieces` offsets in a region (`shm`), with `FLAG_CHECKSUM` a CRC-32 of
                    indexes and bytes
    target  REPLY   code, pieces stored of one BLOCKS frame; answers come in order

A piece is `length` bytes from `skip` on of a block that has `whole` bytes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from midstream.migration.transfers.rpc_format import BLOCK_BYTES_MAX, BadFrame

MAGIC = 0x5246_534D
"""`MSFR` on the wire."""
OP_REGION = 1
OP_BLOCKS = 2
FLAG_CHECKSUM = 1

FRAME_PIECES_MAX = 1024
FRAME_BYTES_MAX = 4 * 1024 * 1024
"""Passes through one slot; larger blocks are cut into pieces of this size."""
LENT_BYTES_MAX = 16 * 1024 * 1024
"""A frame of memory that needs no slot: each takes four wake-ups of processes, which should not count."""
REGIONS_MAX = 1024
"""Regions that one connection speaks of."""
FRAMES_AHEAD_MAX = 4
"""Frames that a source sends before it must have an answer."""

HEADER = struct.Struct("<IBBHIQQQ")
REPLY = struct.Struct("<BI")
CHECKSUM = struct.Struct("<I")


class Header(NamedTuple):
    """Start of a frame."""

    op: int
    flags: int
    region: int
    pieces: int
    length: int
    whole: int
    skip: int


def pack_header(header: Header) -> bytes:
    """The bytes of a frame's start."""
    return HEADER.pack(MAGIC, *header)


def unpack_header(data: bytes) -> Header:
    """Read a frame's start. Raises `BadFrame` when any field is out of its bounds."""
    magic, *fields = HEADER.unpack(data)
    header = Header(*fields)
    if magic != MAGIC or header.op not in (OP_REGION, OP_BLOCKS) or header.flags & ~FLAG_CHECKSUM:
        raise BadFrame("not a frame of this version")
    if header.op == OP_BLOCKS and not _is_sane(header):
        raise BadFrame(f"{header.pieces} pieces of {header.length} bytes")
    return header


def _is_sane(header: Header) -> bool:
    return (
        1 <= header.pieces <= FRAME_PIECES_MAX
        and header.length >= 1
        and header.pieces * header.length <= LENT_BYTES_MAX
        and header.skip + header.length <= header.whole <= BLOCK_BYTES_MAX
    )
