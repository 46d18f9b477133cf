"""What a core knows beyond vLLM: frozen runs, reservations, pins; and where all blocks are.

Called between steps only, so every method sees and leaves a consistent scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from midstream.control.errors import Refused
from midstream.control.state import Load
from midstream.instance.engines.base import BlockAccount, SlotProgress
from midstream.instance.engines.vllm import calls
from midstream.instance.engines.vllm.seams import blocks as pool
from midstream.instance.engines.vllm.seams import core as seam
from midstream.instance.engines.vllm.step_clock import StepClock

COUNT_SHARE = 0.02
"""Part of a core's time that counting its blocks may take."""
COUNT_CREDIT_S = 0.05


class Reservation:
    """A request that has blocks and a place but is no run yet."""

    __slots__ = ("cached", "encoded", "request")

    def __init__(self, request: seam.Request, encoded: bytes, cached: int) -> None:
        self.request = request
        self.encoded = encoded
        self.cached = cached


class PinnedBlocks:
    """Blocks that a copy reads, and what their run was like when it began."""

    __slots__ = ("blocks", "preemptions", "slot")

    def __init__(self, slot: str, blocks: pool.Blocks, preemptions: int) -> None:
        self.slot = slot
        self.blocks = blocks
        self.preemptions = preemptions


