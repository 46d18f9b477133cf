"""One transition of the modelled cluster: the shells' part, and the invariants every state must keep.

The protocol is the production code (`ledger.step`, `seat.step`). The shells around it do what the real ones do
(`instance/acts.py`, `api/gateway/gateway.py`), reduced to one request.
"""

from __future__ import annotations

from typing import Any

from midstream.control.events import MigrationCommitted
from midstream.control.ids import Node, Owner
from midstream.migration.plan import RECOMPUTE
from midstream.migration.protocol import effects as fx
from midstream.migration.protocol import ledger as gateway
from midstream.migration.protocol import messages as msg
from midstream.migration.protocol import seat as instance
from midstream.migration.protocol.seat import Seat
from tests.migration.world import (
    FINGERPRINT,
    GATEWAY,
    LINEAGES,
    REQUEST,
    SPEC,
    Broken,
    Machines,
    Packet,
    Slot,
    Work,
    World,
    history,
    is_holding,
    node_of,
    owner_of,
)


class Scene:
    """One transition: a world opened for change. Every method leaves the invariants it can see checked."""

    def __init__(
        self,
        world: World,
        machines: Machines,
        tokens: int,
        *,
        is_incremental: bool = True,
        keeps_stale: bool = False,
        dead: dict[Any, dict[Packet, bool]] | None = None,
    ) -> None:
        self.machines = machines
        self.dead = {} if dead is None else dead
        """What is known of `is_dead`, by everything it depends on."""
        self.tokens = tokens
        self.is_incremental = is_incremental
        self.keeps_stale = keeps_stale
        self.ledger, self.last, self.budget = world.ledger, world.last, world.budget
        self.seats = list(world.seats)
        self.engines = list(world.engines)
        self.net = set(world.net)
        self.work = set(world.work)
        self.late = world.late
        self.excused = world.excused
        self.drop_open, self.is_cut_short = world.drop_open, world.is_cut_short

    def world(self) -> World:
        """The world after the transition. Raises `Broken`."""
        self._check()
        seats = tuple(self.seats)
        return World(
            self.ledger,
            self.last,
            seats,
            tuple(self.engines),
            self._living(seats),
            frozenset(self.work),
            self.budget,
            self.late,
            self.excused,
            self.drop_open,
            self.is_cut_short,
        )

    def spend(self, **what: int) -> None:
        """Take faults from the budget."""
        self.budget = self.budget._replace(**{k: getattr(self.budget, k) - n for k, n in what.items()})

    # --- the gateway -----------------------------------------------------------------------------

    def feed_ledger(self, what: Any) -> None:
        """One input to the ledger, its effects performed and checked."""
        before = self.ledger
        self.ledger, effects = self.machines.ledger(before, what)
        after = self.ledger
        if after.epoch < before.epoch or (after.owner != before.owner and after.epoch == before.epoch):
            raise Broken(f"epoch {before.epoch} of {before.owner} became {after.epoch} of {after.owner}")
        if isinstance(what, msg.Gone) and self._ends_drop(what):
            self.drop_open = False
        flips = 0
        for effect in effects:
            match effect:
                case fx.Tell(owner, message):
                    self.send(node_of(owner), GATEWAY, message)
                case fx.SendDispatch():
                    self.send_dispatch()
                case fx.Deliver(ids):
                    if isinstance(what, msg.Tokens) and (what.owner, what.epoch) != (before.owner, before.epoch):
                        raise Broken(f"tokens of {what.owner} at {what.epoch} were taken, the owner is {before.owner}")
                    self._deliver(ids)
                case fx.Record(MigrationCommitted() as event):
                    flips += 1
                    if after.epoch != before.epoch + 1 or after.owner != event.owner or event.epoch != before.epoch:
                        raise Broken("MigrationCommitted without a flip")
                case _:
                    pass
        if isinstance(what, msg.Adopted) and after.epoch != before.epoch and flips != 1:
            raise Broken("a flip without MigrationCommitted")
        if before.phase != "ended" and after.phase == "ended":
            self.drop_open = after.owner != gateway.NOBODY

    def _ends_drop(self, what: msg.Gone) -> bool:
        return what.owner == self.ledger.owner and what.epoch == self.ledger.epoch and self.ledger.phase == "ended"

    def _deliver(self, ids: tuple[int, ...]) -> None:
        for token in ids:
            if token // LINEAGES != self.last:
                raise Broken(f"token {history(token)} was delivered after {history(self.last)}")
            self.last = token

    def send_dispatch(self) -> None:
        """`Dispatch` with everything delivered."""
        owner, epoch, delivered = self.ledger.owner, self.ledger.epoch, history(self.last)
        message = msg.Dispatch(request=REQUEST, owner=owner, epoch=epoch, spec=SPEC, delivered=delivered)
        self.send(node_of(owner), GATEWAY, message)

    def send(self, to: Node, sender: Node, message: Any) -> None:
        """Into the network; a message to an incarnation that is gone reaches nobody."""
        if isinstance(message, msg.Acknowledge):
            self.net = {p for p in self.net if not (p.to == owner_of(to) and isinstance(p.message, msg.Acknowledge))}
        if to == GATEWAY:
            self.net.add(Packet(None, sender, message))
        elif any(seat.me == owner_of(to) for seat in self.seats):
            self.net.add(Packet(owner_of(to), sender, message))

    # --- an instance -----------------------------------------------------------------------------

    def feed_seat(self, at: int, what: Any) -> None:
        """One input to the seat of instance `at`, its effects performed in order."""
        rules = instance.Rules(here=node_of(self.seats[at].me), block_bytes=1)
        self.seats[at], effects = self.machines.seat(self.seats[at], what, rules)
        for effect in effects:
            self._perform(at, effect)

    def slot(self, at: int, name: str) -> Slot | None:
        """A slot that is there."""
        return next((s for s in self.engines[at] if s.name == name), None)

    def put(self, at: int, slot: Slot) -> None:
        """Add or change a slot."""
        rest = [s for s in self.engines[at] if s.name != slot.name]
        self.engines[at] = tuple(sorted([*rest, slot]))

    def free(self, at: int, name: str) -> None:
        """Take a slot away."""
        self.engines[at] = tuple(s for s in self.engines[at] if s.name != name)

    def _perform(self, at: int, effect: fx.Effect) -> None:
        here = node_of(self.seats[at].me)
        match effect:
            case fx.Send(to, message):
                self.send(to, here, message)
            case fx.Submit(name, dispatch):
                if self.slot(at, name) is not None:
                    raise Broken(f"slot {name} was started twice")
                state = "finished" if len(dispatch.delivered) >= self.tokens else "running"
                self.put(at, Slot(name, state, dispatch.epoch, dispatch.delivered))
            case fx.Abort(name):
                self.free(at, name)
            case fx.Reserve(name, prepare):
                self.work.add(Work("reserve", at, name, prepare.migration, prepare.blocks))
            case fx.SendPrepare(name, migration):
                self._send_prepare(at, name, migration)
            case fx.Copy(name, migration, first):
                self.work.add(Work("copy", at, name, migration, first))
            case fx.StopWork(migration):
                self.work -= {w for w in self.work if w.at == at and w.kind == "copy" and w.migration == migration}
            case fx.Freeze(name, migration):
                self.work.add(Work("freeze", at, name, migration))
            case fx.Thaw(name):
                slot = self.slot(at, name)
                if slot is not None and slot.state == "frozen":
                    self.put(at, slot._replace(state="running"))
            case fx.SendFinal(name, migration, state):
                self._send_final(at, migration, state)
            case fx.Adopt(name, final):
                self.work.add(Work("adopt", at, name, final.migration, final))
            case fx.SendAdopted(name, migration, epoch, first):
                self._send_adopted(at, name, migration, epoch, first)
            case fx.ResendTokens(name):
                self.resend(at, name)
            case _:
                pass

    def _send_prepare(self, at: int, name: str, migration: str) -> None:
        seat, slot = self.seats[at], self.slot(at, name)
        if seat.run is None or seat.run.move is None or slot is None:
            return
        message = msg.Prepare(
            request=REQUEST,
            migration=migration,
            epoch=seat.run.epoch,
            source=seat.me,
            target=seat.run.move.target,
            gateway=seat.run.gateway,
            fingerprint=FINGERPRINT,
            spec=SPEC,
            outputs=(),
            blocks=0 if seat.run.move.mode == RECOMPUTE else slot.blocks,
            transfers=("rpc",),
        )
        self.send(seat.run.move.node, node_of(seat.me), message)

    def _send_final(self, at: int, migration: str, state: msg.RunState) -> None:
        seat = self.seats[at]
        assert seat.run is not None
        assert seat.run.move is not None
        message = msg.Final(
            request=REQUEST,
            migration=migration,
            epoch=seat.run.epoch,
            target=seat.run.move.target,
            state=state,
            acknowledged=seat.run.acknowledged,
            frozen_at_us=0,
        )
        self.send(seat.run.move.node, node_of(seat.me), message)

    def _send_adopted(self, at: int, name: str, migration: str, epoch: int, first: int) -> None:
        seat, slot = self.seats[at], self.slot(at, name)
        if seat.run is None or slot is None:
            return
        message = msg.Adopted(
            request=REQUEST,
            owner=seat.me,
            migration=migration,
            epoch=epoch,
            first=first,
            ids=slot.tokens[first:],
            finish="stop" if slot.state == "finished" else None,
        )
        self.send(seat.run.gateway, node_of(seat.me), message)

    def resend(self, at: int, name: str) -> None:
        """`Tokens` with all that is not acknowledged."""
        seat, slot = self.seats[at], self.slot(at, name)
        run = seat.run
        if run is None or run.slot != name or slot is None or not run.is_confirmed:
            return
        if len(slot.tokens) > run.acknowledged or slot.state == "finished":
            self.send_tokens(at, slot, run.acknowledged)

    def send_tokens(self, at: int, slot: Slot, first: int) -> None:
        """`Tokens` from index `first` on."""
        seat = self.seats[at]
        assert seat.run is not None
        message = msg.Tokens(
            request=REQUEST,
            owner=seat.me,
            epoch=seat.run.epoch,
            first=first,
            ids=slot.tokens[first:],
            finish="stop" if slot.state == "finished" else None,
        )
        self.send(seat.run.gateway, node_of(seat.me), message)

    # --- messages that are too late --------------------------------------------------------------

    def _living(self, seats: tuple[Seat, ...]) -> frozenset[Packet]:
        if self.keeps_stale:
            return frozenset(self.net)
        known = self.dead.setdefault((self.ledger, self.drop_open, seats), {})
        for packet in self.net:
            if packet not in known:
                known[packet] = self.is_dead(packet)
        return frozenset(packet for packet in self.net if not known[packet])

    def is_dead(self, packet: Packet) -> bool:
        """Can the delivery of this message, and whatever answers it, change nothing any more.

        What changes nothing now changes nothing later, because epochs seen, acknowledgements, closed moves and
        the end only grow; except what the gateway hears about its present epoch: the phase it hears it in matters.
        """
        message = packet.message
        if packet.to is None:
            epoch = message.epoch + isinstance(message, msg.Adopted)
            if self.ledger.phase != "ended" and epoch >= self.ledger.epoch:
                return False
            if isinstance(message, msg.Gone) and self._ends_drop(message):
                return not self.drop_open
            after, effects = self.machines.ledger(self.ledger, message)
            return after == self.ledger and all(self._is_dead_answer(GATEWAY, effect) for effect in effects)
        for seat in self.seats:
            if seat.me == packet.to:
                here = node_of(seat.me)
                rules = instance.Rules(here=here, block_bytes=1)
                after, effects = self.machines.seat(seat, instance.From(packet.sender, message), rules)
                return after == seat and all(self._is_dead_answer(here, effect) for effect in effects)
        return True

    def _is_dead_answer(self, sender: Node, effect: fx.Effect) -> bool:
        match effect:
            case fx.Send(to, message):
                return self.is_dead(Packet(None if to == GATEWAY else owner_of(to), sender, message))
            case fx.Tell(owner, message):
                return self.is_dead(Packet(owner, GATEWAY, message))
        return False

    # --- invariants of a state -------------------------------------------------------------------

    def _check(self) -> None:
        owners: dict[int, Owner] = {self.ledger.epoch: self.ledger.owner}
        for seat in self.seats:
            if seat.run is not None and owners.setdefault(seat.run.epoch, seat.me) != seat.me:
                raise Broken(f"{seat.me} and {owners[seat.run.epoch]} both hold epoch {seat.run.epoch}")
        for at, seat in enumerate(self.seats):
            self._check_instance(at, seat)
        self._check_owner()
        if len(history(self.last)) != self.ledger.delivered:
            raise Broken(f"the ledger counts {self.ledger.delivered} tokens, the client has {history(self.last)}")

    def _check_instance(self, at: int, seat: Seat) -> None:
        run, held = seat.run, seat.reservation
        if run is not None and held is not None:
            raise Broken(f"{seat.me} holds a run and a reservation")
        known = {run.slot if run is not None else "", held.slot if held is not None else ""}
        for slot in self.engines[at]:
            if slot.name not in known:
                raise Broken(f"slot {slot.name} on {seat.me} belongs to nobody")
        if run is not None and run.move is not None and run.move.phase in ("final", "doubt"):
            slot = self.slot(at, run.slot)
            if slot is not None and slot.state != "frozen":
                raise Broken(f"{seat.me} runs on in phase {run.move.phase}")

    def _check_owner(self) -> None:
        """Whom the ledger heard as owner holds the run, unless it crashed or its engine lost it."""
        ledger = self.ledger
        if ledger.phase != "running" or (ledger.owner, ledger.epoch) in self.excused:
            return
        for seat in self.seats:
            if seat.me == ledger.owner and not is_holding(seat, ledger):
                raise Broken(f"{ledger.owner} owns the request at {ledger.epoch} and has let it go")
