"""The gateway's core: admits requests, owns their ledgers, chooses instances, and never shows a seam.

Who owns a request is decided by the pure `migration.protocol.ledger`; this shell feeds it messages,
timers and choices, and performs its effects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from midstream.api.gateway.admission import Admission
from midstream.api.gateway.aftermath import Aftermath
from midstream.api.gateway.dispatcher import Dispatcher
from midstream.api.gateway.live import Live, Seam
from midstream.api.gateway.peers import Peers
from midstream.api.gateway.settings import GatewaySettings
from midstream.control.errors import Refused
from midstream.control.events import (
    DowntimeMeasured,
    Entry,
    FirstTokenDelivered,
    GatewayStarted,
    GenerationOpened,
    InstanceLost,
    InstanceRegistered,
    InstanceStopped,
    LoadReported,
    MigrationCommitted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from midstream.control.follower import Follower
from midstream.control.ids import Node, Owner
from midstream.control.ports import Clock, Recorder
from midstream.control.supervise import Supervisor
from midstream.migration.protocol.effects import Deliver, Effect, Record, SeekOwner, SendDispatch, Tell
from midstream.migration.protocol.ledger import End, Heard, Input, OwnerLost, answer_unknown, step
from midstream.migration.protocol.messages import (
    Acknowledge,
    AnyMessage,
    Dispatch,
    Drop,
    Gone,
    Pong,
    Probe,
    Rejected,
    RequestSpec,
)
from midstream.migration.wires.base import Wire

logger = structlog.get_logger(__name__)

FATAL_REFUSALS = frozenset({"too_long", "bad_request"})
"""Refusals that every instance would repeat."""


class Gateway:
    """One gateway process's state. `start` begins to serve; `stop` ends every stream with an error."""

    def __init__(
        self,
        *,
        name: str,
        wire: Wire,
        follower: Follower,
        recorder: Recorder,
        clock: Clock,
        settings: GatewaySettings,
        models: Sequence[str],
    ) -> None:
        self.name = name
        self.models = models
        self.wire = wire
        self.follower = follower
        self.recorder = recorder
        self.clock = clock
        self.settings = settings
        self.live: dict[str, Live] = {}
        self.peers = Peers(self)
        self.dispatcher = Dispatcher(self)
        self.admission = Admission(self)
        self.aftermath = Aftermath(settings.tombstone_ms / 1e3)
        self.tasks = Supervisor(recorder)
        self.is_closing = False
        self._acks: dict[str, tuple[Owner, Acknowledge]] = {}
        self._activity = asyncio.Event()

    @property
    def now(self) -> float:
        """The event loop's time, seconds."""
        return asyncio.get_running_loop().time()

    # --- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen on the data plane and keep the loops alive."""
        await self.wire.start(self.receive)
        self.follower.on_entry = self.on_entry
        self.recorder.record(GatewayStarted(gateway=self.name))
        self.tasks.loop("pings", self.peers.ping)
        self.tasks.loop("housekeeping", self._keep_house)

    async def stop(self) -> None:
        """Refuse new requests, end the live ones with an error, tell their owners to drop."""
        self.is_closing = True
        for live in list(self.live.values()):
            self.fail(live, "shutdown", "the gateway is shutting down")
        await asyncio.sleep(0)
        await self.tasks.stop()
        await self.wire.stop()

    # --- clients -----------------------------------------------------------------------------

    def admit(self, spec: RequestSpec) -> Live:
        """Take a request on and dispatch it. Raises `Refused`, see `api.gateway.port.TextGateway`."""
        self._check_open()
        if spec.request in self.live or self.aftermath.knows(spec.request):
            raise Refused("duplicate", f"request {spec.request} exists already")
        live = Live(spec, self, self.now)
        choice = None if self.admission.must_wait(live) else self.dispatcher.choose_open(live)
        if choice is None:
            if not self.dispatcher.has_any(live):
                raise Refused("no_capacity", "no instance takes requests right now")
            self.admission.put(live)
        self.live[spec.request] = live
        self._activity.set()
        if choice is not None:
            self.dispatcher.dispatch(live, choice, "new")
        return live

    def check(self, model: str | None = None, tenant: str = "") -> None:
        """Raises `Refused` as `admit` would for any request of the tenant for the model, but for `too_long`."""
        self._check_open()
        self.admission.check(model or "", tenant)
        silent = self.peers.silent()
        if not any(
            view.is_dispatchable and name not in silent and model in {None, view.fingerprint.model}
            for name, view in self.follower.state.instances.items()
        ):
            raise Refused("no_capacity", "no instance takes requests right now")

    def _check_open(self) -> None:
        if self.is_closing:
            raise Refused("draining", "the gateway is shutting down")
        if len(self.live) >= self.settings.requests_max:
            raise Refused("overloaded", f"{len(self.live)} requests are in flight")

    def cancel(self, live: Live, cause: str) -> None:
        """End a request for its client; `cause` as in `api.gateway.port.Stream.cancel`."""
        if live.is_over:
            return
        if cause == "stop":
            live.finish = "stop"
            self._record_finished(live)
        else:
            live.error = ("cancelled", cause)
            self.recorder.record(
                RequestCancelled(
                    request=live.request, epoch=live.ledger.epoch, output_tokens=len(live.ids), cause=cause
                )
            )
        self._close(live)

    def fail(self, live: Live, code: str, reason: str) -> None:
        """End a request with an error that its client is told."""
        if live.is_over:
            return
        live.error = (code, reason)
        self.recorder.record(
            RequestFailed(
                request=live.request,
                epoch=live.ledger.epoch,
                output_tokens=len(live.ids),
                code=code,
                reason=reason,
            )
        )
        self._close(live)

    def _close(self, live: Live) -> None:
        """Nothing more is delivered: the ledger ends, the owner is told, a tombstone stays."""
        self.feed(live, End())
        self.live.pop(live.request, None)
        self.admission.ended(live)
        self.peers.forget_request(live.request)
        self.aftermath.bury(live.request, self.now)
        live.wake()

    # --- the data plane ----------------------------------------------------------------------

    def receive(self, sender: Node, message: AnyMessage) -> None:
        """One message from an instance."""
        self.peers.heard(sender)
        if isinstance(message, Pong):
            self.peers.answered(message)
            return
        if not isinstance(message, Heard):
            logger.warning("unexpected message", sender=sender.name, kind=type(message).__name__)
            return
        if isinstance(message, Gone):
            self.aftermath.answered(message.request, message.owner)
        live = self.live.get(message.request)
        if live is None:
            self._answer_late(message)
            return
        if message.owner == live.ledger.owner:
            live.heard_at = self.now
            self.peers.accepted(message.owner, live.request)
        if isinstance(message, Rejected) and live.ledger.is_held_by(message.owner, message.epoch):
            self._rejected(live, message)
        self.feed(live, message)

    def _answer_late(self, message: Heard) -> None:
        for effect in answer_unknown(message):
            assert isinstance(effect, Tell)
            self._send(effect.owner, effect.message)

    def _rejected(self, live: Live, message: Rejected) -> None:
        live.refusals += 1
        if message.code in FATAL_REFUSALS or live.refusals > self.settings.refusals_max:
            self.fail(live, message.code, message.reason)

    def feed(self, live: Live, what: Input) -> None:
        """Step the ledger and perform what it asks for, in order."""
        live.ledger, effects = step(live.ledger, what)
        for effect in effects:
            self._perform(live, effect)

    def _perform(self, live: Live, effect: Effect) -> None:
        match effect:
            case Tell():
                self._tell(live.request, effect.owner, effect.message)
            case Deliver():
                self._deliver(live, effect)
            case SendDispatch():
                self._send_dispatch(live)
            case SeekOwner():
                live.avoid[effect.avoid.instance] = None
                self.tasks.spawn(f"seek {live.request}", self.dispatcher.seek(live, effect.cause))
            case Record():
                self._record(live, effect)
            case _:
                raise TypeError(f"no gateway performs {type(effect).__name__}")

    def _tell(self, request: str, owner: Owner, message: AnyMessage) -> None:
        """Acknowledgements wait a little for later ones; drops are repeated until answered."""
        if isinstance(message, Acknowledge):
            if not self._acks:
                asyncio.get_running_loop().call_later(self.settings.acknowledge_ms / 1e3, self._send_acks)
            self._acks[request] = (owner, message)
            return
        if isinstance(message, Drop):
            self._acks.pop(request, None)
            self.aftermath.dropping(owner, message)
            self._activity.set()
        self._send(owner, message)

    def _send_acks(self) -> None:
        acks, self._acks = self._acks, {}
        for owner, message in acks.values():
            self._send(owner, message)

    def _send(self, owner: Owner, message: AnyMessage) -> None:
        node = self.peers.node_of(owner)
        if node is not None:
            self.wire.send(node, message)

    def _send_dispatch(self, live: Live) -> None:
        ledger, live.sent_at = live.ledger, self.now
        message = Dispatch(
            request=live.request,
            owner=ledger.owner,
            epoch=ledger.epoch,
            spec=live.spec,
            delivered=tuple(live.ids),
            delivered_logprobs=tuple(live.logprobs),
        )
        self._send(ledger.owner, message)

    # --- tokens ------------------------------------------------------------------------------

    def _deliver(self, live: Live, effect: Deliver) -> None:
        if effect.ids:
            self.peers.began(live.ledger.owner, live.request)
            if live.gaps.first_at is None:
                self._began(live)
            gap_ms = live.gaps.add(len(effect.ids), self.now)
            live.ids += effect.ids
            live.logprobs += effect.logprobs
            live.refusals = 0
            live.avoid.clear()
            if live.seam is not None:
                self._measure(live, live.seam, gap_ms)
        if effect.finish is not None and not live.is_over:
            live.finish = effect.finish
            self._record_finished(live)
            self._close(live)
        live.wake()

    def _began(self, live: Live) -> None:
        """The first token is here. Only of an instance that is for prompts does a controller need to know at once."""
        owner = live.ledger.owner
        view = self.follower.state.instances.get(owner.instance)
        if view is not None and view.role == "prefill":
            ttft_ms = (self.now - live.gaps.admitted_at) * 1e3
            self.recorder.record(
                FirstTokenDelivered(request=live.request, epoch=live.ledger.epoch, owner=owner, ttft_ms=ttft_ms)
            )

    def _record(self, live: Live, effect: Record) -> None:
        self.recorder.record(effect.event)
        if isinstance(effect.event, MigrationCommitted):
            is_running = live.gaps.last_at is not None
            live.seam = Seam(effect.event.migration, live.gaps.mean_ms) if is_running else None
            if live.seam is not None:
                live.seam.is_past_tail = effect.event.tail_tokens == 0

    def _measure(self, live: Live, seam: Seam, gap_ms: float) -> None:
        """The hand-over's gap: until the first delivery that the new owner alone could make."""
        seam.gap_ms = max(seam.gap_ms, gap_ms)
        if not seam.is_past_tail:
            seam.is_past_tail = True
            return
        live.seam = None
        self.recorder.record(
            DowntimeMeasured(
                migration=seam.migration,
                gap_ms=seam.gap_ms,
                normal_gap_ms=seam.normal_gap_ms,
                downtime_ms=max(seam.gap_ms - seam.normal_gap_ms, 0.0),
            )
        )

    def _record_finished(self, live: Live) -> None:
        self.recorder.record(
            RequestFinished(
                request=live.request,
                epoch=live.ledger.epoch,
                owner=live.ledger.owner,
                finish_reason=live.finish or "",
                output_tokens=len(live.ids),
                ttft_ms=live.gaps.ttft_ms,
                gap_ms_mean=live.gaps.mean_ms,
                gap_ms_max=live.gaps.largest_ms,
            )
        )

    # --- the log -----------------------------------------------------------------------------

    def on_entry(self, entry: Entry) -> None:
        """What the gateway does about facts besides folding them."""
        match entry.fact.event:
            case LoadReported() as event:
                self.peers.reported(event.owner)
                self.admission.reported()
            case InstanceRegistered() as event:
                self.peers.learn(event.owner, event.address)
            case InstanceLost() as event:
                self.lose(event.owner)
            case InstanceStopped() as event:
                self.lose(event.owner)
                self.peers.gone(event.owner)
            case GenerationOpened():
                for live in self.live.values():
                    self.dispatcher.announce_again(live)

    def lose(self, owner: Owner) -> None:
        """An incarnation is gone: every request it owned looks for a new owner."""
        self.peers.prefixes.forget(owner.instance)
        for live in list(self.live.values()):
            if live.ledger.owner == owner:
                self.feed(live, OwnerLost(owner))

    # --- time --------------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        while True:
            if not self.live and not self.aftermath.has_drops:
                self._activity.clear()
                await self._activity.wait()
            await asyncio.sleep(self.settings.housekeeping_ms / 1e3)
            self._repeat()
            self.aftermath.repeat(self._send, self.peers.is_current)
            self.aftermath.forget(self.now)

    def _repeat(self) -> None:
        s, now = self.settings, self.now
        for live in list(self.live.values()):
            ledger = live.ledger
            if now - live.gaps.admitted_at >= s.request_ms / 1e3:
                self.fail(live, "deadline", f"not finished within {s.request_ms / 1e3:.0f} s")
            elif ledger.phase == "new":
                self.admission.keep(live)
            elif not self.peers.is_current(ledger.owner):
                # Superseded before it became the owner: by a late hand-over, or a choice from a fold that lagged.
                self.feed(live, OwnerLost(ledger.owner))
            elif ledger.phase == "dispatching" and now - live.sent_at >= s.repeat_ms / 1e3:
                self._send_dispatch(live)
            elif ledger.phase == "running" and now - max(live.heard_at, live.sent_at) >= s.quiet_ms / 1e3:
                live.sent_at = now
                self._send(ledger.owner, Probe(request=live.request, epoch=ledger.epoch))
