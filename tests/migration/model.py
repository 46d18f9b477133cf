"""Explicit-state check of the two protocol machines: every reachable world, its invariants, and a way out of each.

`python -m tests.migration.model [--deep] [NAME...]` explores the configurations and prints states and violations.
Safety is checked in every transition (world.py). Liveness: from every state an end is reachable in which the
client has all tokens (or went away) and nothing is held anywhere, by transitions that are no faults.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple

from midstream.control.commands import StartMigration
from midstream.control.ids import Owner
from midstream.migration.protocol import ledger as gateway
from midstream.migration.protocol import messages as msg
from midstream.migration.protocol import seat as instance
from midstream.migration.protocol.ledger import Ledger
from midstream.migration.protocol.seat import Seat
from midstream.migration.protocol.work import Reserved, RoundReport

from tests.migration.world import (
    BLOCKS,
    GATEWAY,
    LINEAGES,
    REQUEST,
    Broken,
    Budget,
    Machines,
    Packet,
    Scene,
    Slot,
    Work,
    World,
    history,
    is_holding,
    leftovers,
    node_of,
    token_after,
)

EMPTY_BLOCK = -1
"""What a full block holds: it never changes, so any mark will do."""


class Config(NamedTuple):
    """One thing to explore. `is_cold`: the first `Dispatch` is still on its way."""

    name: str
    budget: Budget
    instances: int = 2
    tokens: int = 2
    is_cold: bool = False
    is_waiting: bool = False
    """The request has no KV yet, so it moves without."""
    is_incremental: bool = True
    """Each step's output is sent once as it comes; otherwise all that is unacknowledged, each time."""


class Act(NamedTuple):
    """One thing that can happen next."""

    do: Callable[..., None]
    args: tuple[Any, ...] = ()
    is_fault: bool = False


class Step(NamedTuple):
    """One line of a trace."""

    what: str
    world: World


class Report(NamedTuple):
    """What an exploration found. `is_complete`: every reachable state was visited."""

    states: int
    transitions: int
    is_complete: bool
    violation: str | None
    trace: tuple[str, ...]
    seconds: float


def first_world(config: Config) -> World:
    """The request was just dispatched to A, or runs there already."""
    owners = [Owner("ABC"[i], 1) for i in range(config.instances)]
    seats = tuple(Seat(me=owner, request=REQUEST) for owner in owners)
    start = World(Ledger(request=REQUEST), 1, seats, ((),) * len(seats), frozenset(), frozenset(), config.budget)
    scene = Scene(start, Machines(), config.tokens)
    scene.feed_ledger(gateway.Redispatch(owners[0]))
    if config.is_cold:
        return scene.world()
    for _ in range(2):
        for packet in list(scene.net):
            deliver(scene, packet)
    if config.is_waiting:
        scene.put(0, scene.engines[0][0]._replace(blocks=0))
    return scene.world()


# --- the network ---------------------------------------------------------------------------------


def deliver(scene: Scene, packet: Packet) -> None:
    """A message arrives."""
    scene.net.discard(packet)
    _receive(scene, packet)


def repeat(scene: Scene, packet: Packet) -> None:
    """A message arrives, and a copy of it will come later."""
    deliver(scene, packet)
    delay(scene, packet)


def delay(scene: Scene, packet: Packet) -> None:
    """A message will come at any time, however late."""
    scene.spend(repeats=1)
    scene.net.discard(packet)
    scene.late |= {packet}


def deliver_late(scene: Scene, packet: Packet) -> None:
    """A very late message arrives."""
    scene.late -= {packet}
    _receive(scene, packet)


def lose(scene: Scene, packet: Packet) -> None:
    """A message is lost."""
    scene.spend(losses=1)
    scene.net.discard(packet)


def _receive(scene: Scene, packet: Packet) -> None:
    if packet.to is None:
        scene.feed_ledger(packet.message)
        return
    for at, seat in enumerate(scene.seats):
        if seat.me == packet.to:
            scene.feed_seat(at, instance.From(packet.sender, packet.message))


# --- engines -------------------------------------------------------------------------------------


