"""Our methods of vLLM's `EngineCore`, called by name as utilities: one msgpack argument, one msgpack answer.

They run in the core's main thread between steps. A refusal is an answer; an exception is a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from midstream.control.errors import Refused
from midstream.instance.engines.vllm import calls
from midstream.instance.engines.vllm.finish import finish_text
from midstream.instance.engines.vllm.seams import blocks as pool
from midstream.instance.engines.vllm.seams import core as seam
from midstream.instance.engines.vllm.seams.version import check_absent
from midstream.instance.engines.vllm.tenancy import Reservation, Tenancy

_encode = msgspec.msgpack.encode


def _tenancy(core: Any) -> Tenancy:
    scheduler = seam.scheduler_of(core)
    scheduler.core = core
    tenancy: Tenancy = scheduler.tenancy
    return tenancy


def reply(core: Any, work: Callable[[], Any], *, is_exact: bool = False) -> bytes:
    """Do the work and encode its value, or the refusal it raised, with a report."""
    value, refused = None, None
    try:
        value = work()
    except Refused as refusal:
        refused = (refusal.code, refusal.reason)
    report = _tenancy(core).report(is_exact=is_exact)
    return _encode(calls.Answer(value=msgspec.Raw(_encode(value)), refused=refused, report=report))


class CoreMethods:
    """The methods, gathered; `self` is the engine core."""

    @classmethod
    def add_to(cls, core_class: type) -> None:
        """Add every `mig_…` method to vLLM's class. Raises `BadInput` if it has one of that name."""
        names = [name for name in vars(cls) if name.startswith("mig_")]
        fresh = [name for name in names if getattr(core_class, name, None) is not vars(cls)[name]]
        check_absent(core_class, fresh)
        for name in fresh:
            setattr(core_class, name, vars(cls)[name])

    def mig_facts(self) -> bytes:
        """What does not change: `CoreFacts`."""
        return reply(self, lambda: _facts(self))

    def mig_attach(self, argument: bytes) -> bytes:
        """Start the copiers of all workers."""
        return reply(self, lambda: seam.collective(self, "mig_attach", argument) and None)

    def mig_submit(self, argument: bytes) -> bytes:
        """Queue a run that goes on after outputs: `Submitted`."""
        call = msgspec.msgpack.decode(argument, type=calls.Submit)
        return reply(self, lambda: _submit(self, call))

    def mig_describe(self, argument: bytes) -> bytes:
        """How far a run is: `SlotProgress`."""
        call = msgspec.msgpack.decode(argument, type=calls.OfSlot)
        return reply(self, lambda: _tenancy(self).progress(_tenancy(self).run(call.slot)))

    def mig_abort(self, argument: bytes) -> bytes:
        """End a run or reservation in any state: `Freed`."""
        call = msgspec.msgpack.decode(argument, type=calls.OfSlot)
        return reply(self, lambda: _abort(self, call.slot), is_exact=True)

    def mig_pin(self, argument: bytes) -> bytes:
        """Keep blocks for a copy: `Pinned`."""
        call = msgspec.msgpack.decode(argument, type=calls.Pin)
        return reply(self, lambda: _tenancy(self).pin(call.slot, call.first))

    def mig_unpin(self, argument: bytes) -> bytes:
        """The copy is over: `Unpinned`."""
        call = msgspec.msgpack.decode(argument, type=calls.Unpin)
        return reply(self, lambda: _tenancy(self).unpin(call.pin), is_exact=True)

    def mig_freeze(self, argument: bytes) -> bytes | Future[bytes]:
        """Take a run out of the batch: `Frozen`, once no step in flight computes for it."""
        call = msgspec.msgpack.decode(argument, type=calls.OfSlot)
        try:
            future = _tenancy(self).freeze(call.slot)
        except Refused:
            future = None
        return future or reply(self, lambda: frozen_state(self, call.slot))

    def mig_thaw(self, argument: bytes) -> bytes:
        """Put it back."""
        call = msgspec.msgpack.decode(argument, type=calls.OfSlot)
        return reply(self, lambda: _tenancy(self).thaw(call.slot))

    def mig_reserve(self, argument: bytes) -> bytes:
        """Hold blocks and a place: `Held`."""
        call = msgspec.msgpack.decode(argument, type=calls.Reserve)
        return reply(self, lambda: _reserve(self, call), is_exact=True)

    def mig_adopt(self, argument: bytes) -> bytes:
        """Turn a reservation into a run."""
        call = msgspec.msgpack.decode(argument, type=calls.Adopt)
        return reply(self, lambda: _adopt(self, call), is_exact=True)

    def mig_report(self) -> bytes:
        """Only the report."""
        return reply(self, lambda: None, is_exact=True)

    def mig_faults(self) -> bytes:
        """Broken invariants in words, for tests and for people who doubt."""
        return reply(self, lambda: _tenancy(self).faults())


def _facts(core: Any) -> calls.CoreFacts:
    scheduler = seam.scheduler_of(core)
    layouts = sorted(set(seam.collective(core, "mig_layout", b"")))
    return calls.CoreFacts(
        blocks_total=pool.blocks_total(scheduler),
        block_tokens=pool.block_tokens(scheduler),
        block_bytes=sum(seam.collective(core, "mig_block_bytes", b"")),
        layout=" ".join(layouts),
        refusal=_tenancy(core).engine_refusal,
        **seam.description(scheduler),
    )


