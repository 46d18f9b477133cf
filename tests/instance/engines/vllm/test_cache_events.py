"""vLLM's KV events, read from their wire, become names that every engine shares."""

from __future__ import annotations

import msgspec
import pytest

from midstream.instance.engines.prefixes import PrefixLog
from midstream.instance.engines.vllm.cache_events import CacheEvents
from midstream.instance.engines.vllm.seams.kv_events import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    read_batch,
)
from midstream.migration.protocol.prefixes import prefix_keys

TOKENS = tuple(range(7, 7 + 49))
KEYS = prefix_keys(TOKENS, 16, 100)


class Core:
    """Publishes batches as vLLM does, and hears nothing back."""

    def __init__(self) -> None:
        self.log = PrefixLog()
        self._events = CacheEvents(self.log, 16)
        self.number = 0

    def publish(self, *events: BlockStored | BlockRemoved | AllBlocksCleared, number: int | None = None) -> None:
        at = self.number if number is None else number
        payload = msgspec.msgpack.encode([1.5, list(events), 0])
        self._events.take(*read_batch([b"", at.to_bytes(8, "big"), payload]))
        self.number = at + 1

    @property
    def known(self) -> set[bytes]:
        whole = self.log.since(-1)
        stored = b"" if whole is None else whole.stored
        return {stored[at : at + 8] for at in range(0, len(stored), 8)}


def stored(first: int, last: int, **changes: object) -> BlockStored:
    """Blocks `first` to `last` of the tokens; vLLM's own hashes are of its own making."""
    fields: dict[str, object] = {
        "block_hashes": [b"hash-%d" % block for block in range(first, last + 1)],
        "parent_block_hash": b"hash-%d" % (first - 1) if first else None,
        "token_ids": list(TOKENS[first * 16 : (last + 1) * 16]),
        "block_size": 16,
    }
    return BlockStored(**fields | changes)  # type: ignore[arg-type]


def test_blocks_get_the_names_of_their_content() -> None:
    core = Core()
    core.publish(stored(0, 1))
    core.publish(stored(2, 2))
    assert core.known == set(KEYS)
    core.publish(BlockRemoved(block_hashes=[b"hash-2"]))
    assert core.known == set(KEYS[:2])
    core.publish(AllBlocksCleared())
    assert core.known == set()


def test_a_repeated_batch_is_dropped_and_a_gap_begins_afresh() -> None:
    core = Core()
    core.publish(stored(0, 2))
    core.publish(BlockRemoved(block_hashes=[b"hash-0"]), number=0)
    assert core.known == set(KEYS)
    core.publish(stored(1, 1), number=5)
    assert core.known == set(), "its parent is not known any more"
    core.publish(stored(0, 0), number=6)
    assert core.known == set(KEYS[:1])


@pytest.mark.parametrize(
    "changes", [{"lora_id": 1}, {"extra_keys": [("salt",)]}, {"group_idx": 1}, {"block_size": 8}], ids=str
)
def test_what_is_not_plain_text_of_the_first_group_is_never_promised(changes: dict[str, object]) -> None:
    core = Core()
    core.publish(stored(0, 0, **changes))
    core.publish(stored(1, 1))
    assert core.known == set()


@pytest.mark.parametrize("frames", [[b""], [b"", b"0", b"\xff"], [b"", b"0", msgspec.msgpack.encode({"a": 1})]])
def test_what_is_no_batch_is_an_error_and_not_a_guess(frames: list[bytes]) -> None:
    with pytest.raises((ValueError, msgspec.DecodeError)):
        read_batch(frames)


def test_vllms_own_batch_reads_the_same() -> None:
    from vllm.distributed import kv_events

    batch = kv_events.KVEventBatch(
        ts=1.0,
        events=[
            kv_events.BlockStored(
                block_hashes=[b"x"], parent_block_hash=None, token_ids=[1, 2], block_size=2, lora_id=None,
                medium="GPU", lora_name=None, group_idx=0,
            ),
            kv_events.BlockRemoved(block_hashes=[b"x"], medium="GPU"),
            kv_events.AllBlocksCleared(),
        ],
    )  # fmt: skip
    number, found = read_batch([b"", (9).to_bytes(8, "big"), msgspec.msgpack.encode(batch)])
    assert number == 9
    assert isinstance(found, Batch)
    assert [type(event).__name__ for event in found.events] == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]
    first = found.events[0]
    assert isinstance(first, BlockStored)
    assert (first.block_hashes, first.token_ids, first.group_idx) == ([b"x"], [1, 2], 0)
