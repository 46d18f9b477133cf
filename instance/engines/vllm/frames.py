"""Length-prefixed msgpack over a local stream."""

from __future__ import annotations

import asyncio
import struct

LENGTH = struct.Struct("<I")
FRAME_BYTES_MAX = 16 * 1024 * 1024


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame. Raises `asyncio.IncompleteReadError` at the end, `ValueError` for nonsense."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {length} bytes")
    return await reader.readexactly(length)


def frame(data: bytes) -> bytes:
    """The bytes of one frame."""
    return LENGTH.pack(len(data)) + data
