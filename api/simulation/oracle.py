"""What must hold after a simulated run, whatever happened in it. Each breach is one line that names its promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from midstream.api.simulation.cluster import Cluster, Outcome
from midstream.control.codec import decode_state
from midstream.control.events import (
    CommandRefused,
    Entry,
    MigrationAborted,
    MigrationCommitted,
    MoveDecided,
    MoveRejected,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    StateCarried,
    TaskFailed,
)
from midstream.control.fold import fold
from midstream.control.ids import START
from midstream.control.replay import each_once, verify
from midstream.instance.engines.sim.reference import reference_output

HISTORY_PAGE = 10_000
SHOWN_MAX = 5
"""Breaches seen during the run that are told; one fault makes many."""


async def breaches(cluster: Cluster) -> list[str]:
    """Every broken promise of a run that has settled."""
    entries = await history(cluster)
    found = [*cluster.world.breaches[:SHOWN_MAX], *_clients(cluster)]
    found += _memory(cluster)
    found += _log(cluster, entries)
    found += [f"P19 hole: {hole}" for hole in await cluster.world.archive.holes()]
    found += _replay(entries)
    found += _repeats(entries)
    return found


async def history(cluster: Cluster) -> list[Entry]:
    """The whole archived log."""
    entries: list[Entry] = []
    after = START
    while page := await cluster.world.archive.history(after, HISTORY_PAGE):
        entries += page
        after = page[-1].position
    return entries


def _clients(cluster: Cluster) -> Iterable[str]:
    """P02, P03, P04, P06: every client got exactly the undisturbed run, or as much of it as it wanted."""
    for outcome in cluster.outcomes:
        spec = outcome.arrival.spec
        expected, finish = reference_output(spec, cluster.scenario.engines["a"])
        got = tuple(outcome.ids)
        if got != expected[: len(got)]:
            at = next(i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b) if expected else 0
            yield f"P03 {spec.request}: token {at} of {len(got)} differs from the undisturbed run"
        elif not (outcome.has_left or outcome.is_cut_off):
            yield from _ending(outcome, len(expected), finish)


def _ending(outcome: Outcome, tokens: int, finish: str) -> Iterable[str]:
    name = outcome.arrival.spec.request
    if outcome.error is not None:
        yield f"P04 {name}: failed with {outcome.error}"
    elif (len(outcome.ids), outcome.finish) != (tokens, finish):
        yield f"P04 {name}: {len(outcome.ids)} tokens and {outcome.finish}, not {tokens} and {finish}"


def _memory(cluster: Cluster) -> Iterable[str]:
    """P07, P08: everything is free again."""
    for node in cluster.llumlets.values():
        account = node.engine.account()
        if account.free != account.total:
            yield f"P07 {node.name}: {account} when all is quiet"
        held = [seat.request for seat in node.llumlet.seats.values() if not seat.is_empty]
        if held:
            yield f"P08 {node.name}: still holds {', '.join(held)}"


def _log(cluster: Cluster, entries: list[Entry]) -> Iterable[str]:
    """P01, P04, P14, P18 as the log shows them."""
    ends: Counter[str] = Counter()
    flips: Counter[tuple[str, int]] = Counter()
    for entry in each_once(entries):
        match entry.fact.event:
            case RequestFinished() | RequestCancelled() | RequestFailed() as event:
                ends[event.request] += 1
            case MigrationCommitted() as event:
                flips[(event.request, event.epoch)] += 1
            case TaskFailed() as event:
                yield f"P14 {entry.fact.source}: task {event.task} failed: {event.error}"
    yield from (f"P01 {key} flipped {count} times" for key, count in flips.items() if count > 1)
    yield from _decisions(entries)
    for outcome in cluster.outcomes:
        count = ends[outcome.arrival.spec.request]
        if count != 1 and not (count == 0 and (outcome.is_cut_off or outcome.is_untold)):
            yield f"P04 {outcome.arrival.spec.request}: {count} terminal facts"
    yield from _folds(cluster)


def _decisions(entries: list[Entry]) -> Iterable[str]:
    """P18: a request has one open move, and an order by hand is answered once.

    What a carried state does not know was lost with the log: it may be decided again.
    """
    open_moves: dict[str, tuple[str, int]] = {}
    answers: Counter[str] = Counter()
    for entry in each_once(entries):
        match entry.fact.event:
            case StateCarried() as event:
                known = decode_state(event.state.encode()).migrations.values()
                open_moves = {move.migration: (move.request, move.epoch) for move in known if move.is_open}
                answers = Counter(move.operation for move in known if move.operation is not None)
            case MoveDecided() as event:
                key = (event.request, event.epoch)
                if key in open_moves.values():
                    yield f"P18 {event.migration} was decided while another move of {key} was open"
                open_moves[event.migration] = key
                answers[event.operation or ""] += 1
            case MoveRejected() as event:
                answers[event.operation] += 1
            case MigrationAborted() | CommandRefused() as event:
                open_moves.pop(event.migration, None)
    del answers[""]
    yield from (f"P18 {operation} was answered {count} times" for operation, count in answers.items() if count > 1)


def _folds(cluster: Cluster) -> Iterable[str]:
    """P10, P21: when all is quiet no fold knows of any work."""
    state = cluster.gateways["g1"].follower.state
    ghosts = sorted(state.requests) + sorted(name for table in state.placed.values() for name in table)
    if ghosts:
        yield f"P21 the fold still knows requests: {', '.join(ghosts)}"
    busy = [name for name, view in state.instances.items() if view.load.running or view.load.waiting]
    if busy:
        yield f"P21 the fold still shows load on {', '.join(busy)}"
    open_moves = [move.migration for move in state.migrations.values() if move.is_open]
    if open_moves:
        yield f"P10 moves without an outcome: {', '.join(open_moves)}"


def _repeats(entries: list[Entry]) -> Iterable[str]:
    """P18, P19: what was said twice has the effect of once."""
    whole, once = fold(entries), fold(_without_repeats(entries))
    once.position = whole.position
    if whole != once:
        fields = [name for name in whole.__struct_fields__ if getattr(whole, name) != getattr(once, name)]
        yield f"P18 repeated facts changed the state: {', '.join(fields)}"


def _without_repeats(entries: Iterable[Entry]) -> Iterable[Entry]:
    """What a fold has not seen. A carried state replaces the fold, and with it what that has seen."""
    seen: dict[str, tuple[int, int]] = {}
    for entry in entries:
        fact = entry.fact
        number = (fact.incarnation, fact.source_seq)
        if number <= seen.get(fact.source, (0, 0)):
            continue
        if isinstance(fact.event, StateCarried):
            marks = decode_state(fact.event.state.encode()).sources
            seen = {source: (mark.incarnation, mark.seq) for source, mark in marks.items()}
        seen[fact.source] = number
        yield entry


def _replay(entries: list[Entry]) -> Iterable[str]:
    """P17: the archived log alone leads to the same decisions."""
    report = verify(entries)
    if report.first_difference is not None:
        yield f"P17 replay differs: {report.first_difference}"
