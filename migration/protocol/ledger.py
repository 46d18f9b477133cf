"""The ledger of one request: the gateway's register that alone decides who owns it.

`step` is the rule table of docs/protocol.md, total over every state and input: it returns the next
ledger and effects in order, and does no IO. Every number the ledger issues is its epoch + 2, so it can
never collide with a move's e + 1.
"""

from __future__ import annotations

import msgspec

from midstream.control.events import MigrationCommitted, MigrationReclaimed
from midstream.control.ids import Owner
from midstream.migration.protocol.effects import Deliver, Effect, Record, SeekOwner, SendDispatch, Tell
from midstream.migration.protocol.messages import (
    Accepted,
    Acknowledge,
    Adopted,
    Drop,
    Flipped,
    Gone,
    Granted,
    Holding,
    Reclaim,
    Rejected,
    Tokens,
)

EARLY_MAX = 64
"""Chunks that may wait for missing ones; more are ignored and come again."""

NOBODY = Owner("", 0)
"""Owner of a request that was never dispatched."""


class Chunk(msgspec.Struct, frozen=True):
    """Output tokens `first` .. with their log probabilities; `finish` comes with the last ones."""

    first: int
    ids: tuple[int, ...]
    logprobs: tuple[bytes, ...] = ()
    finish: str | None = None

    @property
    def end(self) -> int:
        """Index behind the last token."""
        return self.first + len(self.ids)


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """One request at its gateway.

    `phase`: `new` (never dispatched), `dispatching` (a `Dispatch` is in flight), `running` (the owner was
    heard), `seeking` (a new owner is wanted; the old one's tokens still count), `ended`.
    """

    request: str
    phase: str = "new"
    owner: Owner = NOBODY
    epoch: int = 0
    delivered: int = 0
    early: tuple[Chunk, ...] = ()
    granted_from: int | None = None

    def is_held_by(self, owner: Owner, epoch: int) -> bool:
        """Is this exactly the run whose tokens count."""
        return self.epoch == epoch and self.owner == owner and self.phase not in ("new", "ended")


class Redispatch(msgspec.Struct, frozen=True):
    """Local input: the gateway chose `owner` for a new run from the delivered prefix (rule 1)."""

    owner: Owner


class OwnerLost(msgspec.Struct, frozen=True):
    """Local input: this incarnation of an instance is gone or taken for gone."""

    owner: Owner


class End(msgspec.Struct, frozen=True):
    """Local input: client gone, deadline passed, or failed; nothing is delivered any more (rule 11)."""


Heard = Accepted | Rejected | Tokens | Adopted | Reclaim | Holding | Gone
Input = Heard | Redispatch | OwnerLost | End
Step = tuple[Ledger, tuple[Effect, ...]]

replace = msgspec.structs.replace


def step(ledger: Ledger, what: Input) -> Step:
    """The next ledger and what to do, for any input in any state."""
    match what:
        case Tokens():
            return _tokens(ledger, what)
        case Adopted():
            return _adopted(ledger, what)
        case Reclaim():
            return _reclaim(ledger, what)
        case Redispatch():
            return _redispatch(ledger, what.owner)
        case Accepted() | Holding():
            return _heard(ledger, what.owner, what.epoch)
        case Rejected():
            return _seek(ledger, what.owner, what.epoch, "refused")
        case Gone():
            return _gone(ledger, what)
        case OwnerLost():
            return _seek(ledger, what.owner, ledger.epoch, "lost")
        case End():
            return _end(ledger)


def answer_unknown(what: Heard) -> tuple[Effect, ...]:
    """What a gateway says about a request it has no ledger of: as if it had ended (rule 11)."""
    return step(Ledger(request=what.request, phase="ended"), what)[1]


def _redispatch(ledger: Ledger, owner: Owner) -> Step:
    if ledger.phase == "ended":
        return ledger, ()
    epoch = ledger.epoch + 2
    effects: tuple[Effect, ...] = (SendDispatch(owner, epoch),)
    if ledger.phase != "new" and ledger.owner != owner:
        effects = (Tell(ledger.owner, Drop(request=ledger.request, epoch=ledger.epoch)), *effects)
    after = replace(ledger, phase="dispatching", owner=owner, epoch=epoch, early=(), granted_from=None)
    return after, effects


def _heard(ledger: Ledger, owner: Owner, epoch: int) -> Step:
    """The owner shows that it has the run: no dispatch is in flight and no other owner is wanted."""
    if ledger.phase in ("dispatching", "seeking") and ledger.is_held_by(owner, epoch):
        return replace(ledger, phase="running"), ()
    return ledger, ()


def _seek(ledger: Ledger, owner: Owner, epoch: int, cause: str) -> Step:
    if ledger.phase == "seeking" or not ledger.is_held_by(owner, epoch):
        return ledger, ()
    return replace(ledger, phase="seeking"), (SeekOwner(cause, owner),)


def _gone(ledger: Ledger, what: Gone) -> Step:
    """Rule 10. While a dispatch is in flight its target may rightly not know of it yet."""
    if ledger.phase == "dispatching":
        return ledger, ()
    return _seek(ledger, what.owner, what.epoch, "gone")


