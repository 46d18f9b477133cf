"""Frames of the data-plane wire: msgpack, typed on the way in, bounded. Nothing else is ever decoded from a peer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from midstream.control.ids import Node
from midstream.migration.protocol.messages import AnyMessage

FRAME_BYTES_MAX = 32 * 1024 * 1024
"""A million-token request with its logprobs fits; a larger frame is refused on both sides."""


class BadFrame(ValueError):
    """Bytes that are no frame of ours."""


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Messages from one node to one incarnation of another, in order."""

    to_incarnation: int
    sender: Node
    messages: list[AnyMessage]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(to: Node, sender: Node, messages: Sequence[AnyMessage]) -> bytes:
    """The bytes of a frame; the caller checks `FRAME_BYTES_MAX`."""
    return _encoder.encode((to.incarnation, sender, messages))


def decode_frame(data: bytes) -> Frame:
    """Read a frame. Raises `BadFrame` for anything else, however broken."""
    if len(data) > FRAME_BYTES_MAX:
        raise BadFrame(f"{len(data)} bytes")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadFrame(str(error)[:200]) from None