def decode(scene: Scene, at: int, slot: Slot) -> None:
    """A run makes one more token."""
    before = slot.tokens[-1] if slot.tokens else 1
    tokens = (*slot.tokens, token_after(before, slot.lineage))
    is_last = len(tokens) == scene.tokens
    slot = slot._replace(tokens=tokens, state="finished" if is_last else "running", blocks=BLOCKS)
    scene.put(at, slot)
    run = scene.seats[at].run
    if is_last:
        scene.work.add(Work("ended", at, slot.name))
    if run is not None and run.slot == slot.name and run.is_confirmed:
        scene.send_tokens(at, slot, len(tokens) - 1 if scene.is_incremental else run.acknowledged)


def work_done(scene: Scene, work: Work) -> None:
    """An engine did what it was asked to, or could not any more."""
    scene.work.discard(work)
    DONE[work.kind](scene, work)


def work_failed(scene: Scene, work: Work) -> None:
    """An engine fails to do what it was asked to."""
    scene.spend(failures=1)
    scene.work.discard(work)
    failure = {"reserve": instance.ReserveFailed, "adopt": instance.AdoptFailed}.get(work.kind, instance.WorkFailed)
    scene.feed_seat(work.at, failure(work.migration, "engine_failed", ""))


def _reserved(scene: Scene, work: Work) -> None:
    if scene.slot(work.at, work.slot) is not None:
        raise Broken(f"slot {work.slot} was reserved twice")
    scene.put(work.at, Slot(work.slot, "reserved", blocks=work.detail))
    reserved = Reserved(blocks=work.detail, cached=0, transfer="rpc", address="", handle=work.slot)
    scene.feed_seat(work.at, instance.ReserveDone(work.migration, work.slot, reserved))


def _copied(scene: Scene, work: Work) -> None:
    slot, run = scene.slot(work.at, work.slot), scene.seats[work.at].run
    move = run.move if run is not None else None
    prepared = move.prepared if move is not None and move.migration == work.migration else None
    target = _slot_of_handle(scene, prepared)
    if slot is None or slot.state == "finished" or target is None:
        scene.feed_seat(work.at, instance.WorkFailed(work.migration, "gone", ""))
        return
    is_all = slot.state == "frozen"
    content = (slot.tokens[-1] if slot.tokens else 1) if is_all else EMPTY_BLOCK
    at, into = target
    scene.put(at, into._replace(kv=(*into.kv[: work.detail], content)))
    done = work.detail + 1
    report = RoundReport(
        blocks=1, copied_bytes=1, duration_ms=1.0, next_block=done, blocks_left=slot.blocks - done, tokens=0
    )
    scene.feed_seat(work.at, instance.RoundDone(work.migration, report, 1.0))


def _slot_of_handle(scene: Scene, prepared: msg.Prepared | None) -> tuple[int, Slot] | None:
    for at, seat in enumerate(scene.seats):
        if prepared is not None and seat.me == prepared.owner:
            slot = scene.slot(at, prepared.handle)
            return (at, slot) if slot is not None and slot.state == "reserved" else None
    return None


def _freeze(scene: Scene, work: Work) -> None:
    """The engine reaches a step boundary; its answer is a second event."""
    slot = scene.slot(work.at, work.slot)
    if slot is None or slot.state == "finished":
        scene.feed_seat(work.at, instance.WorkFailed(work.migration, "gone", ""))
        return
    scene.put(work.at, slot._replace(state="frozen"))
    state = msg.RunState(
        spec=msg.RequestSpec(request=REQUEST, prompt=(), sampling=msg.Sampling()),
        outputs=slot.tokens,
        computed=len(slot.tokens),
        blocks=slot.blocks,
        rng=bytes([slot.lineage]),
    )
    scene.work.add(work._replace(kind="frozen", detail=state))


def _frozen(scene: Scene, work: Work) -> None:
    scene.feed_seat(work.at, instance.FreezeDone(work.migration, work.slot, work.detail))


def _adopted(scene: Scene, work: Work) -> None:
    slot, state = scene.slot(work.at, work.slot), work.detail.state
    if slot is None or slot.state != "reserved":
        scene.feed_seat(work.at, instance.AdoptFailed(work.migration, "gone", ""))
        return
    last = state.outputs[-1] if state.outputs else 1
    if state.blocks and slot.kv != (EMPTY_BLOCK, last):
        raise Broken(f"{slot.name} was adopted with KV {slot.kv} of {BLOCKS} blocks")
    scene.put(work.at, Slot(slot.name, "running", state.rng[0], state.outputs, state.blocks))
    scene.feed_seat(work.at, instance.AdoptDone(work.migration, work.slot, None))


