"""Planted faults: each breaks one rule of the machines, and the explicit-state check must find it.

A mutant is the production code with one step function wrapped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from midstream.migration.protocol import ledger as gateway
from midstream.migration.protocol import messages as msg
from midstream.migration.protocol import seat as instance
from midstream.migration.protocol.effects import (
    Abort,
    Effect,
    Record,
    ResendTokens,
    Send,
    SendAdopted,
    SendFinal,
    Tell,
    Thaw,
)
from midstream.migration.protocol.ledger import Ledger
from midstream.migration.protocol.seat import From, Rules, Seat
from tests.migration.model import Config
from tests.migration.world import Budget, Machines

replace = msgspec.structs.replace

SeatStep = tuple[Seat, tuple[Effect, ...]]
LedgerStep = tuple[Ledger, tuple[Effect, ...]]


class Mutant(NamedTuple):
    """A fault, and where it shows."""

    name: str
    machines: Machines
    config: Config


# --- the instance's side -------------------------------------------------------------------------


def resumes_by_itself(seat: Seat, what: Any, rules: Rules) -> SeatStep:
    """The source goes on, on its own timer, after it sent `Final`."""
    run = seat.run
    if isinstance(what, instance.Deadline) and run is not None and run.move is not None and run.move.phase == "doubt":
        return replace(seat, run=replace(run, move=None)), (Thaw(run.slot), ResendTokens(run.slot))
    return instance.step(seat, what, rules)


def frees_after_adopting(seat: Seat, what: Any, rules: Rules) -> SeatStep:
    """The target frees an adopted run on its own timer."""
    run = seat.run
    if isinstance(what, instance.Nudge) and run is not None and run.adoption is not None:
        return replace(seat, run=None), (Abort(run.slot),)
    return instance.step(seat, what, rules)


def releases_at_once(seat: Seat, what: Any, rules: Rules) -> SeatStep:
    """The source frees its copy as soon as it sent `Final`."""
    after, effects = instance.step(seat, what, rules)
    final = next((e for e in effects if isinstance(e, SendFinal)), None)
    if final is None:
        return after, effects
    return replace(after, run=None), (*(e for e in effects if e is not final), Abort(final.slot))


def drops_newer(seat: Seat, what: Any, rules: Rules) -> SeatStep:
    """`Drop` frees whatever is there."""
    after, effects = instance.step(seat, what, rules)
    if isinstance(what, From) and isinstance(what.message, msg.Drop) and after.run is not None:
        return replace(after, run=None), (*effects, Abort(after.run.slot))
    return after, effects


def forgets_the_tail(seat: Seat, what: Any, rules: Rules) -> SeatStep:
    """The target takes all of the source's tokens for acknowledged."""
    if isinstance(what, From) and isinstance(what.message, msg.Final):
        final = replace(what.message, acknowledged=len(what.message.state.outputs))
        what = From(what.sender, final)
    return instance.step(seat, what, rules)


def reserves_again(seat: Seat, what: Any, rules: Rules) -> SeatStep:
    """A move may reserve a second time, and `Final` does not say which reservation it means."""
    after, effects = instance.step(seat, what, rules)
    return replace(after, closed=()), effects


def lets_moves_overlap(seat: Seat, what: Any, rules: Rules) -> SeatStep:
    """A move may begin before the freeze of the one before it was answered."""
    after, effects = instance.step(seat, what, rules)
    if after.run is not None:
        after = replace(after, run=replace(after.run, freezing=None))
    return after, effects


def forgets_offered_epochs(seat: Seat, what: Any, rules: Rules) -> SeatStep:
    """A reservation does not keep older dispatches out."""
    after, effects = instance.step(seat, what, rules)
    if isinstance(what, From) and isinstance(what.message, msg.Prepare):
        after = replace(after, seen=seat.seen)
    return after, effects


def ignores_old_dispatches(seat: Seat, what: Any, rules: Rules) -> SeatStep:
    """A repeated dispatch of a lost run is not answered."""
    after, effects = instance.step(seat, what, rules)
    is_refusal = [isinstance(e, Send) and isinstance(e.message, msg.Rejected) for e in effects]
    return after, tuple(e for e, refuses in zip(effects, is_refusal, strict=True) if not refuses)


def never_asks(seat: Seat, what: Any, rules: Rules) -> SeatStep:
    """The source waits for `Committed` for ever."""
    if isinstance(what, instance.Deadline) and seat.run is not None and seat.run.move is not None:
        return (seat, ()) if seat.run.move.phase == "doubt" else instance.step(seat, what, rules)
    return instance.step(seat, what, rules)


def forgets_the_lease(seat: Seat, what: Any, rules: Rules) -> SeatStep:
    """A reservation nobody wants stays."""
    return (seat, ()) if isinstance(what, instance.LeaseExpired) else instance.step(seat, what, rules)


def says_adopted_once(seat: Seat, what: Any, rules: Rules) -> SeatStep:
    """`Adopted` is not repeated."""
    after, effects = instance.step(seat, what, rules)
    if isinstance(what, instance.Nudge):
        return after, tuple(e for e in effects if not isinstance(e, SendAdopted))
    return after, effects


# --- the gateway's side --------------------------------------------------------------------------


def dispatches_one_up(ledger: Ledger, what: Any) -> LedgerStep:
    """The gateway takes e + 1 for a re-dispatch, as a move does."""
    after, effects = gateway.step(ledger, what)
    if isinstance(what, gateway.Redispatch) and after.phase == "dispatching":
        after = replace(after, epoch=ledger.epoch + 1)
    return after, effects