class Tenancy:
    """State beside one scheduler. All of it is gone when the core is."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._slots_max: int = scheduler.max_num_active_reqs
        self.reservations: dict[str, Reservation] = {}
        self.frozen: dict[str, int] = {}
        """Frozen runs, with their place in the batch."""
        self.resumed: set[str] = set()
        """Runs with outputs whose grammar has yet to be advanced over them."""
        self._freezers: dict[str, list[Future[bytes]]] = {}
        self._pins: dict[int, PinnedBlocks] = {}
        self._pins_made = 0
        self.steps = StepClock()
        self._count_credit_s = COUNT_CREDIT_S
        self._counted_at = time.monotonic()
        self.engine_refusal = seam.engine_refusal(scheduler)

    # --- runs --------------------------------------------------------------------------------------

    def run(self, slot: str) -> seam.Request:
        """Raises `Refused("gone")`."""
        request: seam.Request | None = self._scheduler.requests.get(slot)
        if request is None or seam.is_finished(request):
            raise Refused("gone", f"no run {slot} here")
        return request

    def phase(self, request: seam.Request) -> str:
        """`waiting prefill decode frozen`, as the engine port has them."""
        if request.request_id in self.frozen:
            return "frozen"
        computed = seam.computed_of(request)
        if not computed and not seam.is_running(request):
            return "waiting"
        return "decode" if request.num_output_tokens and computed >= request.num_tokens - 1 else "prefill"

    def progress(self, request: seam.Request) -> SlotProgress:
        """How far a run has come."""
        return SlotProgress(
            slot=request.request_id,
            phase=self.phase(request),
            tokens=request.num_tokens,
            outputs=request.num_output_tokens,
            computed=seam.computed_of(request),
            blocks=len(pool.blocks_of(self._scheduler, request.request_id)),
            preemptions=request.num_preemptions,
            refusal=self.engine_refusal or seam.request_refusal(request),
        )

    # --- freezing ----------------------------------------------------------------------------------

    def freeze(self, slot: str) -> Future[bytes] | None:
        """Take the run out. `None`: nothing of it is in flight; else what `drained` will give out. Raises `Refused`."""
        request = self.run(slot)
        if slot not in self.frozen:
            self.frozen[slot] = seam.take_out(self._scheduler, request)
            self.update_room()
        if not request.num_in_flight_tokens:
            return None
        future: Future[bytes] = Future()
        self._freezers.setdefault(slot, []).append(future)
        return future

    def thaw(self, slot: str) -> None:
        """Put it back where it was. Not frozen: nothing."""
        place = self.frozen.pop(slot, None)
        if place is not None:
            seam.put_back(self._scheduler, self._scheduler.requests[slot], place)
            self.update_room()

    def drained(self) -> Iterator[tuple[str, list[Future[bytes]]]]:
        """Freezes whose run has nothing in flight any more, or is gone; each is given out once."""
        for slot in list(self._freezers):
            request = self._scheduler.requests.get(slot)
            if request is None or not request.num_in_flight_tokens:
                yield slot, self._freezers.pop(slot)

    def forget_missing(self) -> None:
        """Frozen runs that ended are not frozen any more."""
        missing = [slot for slot in self.frozen if slot not in self._scheduler.requests]
        for slot in missing:
            del self.frozen[slot]
        if missing:
            self.update_room()
        self.resumed.intersection_update(self._scheduler.requests)

    # --- reservations ------------------------------------------------------------------------------

    def reserve(self, slot: str, request: seam.Request, encoded: bytes, blocks: int) -> Reservation:
        """Hold blocks and a place. Raises `Refused` (`no_slots`, `no_blocks`)."""
        if self._places_taken() >= self._slots_max:
            raise Refused("no_slots", f"all {self._slots_max} places are taken")
        cached = 0
        if blocks:
            hit = pool.hold_blocks(self._scheduler, request, blocks)
            if hit is None:
                raise Refused("no_blocks", f"{blocks} blocks wanted, {pool.blocks_free(self._scheduler)} free")
            cached = hit // pool.block_tokens(self._scheduler)
        reservation = Reservation(request, encoded, cached)
        self.reservations[slot] = reservation
        self.update_room()
        return reservation

    def cancel(self, slot: str) -> int:
        """Free a reservation; return its blocks."""
        reservation = self.reservations.pop(slot, None)
        if reservation is None:
            return 0
        blocks = len(pool.blocks_of(self._scheduler, slot))
        pool.give_up_blocks(self._scheduler, reservation.request)
        self.update_room()
        return blocks

    def update_room(self) -> None:
        """Let vLLM admit only as many as leave room for reservations and frozen runs."""
        self._scheduler.max_num_active_reqs = max(0, self._slots_max - self._places_held())

    def _places_held(self) -> int:
        frozen = sum(seam.is_running(self._scheduler.requests[slot]) for slot in self.frozen)
        return len(self.reservations) + frozen

    def _places_taken(self) -> int:
        running, waiting = seam.request_counts(self._scheduler)
        adopted = sum(1 for request in waiting if request.num_computed_tokens)
        return running + self._places_held() + adopted

    # --- pins --------------------------------------------------------------------------------------

    def pin(self, slot: str, first: int) -> calls.Pinned:
        """Pin what is final from block `first` on. Raises `Refused("gone")`."""
        request = self.run(slot)
        tokens, computed = pool.block_tokens(self._scheduler), seam.computed_of(request)
        until = -(-computed // tokens) if slot in self.frozen else computed // tokens
        blocks = pool.blocks_of(self._scheduler, slot)[first:until]
        pool.pin(self._scheduler, blocks)
        self._pins_made += 1
        self._pins[self._pins_made] = PinnedBlocks(slot, blocks, request.num_preemptions)
        return calls.Pinned(pin=self._pins_made, block_ids=pool.block_ids(blocks))

    def unpin(self, number: int) -> calls.Unpinned:
        """Let go, and say what became of the run."""
        pinned = self._pins.pop(number, None)
        if pinned is None:
            return calls.Unpinned(fate="gone", progress=None)
        pool.unpin(self._scheduler, pinned.blocks)
        request = self._scheduler.requests.get(pinned.slot)
        if request is None or seam.is_finished(request):
            return calls.Unpinned(fate="gone", progress=None)
        if request.num_preemptions != pinned.preemptions:
            return calls.Unpinned(fate="preempted", progress=None)
        return calls.Unpinned(fate=None, progress=self.progress(request))

    # --- how things stand ----------------------------------------------------------------------------

    def report(self, *, is_exact: bool = False) -> calls.Report:
        """Everything at once; the account is left out when the last ones took too much time."""
        runs = tuple(self.progress(request) for request in self._scheduler.requests.values())
        return calls.Report(load=self.load(), account=self._account_within_budget(is_exact), runs=runs)

    def load(self) -> Load:
        """The load right now."""
        running, waiting = seam.request_counts(self._scheduler)
        tokens = pool.block_tokens(self._scheduler)
        needs = [-(-request.num_tokens // tokens) for request in waiting if not request.num_computed_tokens]
        frozen = [self._scheduler.requests[slot] for slot in self.frozen]
        frozen_running = sum(seam.is_running(request) for request in frozen)
        return Load(
            running=running + frozen_running,
            waiting=len(waiting) + len(frozen) - frozen_running,
            blocks_free=pool.blocks_free(self._scheduler),
            blocks_reserved=sum(len(pool.blocks_of(self._scheduler, slot)) for slot in self.reservations),
            blocks_head=needs[0] if needs else 0,
            blocks_waiting=sum(needs),
            step_ms=self.steps.decode_ms,
            preemptions=self.steps.preemptions,
        )

    def account(self) -> BlockAccount:
        """Count every block; nothing is inferred from anything else."""
        owned = {block.block_id for blocks in self._owned() for block in blocks}
        reserved = {block.block_id for slot in self.reservations for block in pool.blocks_of(self._scheduler, slot)}
        return BlockAccount(
            total=pool.blocks_total(self._scheduler),
            owned=len(owned),
            free=pool.blocks_free(self._scheduler),
            reserved=len(reserved - owned),
        )

    def faults(self) -> tuple[str, ...]:
        """Broken invariants in words (P07): blocks unaccounted for, references nobody has."""
        account, found = self.account(), []
        if account.owned + account.free + account.reserved != account.total:
            found.append(f"blocks do not add up: {account}")
        held: dict[int, int] = {}
        for blocks in [*self._owned(), *(pool.blocks_of(self._scheduler, slot) for slot in self.reservations)]:
            for block in blocks:
                held[block.block_id] = held.get(block.block_id, 0) + 1
        if held != pool.references(self._scheduler):
            found.append(f"reference counts {pool.references(self._scheduler)}, held {held}")
        return tuple(found)

    def _owned(self) -> Iterator[pool.Blocks]:
        for slot in self._scheduler.requests:
            yield pool.blocks_of(self._scheduler, slot)
        for pinned in self._pins.values():
            yield pinned.blocks
        yield list(pool.blocks_fenced(self._scheduler))

    def _account_within_budget(self, is_exact: bool) -> BlockAccount | None:
        began = time.monotonic()
        earned = (began - self._counted_at) * COUNT_SHARE
        self._count_credit_s = min(COUNT_CREDIT_S, self._count_credit_s + earned)
        self._counted_at = began
        if self._count_credit_s <= 0 and not is_exact:
            return None
        account = self.account()
        self._count_credit_s -= time.monotonic() - began
        return account
