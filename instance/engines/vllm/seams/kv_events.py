"""vLLM's KV events as its ZMQ publisher sends them, (topic, number, msgpack batch), read with types of our own.

Imports nothing of vLLM, so a llumlet reads them without its seconds of imports; `host.check_host` compares the fields.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

Hash = bytes | int


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Full blocks can be found in the prefix cache: `token_ids` of all of them, one after the other."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """They cannot any more."""

    block_hashes: list[Hash]
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing can."""


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one step."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


KINDS: Final[tuple[type[msgspec.Struct], ...]] = (BlockStored, BlockRemoved, AllBlocksCleared)

_decode: Final = msgspec.msgpack.Decoder(Batch).decode


def read_batch(frames: list[bytes]) -> tuple[int, Batch]:
    """Number and events of one message. Raises `ValueError` for anything else."""
    if len(frames) != 3:
        raise ValueError(f"a KV event message has 3 parts, not {len(frames)}")
    return int.from_bytes(frames[1], "big"), _decode(frames[2])


def publisher_args(endpoint: str) -> dict[str, Any]:
    """Fields of vLLM's `KVEventsConfig` that make a core publish there."""
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
