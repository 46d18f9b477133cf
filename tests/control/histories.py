"""Logs made by hand, for tests of the archive and of replay: entries, and a cluster with a controller on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from midstream.control.codec import decode_fact, digest, encode_fact, encode_state
from midstream.control.decide import decide
from midstream.control.events import (
    Entry,
    Event,
    Fact,
    GenerationOpened,
    InstanceRegistered,
    LoadReported,
    MigrationCommitted,
    MoveDecided,
    RequestDispatched,
    RequestsReported,
    StateCarried,
    TickElapsed,
)
from midstream.control.fold import apply, fold
from midstream.control.ids import COMMIT_SOURCE, Owner, Position
from midstream.control.state import Fingerprint, Load, RequestLoad, State

FINGERPRINT = Fingerprint(
    engine="sim", engine_version="1", model="m", weights_revision="r", dtype="bf16", block_tokens=16,
    block_bytes=64, layout="flat",
)  # fmt: skip


def entry(seq: int, event: Event, *, generation: int = 1, source: str = "llumlet/a", number: int = 1) -> Entry:
    """One entry; its clock runs a second per number."""
    return Entry(Position(generation, seq), Fact(source, 1, number, 1_000 * number, event))


def load(seq: int, number: int, *, generation: int = 1, instance: str = "a", free: int = 10) -> Entry:
    """A load report of an instance."""
    event = LoadReported(owner=Owner(instance, 1), load=Load(blocks_free=free))
    return entry(seq, event, generation=generation, source=f"llumlet/{instance}", number=number)


class Recorded:
    """A log in the making: sources say facts, a controller ticks on its own fold of it.

    `lag` entries are said between a decision and its commit, as on a busy log.
    """

    def __init__(self, generation: int = 1) -> None:
        self.entries: list[Entry] = []
        self.state = State()
        self._next = Position(generation, 0)
        self._numbers: dict[tuple[str, int], int] = {}
        self._folded = 0
        self._seed = 0
        self.say("log", GenerationOpened(generation=generation, cause="new", opened_by="test"), incarnation=generation)

    def say(self, source: str, event: Event, *, incarnation: int = 1, at_ms: int = 0) -> Fact:
        """Append a fact with its source's next number."""
        number = self._numbers[source, incarnation] = self._numbers.get((source, incarnation), 0) + 1
        return self.append(Fact(source, incarnation, number, at_ms, event))

    def append(self, fact: Fact) -> Fact:
        """Append a fact that has its number already (a repeat, if it was said before)."""
        self.entries.append(Entry(self._next, decode_fact(encode_fact(fact))))
        self._next = Position(self._next.generation, self._next.seq + 1)
        return fact

    def lose(self, count: int) -> list[Entry]:
        """Redis died: the last entries are gone, a new generation begins."""
        lost = self.entries[len(self.entries) - count :]
        del self.entries[len(self.entries) - count :]
        self.reopen()
        return lost

    def reopen(self) -> None:
        """Begin a new generation."""
        self._next = Position(self._next.generation + 1, 0)
        opened = GenerationOpened(generation=self._next.generation, cause="restart", opened_by="test")
        self.say("log", opened, incarnation=self._next.generation)

    def catch_up(self) -> None:
        """Let the controller's fold read to the end."""
        fold((e for e in self.entries if e.position > self.state.position), self.state)

    def tick(self, now_ms: int, *, lag: Sequence[Event] = ()) -> tuple[Event, ...]:
        """One controller's decision and commit."""
        self.catch_up()
        self._seed += 1
        tick = TickElapsed(now_ms=now_ms, seed=self._seed, decided_at=self.state.position)
        events = decide(self.state, tick).events
        for event in lag:
            self.say("llumlet/late", event, at_ms=now_ms)
        for event in (tick, *events):
            self.say(COMMIT_SOURCE, event, incarnation=self._next.generation, at_ms=now_ms)
        return events

    def carry(self, *, digest_of: bytes | None = None) -> None:
        """The first commit of a new generation."""
        self.catch_up()
        state = encode_state(self.state)
        event = StateCarried(state=state.decode(), digest=digest(digest_of or state))
        self.say(COMMIT_SOURCE, event, incarnation=self._next.generation)

    def register(self, instance: str, blocks: int = 200) -> None:
        """An empty instance joins."""
        registered = InstanceRegistered(
            owner=Owner(instance, 1), address=instance, fingerprint=FINGERPRINT, blocks_total=blocks, slots_max=64
        )
        self.say(f"llumlet/{instance}", registered)

    def report(self, instance: str, load: Load, at_ms: int = 0) -> Fact:
        """An instance's load."""
        return self.say(f"llumlet/{instance}", LoadReported(owner=Owner(instance, 1), load=load), at_ms=at_ms)

    def dispatch(self, request: str, instance: str, tokens: int = 64) -> None:
        """A request goes to an instance."""
        self.say("gateway/g", RequestDispatched(
            request=request, gateway="gateway/g", owner=Owner(instance, 1), epoch=1, prompt_tokens=tokens,
            delivered_tokens=0, output_tokens_max=100,
        ))  # fmt: skip

    def progress(self, instance: str, tokens: Mapping[str, int]) -> None:
        """Requests run on an instance, with so many tokens each."""
        requests = tuple(RequestLoad(name, 1, count, -(-count // 16), False) for name, count in tokens.items())
        self.say(f"llumlet/{instance}", RequestsReported(owner=Owner(instance, 1), requests=requests))

    def commit(self, move: MoveDecided) -> None:
        """The gateway says that a move is done."""
        self.say("gateway/g", MigrationCommitted(
            migration=move.migration, request=move.request, epoch=move.epoch, owner=move.target, tail_tokens=0
        ))  # fmt: skip


def full_and_empty() -> Recorded:
    """Two instances, one full and one empty."""
    log = Recorded()
    for instance in ("a", "b"):
        log.register(instance)
        log.report(instance, Load(blocks_free=200))
    tokens = {f"r{number}": 16 * (12 + number % 5) for number in range(10)}
    for request, count in tokens.items():
        log.dispatch(request, "a", count)
    log.report("a", Load(running=10, blocks_free=2))
    log.progress("a", tokens)
    return log


def busy_day(ticks: int = 12) -> Recorded:
    """The controller moves requests from a full instance to an empty one; every move ends well after its tick."""
    log = full_and_empty()
    running = 10
    for number in range(1, ticks + 1):
        log.report("a", Load(running=running, blocks_free=2), at_ms=1_000 * number)
        log.report("b", Load(running=1, blocks_free=190), at_ms=1_000 * number)
        late = LoadReported(owner=Owner("b", 1), load=Load(running=1, blocks_free=190 - number))
        for event in log.tick(1_000 * number, lag=[late] * (number % 3)):
            if isinstance(event, MoveDecided):
                running -= 1
                log.commit(event)
    return log


def folded(entries: Sequence[Entry], upto: Position) -> State:
    """The live fold up to a position."""
    state = State()
    for each in entries:
        if each.position <= upto:
            apply(state, each)
    return state