def _ended(scene: Scene, work: Work) -> None:
    scene.feed_seat(work.at, instance.RunEnded(work.slot))


DONE = {
    "reserve": _reserved,
    "copy": _copied,
    "freeze": _freeze,
    "frozen": _frozen,
    "adopt": _adopted,
    "ended": _ended,
}


def lose_run(scene: Scene, at: int) -> None:
    """An engine refuses or loses a run: its gateway is told."""
    seat = scene.seats[at]
    assert seat.run is not None
    scene.spend(failures=1)
    _excuse(scene, at)
    refusal = msg.Rejected(request=REQUEST, owner=seat.me, epoch=seat.run.epoch, code="", reason="")
    scene.send(seat.run.gateway, node_of(seat.me), refusal)
    scene.free(at, seat.run.slot)
    scene.feed_seat(at, instance.RunLost(seat.run.slot))


def _excuse(scene: Scene, at: int) -> None:
    seat = scene.seats[at]
    if seat.run is not None:
        scene.excused |= {(seat.me, seat.run.epoch), (seat.me, seat.run.epoch + 2)}


# --- instances and their timers ------------------------------------------------------------------


def start_move(scene: Scene, at: int, target: Owner) -> None:
    """The next command of the budget arrives."""
    seat, moves = scene.seats[at], scene.budget.moves
    assert seat.run is not None
    migration = f"m{len(moves)}"
    command = StartMigration(
        id=migration,
        instance=seat.me.instance,
        incarnation=seat.me.incarnation,
        deadline_ms=0,
        migration=migration,
        request=REQUEST,
        epoch=seat.run.epoch,
        target=target,
        target_address=target.instance,
    )
    scene.feed_seat(at, instance.Start(command, node_of(target)))
    run = scene.seats[at].run
    if run is not None and run.move is not None and run.move.migration == migration:
        scene.budget = scene.budget._replace(moves=moves[1:])


def nudge(scene: Scene, at: int) -> None:
    """Time to repeat what was not answered. What is still on its way is not sent again."""
    before, sender = set(scene.net), node_of(scene.seats[at].me)
    under_way = {type(packet.message) for packet in before if packet.sender == sender}
    scene.feed_seat(at, instance.Nudge())
    run = scene.seats[at].run
    if run is not None:
        scene.resend(at, run.slot)
    scene.net = before | {p for p in scene.net if type(p.message) not in under_way}


def deadline(scene: Scene, at: int) -> None:
    """The open move has been in its phase for too long."""
    run = scene.seats[at].run
    assert run is not None
    assert run.move is not None
    scene.feed_seat(at, instance.Deadline(run.move.migration))


def lease(scene: Scene, at: int) -> None:
    """A reservation's lease ends."""
    held = scene.seats[at].reservation
    assert held is not None
    scene.feed_seat(at, instance.LeaseExpired(held.migration))


def gateway_lost(scene: Scene, at: int) -> None:
    """An instance wrongly takes its gateway for lost."""
    scene.spend(gateway_losses=1)
    _excuse(scene, at)
    scene.feed_seat(at, instance.GatewayLost(GATEWAY))


def crash(scene: Scene, at: int) -> None:
    """An instance dies with all it holds and starts again."""
    scene.spend(crashes=1)
    me = scene.seats[at].me
    scene.seats[at] = Seat(me=Owner(me.instance, me.incarnation + 1), request=REQUEST)
    scene.engines[at] = ()
    scene.net = {packet for packet in scene.net if packet.to != me}
    scene.late = frozenset(packet for packet in scene.late if packet.to != me)
    scene.work = {work for work in scene.work if work.at != at}


# --- the gateway ---------------------------------------------------------------------------------


def redispatch(scene: Scene, owner: Owner) -> None:
    """The gateway chose a new owner."""
    scene.feed_ledger(gateway.Redispatch(owner))


def resend_dispatch(scene: Scene) -> None:
    """No answer to a dispatch: again."""
    scene.send_dispatch()