def checks_epoch_only(ledger: Ledger, what: Any) -> LedgerStep:
    """Tokens count if their epoch is right, whoever sent them; with re-dispatch at e + 1."""
    if isinstance(what, msg.Tokens) and what.epoch == ledger.epoch:
        what = replace(what, owner=ledger.owner)
    return dispatches_one_up(ledger, what)


def keeps_early(ledger: Ledger, what: Any) -> LedgerStep:
    """Early tokens survive a change of owner."""
    after, effects = gateway.step(ledger, what)
    return (replace(after, early=ledger.early) if after.epoch != ledger.epoch else after), effects


def grants_too_much(ledger: Ledger, what: Any) -> LedgerStep:
    """A reclaim is granted unless the target already owns the request."""
    if isinstance(what, msg.Reclaim) and ledger.phase != "ended" and ledger.epoch != what.epoch + 1:
        after = replace(ledger, owner=what.owner, epoch=what.epoch + 2, early=(), granted_from=what.epoch)
        return after, (Tell(what.owner, msg.Granted(request=ledger.request, from_epoch=what.epoch, epoch=after.epoch)),)
    return gateway.step(ledger, what)


def grants_once(ledger: Ledger, what: Any) -> LedgerStep:
    """A repeated reclaim is not granted again."""
    after, effects = gateway.step(ledger, what)
    return replace(after, granted_from=-1) if isinstance(what, msg.Reclaim) and after != ledger else after, effects


def drops_its_owner(ledger: Ledger, what: Any) -> LedgerStep:
    """A late `Adopted` is answered with `Drop` even to the owner, who may be waiting for its grant."""
    after, effects = gateway.step(ledger, what)
    if isinstance(what, msg.Adopted) and what.owner == ledger.owner and what.epoch + 1 < ledger.epoch:
        effects = (Tell(what.owner, msg.Drop(request=ledger.request, epoch=what.epoch + 1)),)
    return after, effects


def flips_anything(ledger: Ledger, what: Any) -> LedgerStep:
    """`Adopted` flips the ledger whatever its epoch is."""
    if isinstance(what, msg.Adopted) and ledger.phase == "running" and what.epoch + 1 != ledger.epoch:
        what = replace(what, epoch=ledger.epoch)
    return gateway.step(ledger, what)


def flips_without_tail(ledger: Ledger, what: Any) -> LedgerStep:
    """`Adopted` brings no tokens."""
    if isinstance(what, msg.Adopted):
        what = replace(what, first=ledger.delivered, ids=())
    return gateway.step(ledger, what)


def flips_silently(ledger: Ledger, what: Any) -> LedgerStep:
    """The flip says no fact."""
    after, effects = gateway.step(ledger, what)
    return after, tuple(e for e in effects if not isinstance(e, Record))


MOVE = Config("move", Budget(moves=("AB",)))
LOSSY = Config("move, loss", Budget(moves=("AB",), losses=1), tokens=1)
AGAIN = Config("move twice", Budget(moves=("AB", "AB")), tokens=1)
BACK = Config("move and back", Budget(moves=("AB", "BA")), tokens=1)
MOVE_LATE = Config("move, one late message", Budget(moves=("AB",), repeats=1), tokens=1)
ELSEWHERE = Config("two suspicions", Budget(suspicions=2), tokens=1)
DOUBTED = Config("move, suspicion", Budget(moves=("AB",), suspicions=1))
TWICE_DOUBTED = Config("move, two suspicions", Budget(moves=("AB",), suspicions=2), tokens=1)

MUTANTS = (
    Mutant("source resumes by itself after Final", Machines(seat=resumes_by_itself), MOVE),
    Mutant("target frees by itself after it adopted", Machines(seat=frees_after_adopting), MOVE),
    Mutant("source releases before a decision", Machines(seat=releases_at_once), MOVE),
    Mutant("Drop touches newer epochs", Machines(seat=drops_newer), ELSEWHERE),
    Mutant("no tail in Adopted", Machines(flips_without_tail, forgets_the_tail), MOVE),
    Mutant("a move reserves again", Machines(seat=reserves_again), MOVE_LATE),
    Mutant("a move begins before the last one's freeze is over", Machines(seat=lets_moves_overlap), AGAIN),
    Mutant("an older dispatch passes a reservation", Machines(seat=forgets_offered_epochs), TWICE_DOUBTED),
    Mutant(
        "a dispatch of a lost run is not answered",
        Machines(seat=ignores_old_dispatches),
        Config("cold", Budget(failures=1, losses=2), is_cold=True, tokens=1),
    ),
    Mutant("source never asks", Machines(seat=never_asks), LOSSY),
    Mutant(
        "a reservation has no lease",
        Machines(seat=forgets_the_lease),
        LOSSY,
    ),
    Mutant("Adopted is said once", Machines(seat=says_adopted_once), LOSSY),
    Mutant("re-dispatch at e + 1", Machines(ledger=dispatches_one_up), DOUBTED),
    Mutant("the ledger checks the epoch only", Machines(ledger=checks_epoch_only), DOUBTED),
    Mutant("early tokens survive a flip", Machines(ledger=keeps_early), DOUBTED),
    Mutant("reclaim is granted unless the target owns", Machines(ledger=grants_too_much), DOUBTED),
    Mutant("reclaim is granted once", Machines(ledger=grants_once), LOSSY),
    Mutant("the ledger drops its own owner", Machines(ledger=drops_its_owner), BACK),
    Mutant("Adopted flips at any epoch", Machines(ledger=flips_anything), MOVE),
    Mutant("a flip without its fact", Machines(ledger=flips_silently), MOVE),
)
