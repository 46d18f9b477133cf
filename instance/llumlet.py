"""The llumlet: the asyncio agent beside one engine. It serves requests, reports load and carries out moves.

What to do is decided by the pure `migration.protocol.seat`; this shell feeds it inputs (messages,
commands, engine completions, timers) and performs the effects it returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog

from midstream.control.events import DrainRequested, InstanceRegistered, InstanceStopped, RunsDropped
from midstream.control.ids import Node, Owner
from midstream.control.ports import Clock, FactLog, Recorder
from midstream.control.supervise import Supervisor
from midstream.instance.acts import Acts
from midstream.instance.engines.base import Engine, Output
from midstream.instance.orders import read_orders
from midstream.instance.reporter import report_load, report_requests
from midstream.instance.settings import SEATS_MAX, LlumletSettings
from midstream.migration.plan import final_copy_max_ms
from midstream.migration.protocol.effects import ResendTokens
from midstream.migration.protocol.messages import AnyMessage, Ping, Pong, Rejected, Tokens
from midstream.migration.protocol.seat import (
    Deadline,
    From,
    GatewayLost,
    Input,
    LeaseExpired,
    Nudge,
    Rules,
    Run,
    RunEnded,
    RunLost,
    Seat,
    step,
)
from midstream.migration.wires.base import Wire

IDLE_HOUSEKEEPING_S = 1.0
"""How often an instance that holds nothing looks whether it may forget."""

logger = structlog.get_logger(__name__)


class Llumlet:
    """One instance's agent. `start` returns once it is registered and serving; `stop` leaves nothing behind.

    `ended` resolves, with a reason, only when the engine has died: the process should then exit.
    """

    ended: asyncio.Future[str]

    def __init__(
        self,
        *,
        instance: str,
        engine: Engine,
        wire: Wire,
        log: FactLog,
        recorder: Recorder,
        clock: Clock,
        settings: LlumletSettings,
    ) -> None:
        self.engine = engine
        self.wire = wire
        self.log = log
        self.recorder = recorder
        self.clock = clock
        self.settings = settings
        self.me = Owner(instance, wire.node.incarnation)
        self.seats: dict[str, Seat] = {}
        self._held: dict[str, Seat] = {}
        """Those that are not empty: what time has to look at."""
        self.activity = asyncio.Event()
        """Set whenever work may have appeared: wakes idle housekeeping."""
        self.news = asyncio.Event()
        """Set whenever the load may have changed: wakes the load reports."""
        self.tasks = Supervisor(recorder)
        self.acts = Acts(self)
        self._gateways: dict[Node, float] = {}
        self._since: dict[str, tuple[str, float]] = {}
        self._empty_since: dict[str, float] = {}
        self._nudged_at = 0.0

    @property
    def now(self) -> float:
        """The event loop's time, seconds."""
        return asyncio.get_running_loop().time()

    @property
    def rules(self) -> Rules:
        """What the seats need to know of this instance."""
        return Rules(
            here=self.wire.node,
            block_bytes=self.engine.fingerprint.block_bytes,
            limits=self.settings.plan,
            round_trip_ms=self.settings.round_trip_ms,
        )

    # --- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine, listen, register, and keep the loops alive."""
        await self.engine.start()
        await self.wire.start(self.receive)
        self._rules = self.rules
        self.register()
        self.ended = asyncio.get_running_loop().create_future()
        self.tasks.spawn("engine watch", self._watch_engine())
        self.tasks.loop("engine outputs", self._pump_outputs)
        self.tasks.loop("housekeeping", self._keep_house)
        self.tasks.loop("orders", lambda: read_orders(self))
        self.tasks.loop("load reports", lambda: report_load(self))
        self.tasks.loop("request reports", lambda: report_requests(self))

    async def _watch_engine(self) -> None:
        """A dead engine holds nothing any more: say so to the gateways at once, and end."""
        reason = await self.engine.failed()
        logger.error("engine failed", instance=str(self.me), reason=reason)
        self._hand_back()
        if not self.ended.done():
            self.ended.set_result(reason)

    def _hand_back(self) -> None:
        for seat in list(self._held.values()):
            if seat.run is not None:
                refusal = Rejected(
                    request=seat.request,
                    owner=self.me,
                    epoch=seat.run.epoch,
                    code="stopping",
                    reason="the instance ends",
                )
                self.wire.send(seat.run.gateway, refusal)

    def register(self) -> None:
        """Say who we are. Said again when the log lost its memory."""
        self.recorder.record(
            InstanceRegistered(
                owner=self.me,
                address=self.wire.node.address,
                fingerprint=self.engine.fingerprint,
                blocks_total=self.engine.blocks_total,
                slots_max=self.engine.slots_max,
                role=self.settings.role,
            )
        )

    async def drain(self, grace_s: float) -> bool:
        """Ask to be emptied and wait for it; True if nothing is left."""
        name = self.me.instance
        order = DrainRequested(operation=f"drain-{self.me}", instance=name, actor=f"llumlet/{name}")
        self.recorder.record(order)
        deadline = self.now + grace_s
        while self.now < deadline and self._held:
            await asyncio.sleep(0.05)
        return not self._held

    async def stop(self) -> None:
        """Hand what is left back to its gateways, then end everything."""
        self._hand_back()
        await self.tasks.stop()
        await self.engine.stop()
        self.recorder.record(InstanceStopped(owner=self.me))
        await self.wire.stop()

    # --- inputs ------------------------------------------------------------------------------

    def receive(self, sender: Node, message: AnyMessage) -> None:
        """One message from the data plane."""
        if sender.name.startswith("gateway/"):
            self._gateways[sender] = self.now
        match message:
            case Ping():
                seen = message.cache_seen
                cache = None if seen is None else self.engine.prefixes.since(seen)
                self.wire.send(sender, Pong(request="", owner=self.me, cache=cache))
            case Pong() | Tokens():
                logger.warning("unexpected message", sender=sender.name, kind=type(message).__name__)
            case _:
                self.feed(message.request, From(sender, message))  # type: ignore[arg-type]

    def feed(self, request: str, what: Input) -> None:
        """Step one seat and perform what it asks for, in order."""
        seat = self.seats.get(request) or Seat(me=self.me, request=request)
        after, effects = step(seat, what, self._rules)
        self._keep(after)
        for effect in effects:
            self.acts.perform(after, effect)

    def _keep(self, seat: Seat) -> None:
        self.seats[seat.request] = seat
        if seat.is_empty:
            self._held.pop(seat.request, None)
            self._empty_since.setdefault(seat.request, self.now)
        else:
            self._held[seat.request] = seat
            self._empty_since.pop(seat.request, None)
            self._watch_gateway_of(seat)
            self.activity.set()
        self.news.set()
        if seat.run is not None:
            self.acts.acknowledge(seat.run.slot, seat.run.acknowledged)

    def _watch_gateway_of(self, seat: Seat) -> None:
        """Its lease runs from here on, also if it never speaks to us: it may have died before."""
        for holding in (seat.run, seat.reservation):
            if holding is not None:
                self._gateways.setdefault(holding.gateway, self.now)

    def refuse_run(self, request: str, slot: str, epoch: int, gateway: Node, code: str, reason: str) -> None:
        """The engine will not or cannot go on with a run: tell its gateway and forget it."""
        refusal = Rejected(request=request, owner=self.me, epoch=epoch, code=code, reason=reason)
        self.wire.send(gateway, refusal)
        self.feed(request, RunLost(slot))

    async def _pump_outputs(self) -> None:
        while True:
            for output in await self.engine.outputs():
                self._output(output)

    def _output(self, output: Output) -> None:
        request = self.acts.request_of(output.slot)
        seat = self.seats.get(request) if request is not None else None
        if seat is None:
            return
        if seat.run is not None and seat.run.slot == output.slot:
            self._run_output(seat, seat.run, output)
        elif seat.reservation is not None and seat.reservation.slot == output.slot:
            self.acts.outboxes[output.slot].add(output, self.now)

    def _run_output(self, seat: Seat, run: Run, output: Output) -> None:
        if output.finish is not None and output.finish.startswith("error:"):
            code = output.finish.removeprefix("error:")
            self.refuse_run(seat.request, run.slot, run.epoch, run.gateway, code, "the engine gave up on it")
            return
        try:
            self.acts.outboxes[output.slot].add(output, self.now)
        except ValueError as hole:
            self.refuse_run(seat.request, run.slot, run.epoch, run.gateway, "engine_failed", str(hole))
            return
        if run.is_confirmed:
            tokens = Tokens(
                request=seat.request,
                owner=self.me,
                epoch=run.epoch,
                first=output.first,
                ids=output.ids,
                logprobs=output.logprobs,
                finish=output.finish,
            )
            self.wire.send(run.gateway, tokens)
        if output.finish is not None:
            self.feed(seat.request, RunEnded(output.slot))

    # --- time --------------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        while True:
            if not self._held:
                await self._until_active()
            await asyncio.sleep(self.settings.housekeeping_ms / 1e3)
            self._check_phases()
            self._check_gateways()
            if self.now - self._nudged_at >= self.settings.repeat_ms / 1e3:
                self._nudged_at = self.now
                self._repeat()
                self._forget_empty()

    async def _until_active(self) -> None:
        """Seats that only remember need little care, none at all none."""
        self.activity.clear()
        try:
            async with asyncio.timeout(IDLE_HOUSEKEEPING_S if self.seats else None):
                await self.activity.wait()
        except TimeoutError:
            return

    def _check_phases(self) -> None:
        """Feed `Deadline` and `LeaseExpired` to whatever has been in its phase for too long."""
        seen: dict[str, tuple[str, float]] = {}
        for request, phase, migration, bound_ms in list(self._phases()):
            key, since = self._since.get(request, ("", 0.0))
            since = since if key == phase else self.now
            seen[request] = (phase, since)
            if self.now - since >= bound_ms / 1e3:
                seen[request] = (phase, self.now)
                is_lease = phase.startswith("lease ")
                self.feed(request, LeaseExpired(migration) if is_lease else Deadline(migration))
        self._since = seen

    def _phases(self) -> Iterable[tuple[str, str, str, float]]:
        """(request, phase key, migration, bound in ms) of every open move and reservation."""
        s = self.settings
        bounds = {
            "preparing": s.prepare_ms,
            "copying": s.plan.copy_max_ms,
            "freezing": s.freeze_ms,
            "doubt": s.decision_ms,
        }
        for request, seat in self._held.items():
            if seat.run is not None and seat.run.move is not None:
                move = seat.run.move
                bound_ms = final_copy_max_ms(move.mode, s.plan) if move.phase == "final" else bounds[move.phase]
                yield request, f"{move.phase} {move.migration}", move.migration, bound_ms
            elif seat.reservation is not None:
                held = seat.reservation
                yield request, f"lease {held.migration}", held.migration, s.lease_ms

    def _check_gateways(self) -> None:
        """Drop the runs of gateways that have been silent for their lease."""
        bound = self.settings.gateway_lease_ms / 1e3
        for gateway, heard in list(self._gateways.items()):
            if self.now - heard < bound:
                continue
            del self._gateways[gateway]
            self._drop_runs_of(gateway)
            self.wire.forget(gateway)

    def _drop_runs_of(self, gateway: Node) -> None:
        dropped = sum(seat.run is not None and seat.run.gateway == gateway for seat in self._held.values())
        for request in list(self._held):
            self.feed(request, GatewayLost(gateway))
        if dropped:
            name = gateway.name.removeprefix("gateway/")
            self.recorder.record(RunsDropped(owner=self.me, gateway=name, runs=dropped))

    def _repeat(self) -> None:
        patience = self.settings.resend_ms / 1e3
        for request, seat in list(self._held.items()):
            run = seat.run
            if run is None:
                continue
            if run.adoption is not None or run.move is not None:
                self.feed(request, Nudge())
            outbox = self.acts.outboxes.get(run.slot)
            if run.is_confirmed and outbox is not None and outbox.is_overdue(self.now, patience):
                outbox.quiet_since = self.now
                self.acts.perform(seat, ResendTokens(run.slot))

    def _forget_empty(self) -> None:
        """Empty seats remember their epochs for a while, bounded in time and number."""
        bound = self.now - self.settings.seat_memory_ms / 1e3
        spare = len(self.seats) - SEATS_MAX
        for request, since in list(self._empty_since.items()):
            if since > bound and spare <= 0:
                break
            del self._empty_since[request]
            del self.seats[request]
            spare -= 1