def resend_drop(scene: Scene) -> None:
    """No answer to the last `Drop`: again."""
    drop = msg.Drop(request=REQUEST, epoch=scene.ledger.epoch)
    scene.send(node_of(scene.ledger.owner), GATEWAY, drop)


def probe(scene: Scene) -> None:
    """The owner has been silent: ask."""
    scene.send(node_of(scene.ledger.owner), GATEWAY, msg.Probe(request=REQUEST, epoch=scene.ledger.epoch))


def probe_needlessly(scene: Scene) -> None:
    """The owner seems silent: ask."""
    scene.spend(probes=1)
    probe(scene)


def owner_lost(scene: Scene) -> None:
    """The owner's incarnation is gone."""
    scene.feed_ledger(gateway.OwnerLost(scene.ledger.owner))


def suspect(scene: Scene) -> None:
    """The owner is wrongly taken for gone."""
    scene.spend(suspicions=1)
    owner_lost(scene)


def client_ends(scene: Scene) -> None:
    """The client goes away."""
    scene.spend(ends=1)
    scene.is_cut_short = True
    scene.feed_ledger(gateway.End())


# --- what can happen -----------------------------------------------------------------------------


def acts(world: World) -> Iterator[Act]:
    """Everything that can happen next."""
    budget = world.budget
    for packet in world.net:
        yield Act(deliver, (packet,))
        if budget.repeats:
            yield Act(repeat, (packet,), True)
            yield Act(delay, (packet,), True)
        if budget.losses:
            yield Act(lose, (packet,), True)
    for packet in world.late:
        yield Act(deliver_late, (packet,))
    for work in world.work:
        yield Act(work_done, (work,))
        if budget.failures and work.kind not in ("ended", "frozen"):
            yield Act(work_failed, (work,), True)
    for at in range(len(world.seats)):
        yield from _instance_acts(world, at)
    yield from _gateway_acts(world)


def _instance_acts(world: World, at: int) -> Iterator[Act]:
    seat, budget = world.seats[at], world.budget
    run = seat.run
    is_timer_due = world.ledger.phase != "ended" or not world.net
    for slot in world.engines[at]:
        if slot.state == "running":
            yield Act(decode, (at, slot))
    if seat.reservation is not None and is_timer_due:
        yield Act(lease, (at,))
    if budget.crashes and (world.engines[at] or seat.seen):
        yield Act(crash, (at,), True)
    if budget.gateway_losses and not seat.is_empty:
        yield Act(gateway_lost, (at,), True)
    if run is None:
        return
    if is_timer_due:
        yield Act(nudge, (at,))
    if run.move is not None:
        if is_timer_due:
            yield Act(deadline, (at,))
    elif budget.moves and budget.moves[0][0] == seat.me.instance:
        target = next(s.me for s in world.seats if s.me.instance == budget.moves[0][1])
        yield Act(start_move, (at, target))
    if budget.failures and not run.is_finished:
        yield Act(lose_run, (at,), True)


def _gateway_acts(world: World) -> Iterator[Act]:
    ledger, budget = world.ledger, world.budget
    owner = next((seat for seat in world.seats if seat.me == ledger.owner), None)
    if ledger.phase == "ended":
        if world.drop_open and owner is not None:
            yield Act(resend_drop)
        return
    if budget.ends:
        yield Act(client_ends, (), True)
    if owner is None:
        yield Act(owner_lost)
    elif budget.suspicions:
        yield Act(suspect, (), True)
    if ledger.phase == "seeking":
        for seat in world.seats:
            yield Act(redispatch, (seat.me,))
    elif ledger.phase == "dispatching":
        yield Act(resend_dispatch)
    elif owner is not None and not is_holding(owner, ledger):
        yield Act(probe)
    elif budget.probes:
        yield Act(probe_needlessly, (), True)


def is_goal(world: World, config: Config) -> bool:
    """The request is over as it should be and nothing is held for it."""
    is_right = world.is_cut_short or world.ledger.delivered == config.tokens
    return world.ledger.phase == "ended" and is_right and not world.work and not any(leftovers(world))


# --- exploring -----------------------------------------------------------------------------------


