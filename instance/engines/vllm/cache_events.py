"""Follows an engine core's KV events into a `PrefixLog`, with names that do not depend on vLLM's own hashes."""

from __future__ import annotations

from typing import NoReturn

import msgspec
import structlog
import zmq
import zmq.asyncio

from midstream.instance.engines.prefixes import PrefixLog
from midstream.instance.engines.vllm.seams.kv_events import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Hash,
    read_batch,
)
from midstream.migration.protocol.prefixes import chain, short

logger = structlog.get_logger(__name__)


class CacheEvents:
    """One core's events, in order. After a gap nothing is known: blocks may have gone unnoticed."""

    def __init__(self, prefixes: PrefixLog, block_tokens: int) -> None:
        self._prefixes = prefixes
        self._block_tokens = block_tokens
        self._names: dict[Hash, bytes] = {}
        self._next = 0

    def take(self, number: int, batch: Batch) -> None:
        """One batch. A repeated one is dropped."""
        if number < self._next:
            return
        if number > self._next:
            self.lose(f"batches {self._next} to {number - 1} are missing")
        self._next = number + 1
        for event in batch.events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    self._removed(event)
                case AllBlocksCleared():
                    self._clear()

    def lose(self, why: str) -> None:
        """Begin afresh."""
        logger.warning("KV events were lost", why=why)
        self._clear()

    def _clear(self) -> None:
        self._names.clear()
        self._prefixes.clear()

    def _stored(self, event: BlockStored) -> None:
        """Only whole blocks of plain text in the first cache group have a name; behind one without nothing has."""
        is_plain = event.lora_id is None and not any(event.extra_keys or ()) and not event.group_idx
        if not is_plain or event.block_size != self._block_tokens:
            return
        name = b"" if event.parent_block_hash is None else self._names.get(event.parent_block_hash)
        if name is None:
            return
        for index, key in enumerate(event.block_hashes):
            first = index * event.block_size
            name = chain(name, event.token_ids[first : first + event.block_size])
            self._names[key] = name
            self._prefixes.stored(short(name))

    def _removed(self, event: BlockRemoved) -> None:
        for key in event.block_hashes if not event.group_idx else ():
            name = self._names.pop(key, None)
            if name is not None:
                self._prefixes.removed(short(name))


async def follow(endpoint: str, events: CacheEvents) -> NoReturn:
    """Read for ever what the core publishes. What cannot be read loses the cache's picture, nothing else."""
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.connect(endpoint)
        while True:
            frames = await socket.recv_multipart()
            try:
                number, batch = read_batch(frames)
            except (ValueError, msgspec.DecodeError) as error:
                events.lose(str(error))
            else:
                events.take(number, batch)
