"""A log told fact by fact, and clusters in a few words, for tests of fold, decisions and controllers."""

from __future__ import annotations

from typing import Any

from midstream.control import codec
from midstream.control.events import (
    Entry,
    Event,
    Fact,
    GenerationOpened,
    InstanceRegistered,
    LoadReported,
    RequestDispatched,
    RequestsReported,
    TickElapsed,
)
from midstream.control.fold import apply
from midstream.control.ids import COMMIT_SOURCE, Owner, Position
from midstream.control.state import Fingerprint, Load, RequestLoad, State

GATEWAY = "gateway/g0"
BLOCK_TOKENS = 16


def fingerprint(**changes: Any) -> Fingerprint:
    fields: dict[str, Any] = {
        "engine": "sim",
        "engine_version": "1",
        "model": "m",
        "weights_revision": "r0",
        "dtype": "float16",
        "block_tokens": BLOCK_TOKENS,
        "block_bytes": 64,
        "layout": "NHD",
    }
    return Fingerprint(**{**fields, **changes})


def owner(instance: str, incarnation: int = 1) -> Owner:
    return Owner(instance, incarnation)


class Story:
    """A log in the making, and its fold. Each source numbers its own facts; incarnations are given by the facts."""

    def __init__(self, generation: int = 1) -> None:
        self.state = State()
        self.entries: list[Entry] = []
        self.now_ms = 1_000_000
        self._seqs: dict[tuple[str, int], int] = {}
        self._generation = generation
        self.say("log", GenerationOpened(generation=generation, cause="test", opened_by="test"), generation)

    def say(self, source: str, event: Event, incarnation: int = 1) -> Entry:
        """The source's next fact, at the log's next position, as it reads after its encoding."""
        key = (source, incarnation)
        self._seqs[key] = self._seqs.get(key, 0) + 1
        fact = Fact(source, incarnation, self._seqs[key], self.now_ms, event)
        return self.put(codec.decode_fact(codec.encode_fact(fact)))

    def put(self, fact: Fact) -> Entry:
        entry = Entry(Position(self._generation, len(self.entries)), fact)
        self.entries.append(entry)
        apply(self.state, entry)
        return entry

    def control(self, *events: Event) -> None:
        """What a controller commits."""
        for event in events:
            self.say(COMMIT_SOURCE, event, self._generation)

    def tick(self, after_ms: int = 250, seed: int = 7) -> TickElapsed:
        """A tick that was committed."""
        self.now_ms += after_ms
        event = TickElapsed(now_ms=self.now_ms, seed=seed, decided_at=self.state.position)
        self.control(event)
        return event

    def next_tick(self, after_ms: int = 250, seed: int = 7) -> TickElapsed:
        """A tick that might be committed next."""
        return TickElapsed(now_ms=self.now_ms + after_ms, seed=seed, decided_at=self.state.position)

    def instance(
        self,
        name: str,
        *,
        incarnation: int = 1,
        blocks: int = 1000,
        slots: int = 64,
        role: str = "mixed",
        fingerprint: Fingerprint = fingerprint(),  # noqa: B008 - frozen
    ) -> Owner:
        """A new incarnation registers."""
        me = Owner(name, incarnation)
        event = InstanceRegistered(
            owner=me,
            address=f"mem:{name}",
            fingerprint=fingerprint,
            blocks_total=blocks,
            slots_max=slots,
            role=role,
        )
        self.say(f"llumlet/{name}", event, incarnation)
        return me

    def load(self, me: Owner, **load: Any) -> None:
        """A load report."""
        self.say(f"llumlet/{me.instance}", LoadReported(owner=me, load=Load(**load)), me.incarnation)

    def alive(self) -> None:
        """Every instance repeats its load report."""
        for view in tuple(self.state.instances.values()):
            event = LoadReported(owner=view.owner, load=view.load)
            self.say(f"llumlet/{view.owner.instance}", event, view.owner.incarnation)

    def dispatch(self, request: str, me: Owner, *, epoch: int = 1, prompt: int = 64, **more: Any) -> None:
        """A gateway gives a request to an instance."""
        event = RequestDispatched(
            **{
                "request": request,
                "gateway": "g0",
                "owner": me,
                "epoch": epoch,
                "prompt_tokens": prompt,
                "delivered_tokens": 0,
                "output_tokens_max": 1000,
                **more,
            }
        )
        self.say(GATEWAY, event)

    def progress(self, request: str, tokens: int, *, is_waiting: bool = False, is_movable: bool = True) -> None:
        """The owner reports how far a request is."""
        view = self.state.requests[request]
        blocks = 0 if is_waiting else -(-tokens // BLOCK_TOKENS)
        row = RequestLoad(request, view.epoch, tokens, blocks, is_waiting, is_movable)
        event = RequestsReported(owner=view.owner, requests=(row,))
        self.say(f"llumlet/{view.owner.instance}", event, view.owner.incarnation)

    def running(self, request: str, me: Owner, tokens: int = 160, **more: Any) -> None:
        """A request that runs and has grown to `tokens`."""
        self.dispatch(request, me, **more)
        self.progress(request, tokens)