class Explorer:
    """Breadth-first search with parents, so that a trace is a shortest one."""

    def __init__(self, config: Config, machines: Machines, states_max: int) -> None:
        self.config = config
        self.machines = machines
        self.states_max = states_max
        self.worlds: list[World] = []
        self.index: dict[World, int] = {}
        self.parents: list[tuple[int, Act | None]] = []
        self.sources, self.targets = array("i"), array("i")
        """Transitions that are no faults."""
        self.transitions = 0

    def run(self, progress: Callable[[int, int], None] | None = None) -> Report:
        """Explore everything, or up to the first violation or `states_max`."""
        started = perf_counter()
        self._add(first_world(self.config), -1, None)
        at = 0
        while at < len(self.worlds) and len(self.worlds) < self.states_max:
            for act in acts(self.worlds[at]):
                broken = self._try(at, act)
                if broken is not None:
                    return self._report(started, False, broken, (*self.trace(at), describe(act)))
            at += 1
            if progress is not None and at % 10_000 == 0:
                progress(at, len(self.worlds))
        is_complete = at == len(self.worlds)
        stuck = self._stuck() if is_complete else None
        if stuck is not None:
            left = ", ".join(leftovers(self.worlds[stuck])) or "nothing held"
            return self._report(started, is_complete, f"no way to the end from here ({left})", self.trace(stuck))
        return self._report(started, is_complete, None, ())

    def _report(self, started: float, is_complete: bool, violation: str | None, trace: tuple[str, ...]) -> Report:
        took = perf_counter() - started
        return Report(len(self.worlds), self.transitions, is_complete, violation, trace, took)

    def _add(self, world: World, parent: int, act: Act | None) -> int:
        known = self.index.get(world)
        if known is not None:
            return known
        self.index[world] = len(self.worlds)
        self.worlds.append(world)
        self.parents.append((parent, act))
        return len(self.worlds) - 1

    def _try(self, at: int, act: Act) -> str | None:
        scene = Scene(self.worlds[at], self.machines, self.config.tokens, self.config.is_incremental)
        try:
            act.do(scene, *act.args)
            after = scene.world()
        except Broken as broken:
            return str(broken)
        self.transitions += 1
        to = self._add(after, at, act)
        if not act.is_fault and to != at:
            self.sources.append(at)
            self.targets.append(to)
        return None

    def trace(self, at: int) -> tuple[str, ...]:
        """What led to a state, one line each."""
        lines: list[str] = []
        while True:
            parent, act = self.parents[at]
            if act is None:
                return tuple(reversed(lines))
            lines.append(describe(act))
            at = parent

    def _stuck(self) -> int | None:
        """The first state from which no end can be reached without a fault."""
        into: list[list[int]] = [[] for _ in self.worlds]
        for source, target in zip(self.sources, self.targets, strict=True):
            into[target].append(source)
        good = bytearray(len(self.worlds))
        queue = deque(i for i, world in enumerate(self.worlds) if is_goal(world, self.config))
        for i in queue:
            good[i] = 1
        while queue:
            for source in into[queue.popleft()]:
                if not good[source]:
                    good[source] = 1
                    queue.append(source)
        return None if all(good) else good.index(0)


def describe(act: Act) -> str:
    """One line of a trace."""
    name = act.do.__name__.replace("_", " ")
    return f"{name} {', '.join(_brief(arg) for arg in act.args)}".rstrip()


def _brief(arg: Any) -> str:
    match arg:
        case Packet(to, sender, message):
            fields = ("migration", "epoch", "from_epoch", "first", "delivered", "finish")
            shown = [f"{f}={getattr(message, f)}" for f in fields if getattr(message, f, None) is not None]
            if isinstance(message, msg.Tokens | msg.Adopted):
                shown.append(f"ids={len(message.ids)}")
            return f"{type(message).__name__}({', '.join(shown)}) {sender.name}#{sender.incarnation} -> {to or 'gateway'}"
        case Work(kind, at, slot, migration):
            return f"{kind} {migration or slot} at {'ABC'[at]}"
        case Slot(name):
            return name
        case int():
            return f"at {'ABC'[arg]}"
        case _:
            return str(arg)


def explore(
    config: Config,
    machines: Machines | None = None,
    states_max: int = 2_000_000,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Check one configuration."""
    return Explorer(config, machines or Machines(), states_max).run(progress)
