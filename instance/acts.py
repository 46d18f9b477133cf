"""Performing the effects of the seats: engine calls with deadlines, messages, facts.

Engine calls about one slot run one after another in the order they were asked for; copies run beside
them and can be cancelled. Nothing here decides: every outcome goes back to the seat as an input.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from midstream.control.errors import CannotConnect, EngineFailed, Refused, TransferFailed
from midstream.control.ids import Owner
from midstream.instance.detours import Detours
from midstream.instance.engines.base import Route
from midstream.instance.outbox import Outbox
from midstream.migration.plan import RECOMPUTE, blocks_for, final_copy_max_ms
from midstream.migration.protocol.effects import (
    Abort,
    Adopt,
    Copy,
    Effect,
    Freeze,
    Record,
    ResendTokens,
    Reserve,
    Send,
    SendAdopted,
    SendFinal,
    SendPrepare,
    StopWork,
    Submit,
    Thaw,
)
from midstream.migration.protocol.messages import Adopted, Final, Prepare, RequestSpec, Tokens
from midstream.migration.protocol.seat import (
    AdoptDone,
    AdoptFailed,
    FreezeDone,
    ReserveDone,
    ReserveFailed,
    RoundDone,
    RunEnded,
    RunLost,
    Seat,
    WorkFailed,
)

if TYPE_CHECKING:
    from midstream.instance.llumlet import Llumlet

logger = structlog.get_logger(__name__)

Failure = tuple[str, str]


class Acts:
    """The hands of a llumlet."""

    def __init__(self, llumlet: Llumlet) -> None:
        self._llumlet = llumlet
        self.outboxes: dict[str, Outbox] = {}
        self._specs: dict[str, RequestSpec] = {}
        self._requests: dict[str, str] = {}
        self._chains: dict[str, asyncio.Task[None]] = {}
        self._copies: dict[str, asyncio.Task[None]] = {}
        self._frozen_at_us: dict[str, int] = {}
        self._detours = Detours()

    def request_of(self, slot: str) -> str | None:
        """The request a run belongs to, `None` once it is freed."""
        return self._requests.get(slot)

    @property
    def is_unheard(self) -> bool:
        """Is there a run without a first token at its gateway: its prompt waits, or is computed, or that just ended."""
        return any(outbox.is_unheard for outbox in self.outboxes.values())

    def acknowledge(self, slot: str, delivered: int) -> None:
        """Note what the gateway holds."""
        outbox = self.outboxes.get(slot)
        if outbox is not None:
            outbox.acknowledge(delivered, self._llumlet.now)

    def perform(self, seat: Seat, effect: Effect) -> None:
        """Do one effect: messages and facts at once, engine calls as tasks."""
        match effect:
            case Send():
                self._llumlet.wire.send(effect.to, effect.message)
            case Record():
                self._llumlet.recorder.record(effect.event)
            case Submit():
                self._submit(seat, effect)
            case Abort():
                self._abort(effect)
            case Reserve():
                self._in_turn(effect.slot, self._reserve(seat.request, effect))
            case SendPrepare():
                self._in_turn(effect.slot, self._send_prepare(seat, effect))
            case Copy():
                self._start_copy(seat, effect)
            case StopWork():
                self._stop_copy(effect.migration)
            case Freeze():
                self._in_turn(effect.slot, self._freeze(seat.request, effect))
            case Thaw():
                self._in_turn(effect.slot, self._thaw(effect.slot))
            case SendFinal():
                self._send_final(seat, effect)
            case Adopt():
                self._in_turn(effect.slot, self._adopt(seat.request, effect))
            case SendAdopted():
                self._send_adopted(seat, effect)
            case ResendTokens():
                self._resend(seat, effect.slot)
            case _:
                raise TypeError(f"no instance performs {type(effect).__name__}")

    # --- order and deadlines -----------------------------------------------------------------

    def _in_turn(self, slot: str, work: Coroutine[Any, Any, None]) -> None:
        """Run an engine call after the earlier ones about the same slot."""
        before = self._chains.get(slot)

        async def turn() -> None:
            if before is not None:
                await asyncio.wait([before])
            await work

        task = self._llumlet.tasks.spawn(f"slot {slot}", turn())
        task.add_done_callback(lambda _: work.close())
        self._chains[slot] = task
        task.add_done_callback(lambda done: self._chained(slot, done))

    def _chained(self, slot: str, done: asyncio.Task[None]) -> None:
        if self._chains.get(slot) is done:
            del self._chains[slot]

    async def _try(self, call: Awaitable[Any], bound_ms: float) -> tuple[Any, Failure | None]:
        """The result of an engine call, or why there is none (code, reason)."""
        try:
            async with asyncio.timeout(bound_ms / 1e3):
                return await call, None
        except Refused as refusal:
            return None, (refusal.code, refusal.reason)
        except CannotConnect as failure:
            return None, ("no_connection", str(failure))
        except TransferFailed as failure:
            return None, ("transfer_failed", str(failure))
        except EngineFailed as failure:
            return None, ("engine_failed", str(failure))
        except TimeoutError:
            return None, ("too_slow", f"no result within {bound_ms:.0f} ms")
        finally:
            self._llumlet.news.set()

    # --- runs --------------------------------------------------------------------------------

    def _submit(self, seat: Seat, effect: Submit) -> None:
        dispatch = effect.dispatch
        self._remember(seat.request, effect.slot, dispatch.spec, dispatch.delivered, dispatch.delivered_logprobs)
        self.acknowledge(effect.slot, len(dispatch.delivered))
        self._in_turn(effect.slot, self._submitted(seat.request, effect))

    def _remember(
        self, request: str, slot: str, spec: RequestSpec, ids: tuple[int, ...], logprobs: tuple[bytes, ...]
    ) -> None:
        self._specs[slot] = spec
        self._requests[slot] = request
        self.outboxes[slot] = Outbox(ids, logprobs, self._llumlet.now)

    async def _submitted(self, request: str, effect: Submit) -> None:
        engine, dispatch = self._llumlet.engine, effect.dispatch
        call = engine.submit(effect.slot, dispatch.spec, dispatch.delivered)
        _, failure = await self._try(call, self._llumlet.settings.engine_ms)
        if failure is not None:
            self._llumlet.refuse_run(request, effect.slot, dispatch.epoch, effect.gateway, *failure)

    def _abort(self, effect: Abort) -> None:
        for table in (self.outboxes, self._specs, self._requests):
            table.pop(effect.slot, None)
        self._in_turn(effect.slot, self._aborted(effect))

    async def _aborted(self, effect: Abort) -> None:
        freed, failure = await self._try(self._llumlet.engine.abort(effect.slot), self._llumlet.settings.engine_ms)
        if failure is not None:
            logger.error("abort failed", slot=effect.slot, code=failure[0], reason=failure[1])
        if effect.fact is not None:
            fact = msgspec.structs.replace(effect.fact, blocks_freed=freed or 0)
            self._llumlet.recorder.record(fact)

    def _resend(self, seat: Seat, slot: str) -> None:
        run, outbox = seat.run, self.outboxes.get(slot)
        if run is None or run.slot != slot or outbox is None:
            return
        first = run.acknowledged
        ids, logprobs = outbox.since(first)
        if not ids and outbox.finish is None:
            return
        self._llumlet.wire.send(
            run.gateway,
            Tokens(
                request=seat.request,
                owner=self._llumlet.me,
                epoch=run.epoch,
                first=first,
                ids=ids,
                logprobs=logprobs,
                finish=outbox.finish,
            ),
        )

    # --- source ------------------------------------------------------------------------------

    async def _send_prepare(self, seat: Seat, effect: SendPrepare) -> None:
        """Ask for room for what the request is now plus what it may grow while it is copied."""
        llumlet = self._llumlet
        engine = llumlet.engine
        progress, failure = await self._try(engine.describe(effect.slot), llumlet.settings.engine_ms)
        if failure is None and progress.refusal is not None:
            failure = (progress.refusal, "the engine cannot carry it on exactly elsewhere")
        if failure is not None:
            llumlet.feed(seat.request, WorkFailed(effect.migration, *failure))
            return
        run, spec, outbox = seat.run, self._specs.get(effect.slot), self.outboxes.get(effect.slot)
        if run is None or run.move is None or spec is None or outbox is None:
            return
        most = min(
            progress.tokens + llumlet.settings.plan.headroom_tokens,
            len(spec.prompt) + spec.sampling.max_tokens,
        )
        has_kv = bool(progress.blocks) and run.move.mode != RECOMPUTE
        blocks = blocks_for(most, engine.fingerprint.block_tokens) if has_kv else 0
        prepare = Prepare(
            request=seat.request,
            migration=effect.migration,
            epoch=run.epoch,
            source=llumlet.me,
            target=run.move.target,
            gateway=run.gateway,
            fingerprint=engine.fingerprint,
            spec=spec,
            outputs=tuple(outbox.ids),
            blocks=blocks,
            transfers=self._detours.offers(engine.transfers(), run.move.target, llumlet.now),
        )
        llumlet.wire.send(run.move.node, prepare)

    def _start_copy(self, seat: Seat, effect: Copy) -> None:
        assert seat.run is not None
        assert seat.run.move is not None
        assert seat.run.move.prepared is not None
        move, prepared = seat.run.move, seat.run.move.prepared
        route = Route(transfer=prepared.transfer, address=prepared.address, handle=prepared.handle)
        plan = self._llumlet.settings.plan
        bound_ms = final_copy_max_ms(move.mode, plan) if move.phase == "final" else plan.copy_max_ms
        work = self._copy(seat.request, effect, move.target, route, bound_ms)
        self._copies[effect.migration] = self._llumlet.tasks.spawn(f"copy {effect.migration}", work)

    async def _copy(self, request: str, effect: Copy, target: Owner, route: Route, bound_ms: float) -> None:
        llumlet = self._llumlet
        call = llumlet.engine.copy(effect.slot, effect.first_block, route, checksum=llumlet.settings.checksum)
        report, failure = await self._try(call, bound_ms)
        if failure is not None:
            if failure[0] == "no_connection":
                self._detours.add(target, route.transfer, llumlet.now)
            llumlet.feed(request, WorkFailed(effect.migration, *failure))
        else:
            llumlet.feed(request, RoundDone(effect.migration, report, llumlet.now * 1e3))

    def _stop_copy(self, migration: str) -> None:
        """The engine lets go of the memory before its cancelled copy ends, and frees no block before that."""
        task = self._copies.pop(migration, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _freeze(self, request: str, effect: Freeze) -> None:
        llumlet = self._llumlet
        state, failure = await self._try(llumlet.engine.freeze(effect.slot), llumlet.settings.engine_ms)
        if failure is not None:
            llumlet.feed(request, WorkFailed(effect.migration, *failure))
            return
        self._frozen_at_us[effect.migration] = llumlet.clock.now_us()
        llumlet.feed(request, FreezeDone(effect.migration, effect.slot, state))

    async def _thaw(self, slot: str) -> None:
        _, failure = await self._try(self._llumlet.engine.thaw(slot), self._llumlet.settings.engine_ms)
        if failure is not None:
            logger.error("thaw failed", slot=slot, code=failure[0], reason=failure[1])

    def _send_final(self, seat: Seat, effect: SendFinal) -> None:
        run = seat.run
        assert run is not None
        assert run.move is not None
        self._copies.pop(effect.migration, None)
        final = Final(
            request=seat.request,
            migration=effect.migration,
            epoch=run.epoch,
            target=run.move.target,
            state=effect.state,
            acknowledged=run.acknowledged,
            frozen_at_us=self._frozen_at_us.pop(effect.migration, 0),
        )
        self._llumlet.wire.send(run.move.node, final)

    # --- target ------------------------------------------------------------------------------

    async def _reserve(self, request: str, effect: Reserve) -> None:
        llumlet, prepare = self._llumlet, effect.prepare
        differences = llumlet.engine.fingerprint.differences(prepare.fingerprint)
        if differences:
            reason = "the instances differ in " + ", ".join(differences)
            llumlet.feed(request, ReserveFailed(prepare.migration, "different_fingerprint", reason))
            return
        call = llumlet.engine.reserve(effect.slot, prepare.spec, prepare.outputs, prepare.blocks, prepare.transfers)
        reserved, failure = await self._try(call, llumlet.settings.engine_ms)
        if failure is not None:
            llumlet.feed(request, ReserveFailed(prepare.migration, *failure))
        else:
            llumlet.feed(request, ReserveDone(prepare.migration, effect.slot, reserved))

    async def _adopt(self, request: str, effect: Adopt) -> None:
        llumlet, final = self._llumlet, effect.final
        state = final.state
        self._remember(request, effect.slot, state.spec, state.outputs, state.logprobs)
        self.acknowledge(effect.slot, final.acknowledged)
        call = llumlet.engine.adopt(effect.slot, state)
        _, failure = await self._try(call, llumlet.settings.engine_ms)
        if failure is not None:
            llumlet.feed(request, AdoptFailed(final.migration, *failure))
            return
        took_ms = (llumlet.clock.now_us() - final.frozen_at_us) / 1e3 if final.frozen_at_us else None
        llumlet.feed(request, AdoptDone(final.migration, effect.slot, took_ms))
        self._tell_early_end(request, effect.slot)

    def _tell_early_end(self, request: str, slot: str) -> None:
        """The engine may have made the run's last tokens before it answered that the run was adopted."""
        outbox = self.outboxes.get(slot)
        if outbox is None or outbox.finish is None:
            return
        if outbox.finish.startswith("error:"):
            self._llumlet.feed(request, RunLost(slot))
        else:
            self._llumlet.feed(request, RunEnded(slot))

    def _send_adopted(self, seat: Seat, effect: SendAdopted) -> None:
        run, outbox = seat.run, self.outboxes.get(effect.slot)
        if run is None or outbox is None:
            return
        ids, logprobs = outbox.since(effect.first)
        self._llumlet.wire.send(
            run.gateway,
            Adopted(
                request=seat.request,
                owner=self._llumlet.me,
                migration=effect.migration,
                epoch=effect.epoch,
                first=effect.first,
                ids=ids,
                logprobs=logprobs,
                finish=outbox.finish,
            ),
        )
