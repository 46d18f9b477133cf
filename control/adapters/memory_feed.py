"""The log in memory for simulations of whole fleets: facts go from those who say them straight into the folds.

Same order, same facts, same commits as with `MemoryLog`; left out are what only failures need: publishers that say
things again, readers that catch up, and the round trip through JSON of each fact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from midstream.control.adapters.memory_log import MemoryLogStore
from midstream.control.events import Entry, Event, Fact
from midstream.control.fold import apply
from midstream.control.follower import Follower
from midstream.control.ids import Position
from midstream.control.ports import Clock, FactLog


class FeedStore(MemoryLogStore):
    """A log that keeps nothing: each entry is given to every reader in turn, before the next is taken."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock)
        self.readers: list[Callable[[Entry], None]] = []
        self._fresh: deque[Entry] = deque()
        self._is_feeding = False

    def extend(self, facts: Sequence[Fact]) -> Position:
        """See `MemoryLogStore.extend`. What readers say meanwhile comes after."""
        for fact in facts:
            seq = self.last.seq + 1 if self.last.generation == self.generation else 0
            self.last = Position(self.generation, seq)
            self._fresh.append(Entry(self.last, fact))
        last = self.last
        if not self._is_feeding:
            self._feed()
        return last

    def _feed(self) -> None:
        self._is_feeding = True
        try:
            while self._fresh:
                entry = self._fresh.popleft()
                for read in self.readers:
                    read(entry)
        finally:
            self._is_feeding = False


class FedFollower(Follower):
    """A fold that is given its entries; it needs no `run`."""

    def __init__(self, log: FactLog, store: FeedStore) -> None:
        super().__init__(log)
        store.readers.append(self._read)

    def _read(self, entry: Entry) -> None:
        if apply(self.state, entry) and self.on_entry is not None:
            self.on_entry(entry)
        self._wake()


class FeedRecorder:
    """`control.ports.Recorder` of one source whose every fact arrives."""

    def __init__(self, store: FeedStore, source: str, incarnation: int, clock: Clock) -> None:
        self._store = store
        self._source = source
        self._incarnation = incarnation
        self._clock = clock
        self._seq = 0

    def record(self, event: object) -> None:
        """See `Recorder.record`. Raises TypeError for what is no event: a fleet has no excuse."""
        if not isinstance(event, Event):
            raise TypeError(f"{self._source} said {event!r}")
        store = self._store
        if not store.is_open:
            store.open_generation(0, "no generation was open", self._source)
        self._seq += 1
        store.extend((Fact(self._source, self._incarnation, self._seq, self._clock.now_ms(), event),))
