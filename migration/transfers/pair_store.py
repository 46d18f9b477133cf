"""How two ranks find each other: a torch store for two, whose entries travel on a connection that is there already.

So nothing listens for it, and who may take part has been settled.
"""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store

from midstream.migration.transfers.rpc_socket import PeerGone, Stream
from midstream.migration.transfers.threads import in_thread

T = TypeVar("T")

ENTRY = struct.Struct("<HI")
"""Bytes of key and value; an entry without a key is the last."""
ENTRY_BYTES_MAX = 1 << 20


class PairStore(Store):  # type: ignore[misc]  # torch is not followed
    """What torch calls, from any thread. `tell` gets each entry that is made here."""

    def __init__(self, tell: Callable[[bytes], None], deadline_s: float) -> None:
        super().__init__()
        self._tell = tell
        self._deadline_s = deadline_s
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        """An entry that the other made."""
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def set(self, key: str, value: Any) -> None:
        """Make an entry, here and there."""
        held = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, held)
        self._tell(entry(key, held))

    def get(self, key: str) -> bytes:
        """Wait for an entry. Raises `RuntimeError` after the deadline."""
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for entries. Raises `RuntimeError` after the deadline."""
        until = time.monotonic() + self._deadline_s
        with self._changed:
            while missing := [key for key in keys if key not in self._entries]:
                if not self._changed.wait(until - time.monotonic()):
                    raise RuntimeError(f"the other rank did not say {missing[0]}")

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return all(key in self._entries for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline is ours to choose."""


async def meet(stream: Stream, executor: Executor, deadline_s: float, make: Callable[[PairStore], T]) -> T:
    """Run `make` in a thread on both sides of a connection, with a store between them. Raises `OSError`."""
    loop = asyncio.get_running_loop()

    def tell(said: bytes) -> None:
        loop.call_soon_threadsafe(stream.write_now, said)

    store = PairStore(tell, deadline_s)
    listening = loop.create_task(_listen(stream, store))
    try:
        made = await in_thread(executor, lambda: make(store))
        stream.write_now(entry("", b""))
        async with asyncio.timeout(deadline_s):
            await listening
        return made
    except RuntimeError as error:
        raise PeerGone(f"the other rank did not come: {error}") from error
    finally:
        listening.cancel()


async def _listen(stream: Stream, store: PairStore) -> None:
    while True:
        key_bytes, value_bytes = ENTRY.unpack(await stream.read(ENTRY.size, is_idle=True))
        if not key_bytes:
            return
        if value_bytes > ENTRY_BYTES_MAX:
            raise PeerGone("an entry that no rank makes")
        said = await stream.read(key_bytes + value_bytes)
        store.put(said[:key_bytes].decode(), said[key_bytes:])


def entry(key: str, value: bytes) -> bytes:
    """An entry as it travels."""
    name = key.encode()
    return ENTRY.pack(len(name), len(value)) + name + value
