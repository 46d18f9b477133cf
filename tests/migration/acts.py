"""Everything that can happen to the modelled cluster: messages, engines, timers, faults.

Engines and network do the worst that their contracts allow: messages come in any order, engines answer as late
as they like, timers fire at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from midstream.control.commands import StartMigration
from midstream.control.ids import Owner
from midstream.migration.protocol import ledger as gateway
from midstream.migration.protocol import messages as msg
from midstream.migration.protocol import seat as instance
from midstream.migration.protocol.seat import Seat
from midstream.migration.protocol.work import Reserved, RoundReport
from tests.migration.scene import Scene
from tests.migration.world import (
    BLOCKS,
    GATEWAY,
    REQUEST,
    SPEC,
    Broken,
    Packet,
    Slot,
    Work,
    World,
    is_holding,
    node_of,
    token_after,
)

EMPTY_BLOCK = -1
"""What a full block holds: it never changes, so any mark will do."""


class Act(NamedTuple):
    """One thing that can happen next."""

    do: Callable[..., None]
    args: tuple[Any, ...] = ()
    is_fault: bool = False


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
    first, is_all = work.detail, slot.state == "frozen"
    last = slot.tokens[-1] if slot.tokens else 1
    content = (*(EMPTY_BLOCK,) * (slot.blocks - 1 - first), last) if is_all else (EMPTY_BLOCK,)
    at, into = target
    scene.put(at, into._replace(kv=(*into.kv[:first], *content)))
    count, done = len(content), first + len(content)
    report = RoundReport(
        blocks=count, copied_bytes=count, duration_ms=1.0, next_block=done, blocks_left=slot.blocks - done, tokens=0
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
        spec=SPEC,
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
        mode=scene.budget.mode,
    )
    scene.feed_seat(at, instance.Start(command, node_of(target)))
    run = scene.seats[at].run
    if run is not None and run.move is not None and run.move.migration == migration:
        scene.budget = scene.budget._replace(moves=moves[1:])


def nudge(scene: Scene, at: int) -> None:
    """Time to repeat what was not answered."""
    scene.feed_seat(at, instance.Nudge())
    run = scene.seats[at].run
    if run is not None:
        scene.resend(at, run.slot)


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
    for slot in world.engines[at]:
        if slot.state == "running":
            yield Act(decode, (at, slot))
    if seat.reservation is not None:
        yield Act(lease, (at,))
    if budget.crashes and (world.engines[at] or seat.seen):
        yield Act(crash, (at,), True)
    if budget.gateway_losses and not seat.is_empty:
        yield Act(gateway_lost, (at,), True)
    if run is None:
        return
    yield Act(nudge, (at,))
    if run.move is not None:
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