def _submit(core: Any, call: calls.Submit) -> calls.Submitted:
    tenancy, scheduler = _tenancy(core), seam.scheduler_of(core)
    if call.slot in scheduler.requests or call.slot in tenancy.reservations:
        return calls.Submitted(None)
    request = seam.build_request(core, call.request, call.outputs)
    if call.outputs and (no := seam.request_refusal(request)):
        raise Refused(no, "it cannot go on exactly after its outputs")
    if seam.ended(scheduler, request):
        return calls.Submitted(finish_text(*seam.finish_of(request) or (0, None)))
    _advance_grammar(core, request)
    is_known_to_workers = _insert(core, request, call.request, computed=0, rng=b"")
    _enter(core, request, is_resumed=bool(call.outputs) or is_known_to_workers)
    return calls.Submitted(None)


def _advance_grammar(core: Any, request: seam.Request) -> None:
    """If it is compiled already; else the scheduler does it as soon as it is. Raises `Refused`."""
    if seam.waits_for_grammar(request) and seam.is_grammar_compiled(request):
        if not seam.advance_grammar(seam.scheduler_of(core), request):
            raise Refused("grammar", "the outputs do not follow the grammar")
        seam.grammar_ready(request, is_resumed=True)


def _enter(core: Any, request: seam.Request, *, is_resumed: bool) -> None:
    if is_resumed and seam.waits_for_grammar(request):
        _tenancy(core).resumed.add(request.request_id)
    seam.enter(seam.scheduler_of(core), request, is_resumed=is_resumed)


def _insert(core: Any, request: seam.Request, encoded: bytes, *, computed: int, rng: bytes) -> bool:
    """Tell V1 workers of a run they have not seen begin; whether they were told."""
    scheduler = seam.scheduler_of(core)
    outputs = tuple(request.output_token_ids)
    if not seam.is_v1_runner(scheduler) or not (outputs or seam.is_seeded(request)):
        return False
    insert = calls.Insert(
        slot=request.request_id,
        request=encoded,
        outputs=outputs,
        computed=computed,
        block_ids=pool.block_ids(pool.blocks_of(scheduler, request.request_id)),
        rng=rng,
    )
    seam.collective(core, "mig_insert", _encode(insert))
    return True


def _abort(core: Any, slot: str) -> calls.Freed:
    tenancy, scheduler = _tenancy(core), seam.scheduler_of(core)
    if slot in tenancy.reservations:
        return calls.Freed(tenancy.cancel(slot))
    blocks = len(pool.blocks_of(scheduler, slot))
    seam.drop(scheduler, slot)
    tenancy.forget_missing()
    return calls.Freed(blocks)


def frozen_state(core: Any, slot: str) -> calls.Frozen:
    """The state of a frozen run with nothing in flight. Raises `Refused("gone")`."""
    request, scheduler = _tenancy(core).run(slot), seam.scheduler_of(core)
    computed, tokens = seam.computed_of(request), pool.block_tokens(scheduler)
    rng = b""
    if seam.is_v1_runner(scheduler) and seam.is_seeded(request) and request.num_output_tokens:
        rng = seam.collective(core, "mig_rng", slot.encode())[0]
    return calls.Frozen(
        outputs=tuple(request.output_token_ids),
        tokens=request.num_tokens,
        computed=computed,
        blocks=-(-computed // tokens),
        block_ids=pool.block_ids(pool.blocks_of(scheduler, slot)),
        preemptions=request.num_preemptions,
        rng=rng,
    )


def _reserve(core: Any, call: calls.Reserve) -> calls.Held:
    tenancy, scheduler = _tenancy(core), seam.scheduler_of(core)
    known = tenancy.reservations.get(call.slot)
    if known is not None:
        return _held(core, call.slot, known)
    if call.slot in scheduler.requests:
        raise Refused("duplicate", f"{call.slot} already runs here")
    if seam.is_paused(scheduler):
        raise Refused("paused", "the engine takes no new work")
    request = seam.build_request(core, call.request, call.outputs)
    no = tenancy.engine_refusal or seam.request_refusal(request)
    if no:
        raise Refused(no, "it cannot go on exactly here")
    return _held(core, call.slot, tenancy.reserve(call.slot, request, call.request, call.blocks))


def _held(core: Any, slot: str, reservation: Reservation) -> calls.Held:
    blocks = pool.blocks_of(seam.scheduler_of(core), slot)
    return calls.Held(block_ids=pool.block_ids(blocks), cached=reservation.cached)


def _adopt(core: Any, call: calls.Adopt) -> None:
    tenancy, scheduler = _tenancy(core), seam.scheduler_of(core)
    if call.slot in scheduler.requests:
        return
    reservation = tenancy.reservations.get(call.slot)
    if reservation is None:
        raise Refused("gone", f"no reservation {call.slot} here")
    request = reservation.request
    request.append_output_token_ids(list(call.outputs[request.num_output_tokens :]))
    _advance_grammar(core, request)
    # Blocks out of the prefix cache may be others' too: nothing is computed over them.
    known = reservation.cached * pool.block_tokens(scheduler)
    computed = max(call.computed, known) if call.computed else 0
    pool.publish(scheduler, request, computed)
    request.num_preemptions = call.preemptions
    is_known = _insert(core, request, reservation.encoded, computed=computed, rng=call.rng)
    del tenancy.reservations[call.slot]
    _enter(core, request, is_resumed=bool(call.outputs) or is_known)
    tenancy.update_room()