def _tokens(ledger: Ledger, what: Tokens) -> Step:
    """Rule 2."""
    if not ledger.is_held_by(what.owner, what.epoch):
        return ledger, _answer_stale(ledger, what.owner, what.epoch)
    ledger, _ = _heard(ledger, what.owner, what.epoch)
    return _take(ledger, Chunk(what.first, what.ids, what.logprobs, what.finish))


def _answer_stale(ledger: Ledger, owner: Owner, epoch: int) -> tuple[Effect, ...]:
    """Drop a stale run, but never the current owner (it may be waiting for its grant) nor a future one."""
    if ledger.phase == "ended":
        return (Tell(owner, Drop(request=ledger.request, epoch=epoch)),)
    if epoch > ledger.epoch or owner == ledger.owner:
        return ()
    return (Tell(owner, Drop(request=ledger.request, epoch=epoch)),)


def _take(ledger: Ledger, chunk: Chunk) -> Step:
    """Deliver what is next in order, keep what is early, acknowledge what is held; end with the finish."""
    early = sorted(_longest({c.first: c for c in ledger.early}, chunk).values(), key=lambda c: c.first)
    delivered, finish = ledger.delivered, None
    ids: list[int] = []
    logprobs: list[bytes] = []
    waiting: list[Chunk] = []
    for one in early:
        if one.first > delivered:
            waiting.append(one)
            continue
        skip = delivered - one.first
        ids += one.ids[skip:]
        logprobs += one.logprobs[skip:]
        delivered = max(delivered, one.end)
        finish = one.finish if one.finish is not None and one.end == delivered else finish
    after = replace(ledger, delivered=delivered, early=tuple(waiting[:EARLY_MAX]))
    effects: list[Effect] = []
    if ids or finish:
        effects.append(Deliver(tuple(ids), tuple(logprobs), finish))
    if finish is not None:
        ended, last = _end(after)
        return ended, (*effects, *last)
    ack = Acknowledge(request=ledger.request, epoch=ledger.epoch, delivered=delivered)
    return after, (*effects, Tell(ledger.owner, ack))


def _longest(early: dict[int, Chunk], chunk: Chunk) -> dict[int, Chunk]:
    """The early chunks with one more: of two that start alike, the one that says more."""
    known = early.get(chunk.first)
    if known is None or (chunk.end, chunk.finish is not None) > (known.end, known.finish is not None):
        early[chunk.first] = chunk
    return early


def _adopted(ledger: Ledger, what: Adopted) -> Step:
    """Rule 5: the flip. A hole before the tail is not answered: an epoch that may still win is never dropped."""
    epoch = what.epoch + 1
    if ledger.is_held_by(what.owner, epoch):
        return ledger, (_flipped(ledger),)
    is_move_of_owner = ledger.is_held_by(ledger.owner, what.epoch) and what.owner != ledger.owner
    if not is_move_of_owner:
        return ledger, _answer_stale(ledger, what.owner, epoch)
    if what.first > ledger.delivered:
        return ledger, ()
    tail = len(what.ids) - (ledger.delivered - what.first)
    committed = MigrationCommitted(
        migration=what.migration,
        request=ledger.request,
        epoch=what.epoch,
        owner=what.owner,
        tail_tokens=max(tail, 0),
    )
    flipped = replace(ledger, phase="running", owner=what.owner, epoch=epoch, early=(), granted_from=None)
    after, effects = _take(flipped, Chunk(what.first, what.ids, what.logprobs, what.finish))
    return after, (Record(committed), _flipped(after), *effects)


def _flipped(ledger: Ledger) -> Effect:
    return Tell(ledger.owner, Flipped(request=ledger.request, epoch=ledger.epoch, delivered=ledger.delivered))


def _reclaim(ledger: Ledger, what: Reclaim) -> Step:
    """Rule 7."""
    if ledger.is_held_by(what.owner, what.epoch):
        granted = replace(ledger, phase="running", epoch=what.epoch + 2, early=(), granted_from=what.epoch)
        fact = MigrationReclaimed(migration=what.migration, request=ledger.request, epoch=what.epoch, owner=what.owner)
        return granted, (Record(fact), _granted(granted))
    is_repeat = ledger.granted_from == what.epoch and ledger.is_held_by(what.owner, what.epoch + 2)
    if is_repeat:
        return ledger, (_granted(ledger),)
    if what.epoch > ledger.epoch and ledger.phase != "ended":
        return ledger, ()
    return ledger, (Tell(what.owner, Drop(request=ledger.request, epoch=what.epoch)),)


def _granted(ledger: Ledger) -> Effect:
    assert ledger.granted_from is not None
    grant = Granted(request=ledger.request, from_epoch=ledger.granted_from, epoch=ledger.epoch)
    return Tell(ledger.owner, grant)


def _end(ledger: Ledger) -> Step:
    if ledger.phase == "ended":
        return ledger, ()
    ended = replace(ledger, phase="ended", early=(), granted_from=None)
    if ledger.phase == "new":
        return ended, ()
    return ended, (Tell(ledger.owner, Drop(request=ledger.request, epoch=ledger.epoch)),)
