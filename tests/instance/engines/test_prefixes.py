"""What a prefix cache holds, told as changes: who follows at any pace knows the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from midstream.instance.engines import prefixes
from midstream.instance.engines.prefixes import CHANGES_MAX, KEYS_MAX, PrefixLog
from midstream.instance.engines.sim.model import block_keys
from midstream.migration.protocol.messages import CacheChange
from midstream.migration.protocol.prefixes import KEY_BYTES, prefix_keys, short


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def keys_of(told: bytes) -> list[bytes]:
    return [told[at : at + KEY_BYTES] for at in range(0, len(told), KEY_BYTES)]


class Reader:
    """Follows a cache as a gateway does."""

    def __init__(self) -> None:
        self.seen = 0
        self.keys: set[bytes] = set()

    def take(self, change: CacheChange | None) -> None:
        if change is None:
            return
        known = set() if change.is_whole else self.keys
        self.keys = (known - set(keys_of(change.removed))) | set(keys_of(change.stored))
        self.seen = change.upto


@given(st.lists(st.tuples(st.sampled_from(["stored", "removed", "clear", "read"]), st.integers(0, 9))))
def test_who_follows_at_any_pace_knows_what_is_there(steps: list[tuple[str, int]]) -> None:
    log, reader, there = PrefixLog(), Reader(), set[bytes]()
    for what, number in steps:
        if what == "stored":
            log.stored(key(number))
            there.add(key(number))
        elif what == "removed":
            log.removed(key(number))
            there.discard(key(number))
        elif what == "clear":
            log.clear()
            there.clear()
        else:
            reader.take(log.since(reader.seen))
            assert reader.keys == there
    reader.take(log.since(reader.seen))
    assert reader.keys == there
    assert log.since(reader.seen) is None


def test_who_is_far_behind_or_from_another_life_gets_the_whole() -> None:
    log = PrefixLog()
    for number in range(CHANGES_MAX + 10):
        log.stored(key(number % 100))
        log.removed(key(number % 100 - 1)) if number % 100 else None
    late = log.since(1)
    assert late is not None and late.is_whole
    ahead = log.since(10**9)
    assert ahead is not None and ahead.is_whole and ahead.upto == log.number


def test_P28_only_the_newest_blocks_are_remembered() -> None:
    log = PrefixLog()
    for number in range(KEYS_MAX + 5):
        log.stored(key(number))
    assert len(log) == KEYS_MAX
    whole = log.since(-1)
    assert whole is not None
    assert set(keys_of(whole.stored)) == {key(number) for number in range(5, KEYS_MAX + 5)}
    assert len(log._changes) <= prefixes.CHANGES_MAX


def test_names_are_the_simulated_engines_own_and_the_last_token_is_never_worth_a_block() -> None:
    tokens, names = list(range(3, 67)), []
    block_keys(tokens, names, 4, 16)
    assert prefix_keys([*tokens, 1], 16, 100) == [short(name) for name in names]
    assert prefix_keys(tokens, 16, 100) == [short(name) for name in names[:3]]
    assert prefix_keys([*tokens, 1], 16, 2) == [short(name) for name in names[:2]]
    assert prefix_keys(tokens[:5], 16, 100) == []
