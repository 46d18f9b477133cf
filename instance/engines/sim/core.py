"""The simulated engine without time: runs, reservations, blocks and bytes, changed by plain calls between steps.

The shell calls `plan`, waits as long as the step would take, and calls `apply`. Calls in between are safe: a run that
left meanwhile is skipped, and blocks it held are never written by the step.
"""

from __future__ import annotations

from typing import NamedTuple

from midstream.control.errors import Refused
from midstream.control.state import Load
from midstream.instance.engines.base import BlockAccount, Output
from midstream.instance.engines.prefixes import PrefixLog
from midstream.instance.engines.sim.blocks import BlockPool
from midstream.instance.engines.sim.config import SimConfig, check_spec
from midstream.instance.engines.sim.contents import make_contents
from midstream.instance.engines.sim.model import block_keys
from midstream.instance.engines.sim.run import RUNNING, Reservation, Run
from midstream.instance.engines.sim.scheduler import Plan, Scheduler
from midstream.migration.protocol.messages import RequestSpec, RunState


class Stepped(NamedTuple):
    """What one step brought: runs with a new token, each with its finish if that was its last."""

    sampled: tuple[tuple[Run, str | None], ...]


class Pinned(NamedTuple):
    """Blocks of one run held for a copy: (index in the run, block), and the lives they were in."""

    run: Run
    first: int
    blocks: tuple[int, ...]
    generations: tuple[int, ...]
    preemptions: int


class EngineCore:
    """All state of one simulated engine."""

    def __init__(self, config: SimConfig, memory: memoryview | None = None) -> None:
        self._config = config
        self._pool = BlockPool(config.blocks_total)
        self._contents = make_contents(config, memory)
        self._scheduler = Scheduler(config, self._pool)
        self._order = 0
        self._preemptions = 0
        self.runs: dict[str, Run] = {}
        self.reservations: dict[str, Reservation] = {}

    # --- runs ------------------------------------------------------------------------------------

    def submit(self, slot: str, spec: RequestSpec, outputs: tuple[int, ...]) -> Output | None:
        """Queue a run; an output at once if `outputs` already ended it. Raises `Refused`."""
        self._check(spec, outputs)
        if len(self._scheduler.waiting) >= self._config.waiting_max:
            raise Refused("queue_full", f"{self._config.waiting_max} requests are waiting")
        run = self._new_run(slot, spec, outputs)
        finish = run.chooser.finish(outputs[-1], len(outputs)) if outputs else None
        if finish is not None:
            return Output(slot=slot, first=len(outputs), ids=(), finish=finish)
        self.runs[slot] = run
        self._scheduler.enqueue(run)
        return None

    def drop(self, run: Run) -> int:
        """End a run in any phase and free its blocks; return how many it held. Gone: 0."""
        if self.runs.get(run.slot) is not run:
            return 0
        del self.runs[run.slot]
        if run.is_frozen:
            self._scheduler.slots_held -= run.status == RUNNING
        else:
            self._scheduler.leave(run)
        blocks = run.strip()
        self._pool.release(blocks)
        return len(blocks)

    def freeze(self, run: Run) -> RunState:
        """Take a run out of the batch or the queue, between steps, and read its state; again: the same state."""
        if not run.is_frozen:
            self._scheduler.leave(run)
            self._scheduler.slots_held += run.status == RUNNING
            run.is_frozen = True
        return run.state(self._config.block_tokens)

    def thaw(self, run: Run) -> None:
        """Put a frozen run back where it was: its rank says where."""
        if not run.is_frozen:
            return
        run.is_frozen = False
        if run.status == RUNNING:
            self._scheduler.slots_held -= 1
            self._scheduler.join(run)
        else:
            self._scheduler.enqueue(run)

    # --- steps -----------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Choose the next step; its runs are in flight until `apply`."""
        plan = self._scheduler.plan()
        for run, tokens, _ in plan.chunks:
            run.in_flight = tokens
        self._preemptions += len(plan.preempted)
        return plan

    def repeats(self, plan: Plan) -> int:
        """Steps that may be made in one go before the next plan, this one included."""
        most = self._config.steps_at_once_max
        return 1 if most == 1 else self._scheduler.repeats(plan, most)

    def advance(self, plan: Plan, steps: int) -> None:
        """Carry out `steps` of a plan's repeats, none of them the last; the next one is in flight then."""
        size, extend = self._config.block_tokens, self._contents.extend
        for run, _, _ in plan.chunks:
            first = run.computed
            end = run.computed = first + steps
            if end + 1 > len(run.table) * size:
                self._scheduler.grow(run)
            extend(run, steps)
            if end // size > first // size:
                self._publish(run, first // size)

    def apply(self, plan: Plan) -> Stepped:
        """Write the step's KV, and choose the next tokens from it."""
        sampled: list[tuple[Run, str | None]] = []
        contents, size, runs = self._contents, self._config.block_tokens, self.runs
        for run, tokens, _ in plan.chunks:
            run.in_flight = 0
            if runs.get(run.slot) is not run:
                continue
            first = run.computed
            end = run.computed = first + tokens
            contents.write(run, first, end)
            if end // size > first // size:
                self._publish(run, first // size)
            if end == len(run.tokens):
                contents.extend(run, 1)
                finish = run.chooser.finish(run.tokens[-1], end + 1 - run.prompt_tokens)
                sampled.append((run, finish))
                if finish is not None:
                    self.drop(run)
        return Stepped(tuple(sampled))

    def _publish(self, run: Run, first: int) -> None:
        size = self._config.block_tokens
        full = run.computed // size
        if full > first and self._config.prefix_cache:
            block_keys(run.tokens, run.keys, full, size)
            for index in range(first, full):
                self._pool.publish(run.table[index], run.keys[index])

    # --- copies ----------------------------------------------------------------------------------

    def pin(self, run: Run, first: int) -> Pinned:
        """Hold the blocks from `first` on whose content is final, so that a copy can read them."""
        size = self._config.block_tokens
        end = self._config.blocks_for(run.computed) if run.is_frozen else run.computed // size
        blocks = tuple(run.table[first:end])
        self._pool.acquire(blocks)
        run.pins += 1
        return Pinned(run, first, blocks, tuple(run.generations[first:end]), run.preemptions)

    def unpin(self, pinned: Pinned) -> None:
        """The copy has stopped reading."""
        pinned.run.pins -= 1
        self._pool.release(pinned.blocks)

    def fate(self, pinned: Pinned) -> str | None:
        """`gone` or `preempted` if the pinned blocks are no longer the run's own, in the same life (P05)."""
        run, end = pinned.run, pinned.first + len(pinned.blocks)
        if self.runs.get(run.slot) is not run:
            return "gone"
        is_same = (
            run.preemptions == pinned.preemptions
            and tuple(run.generations[pinned.first : end]) == pinned.generations
            and all(self._pool.generations[b] == g for b, g in zip(pinned.blocks, pinned.generations, strict=True))
        )
        return None if is_same else "preempted"

    def bytes_of(self, block: int) -> memoryview:
        """The writable bytes of one block."""
        return self._contents.block(block)

    # --- arrivals --------------------------------------------------------------------------------

    def reserve(self, slot: str, spec: RequestSpec, outputs: tuple[int, ...], blocks: int) -> Reservation:
        """Hold blocks and a slot for an arriving run, known content first. Raises `Refused`."""
        self._check(spec, outputs)
        if self._scheduler.slots_free <= 0:
            raise Refused("no_slots", f"all {self._config.slots_max} slots are taken")
        size, tokens = self._config.block_tokens, [*spec.prompt, *outputs]
        keys: list[bytes] = []
        known = min(blocks, (len(tokens) - 1) // size) if self._config.prefix_cache else 0
        block_keys(tokens, keys, known, size)
        hits = self._pool.hits(keys)
        held = self._pool.reserve(blocks, hits)
        if held is None:
            raise Refused("no_blocks", f"{blocks} blocks are needed, {self._pool.free} are free")
        reservation = Reservation(slot, held, len(hits), [self._pool.generations[block] for block in held])
        self.reservations[slot] = reservation
        self._scheduler.slots_held += 1
        return reservation

    def incoming(self, reservation: Reservation, index: int) -> memoryview:
        """Writable bytes of an arriving run's block; IndexError unless it is reserved for new content (P05)."""
        if self.reservations.get(reservation.slot) is not reservation:
            raise IndexError(f"the reservation {reservation.slot} is gone")
        if not reservation.cached <= index < len(reservation.blocks):
            raise IndexError(f"block {index} is outside {reservation.cached}..{len(reservation.blocks) - 1}")
        block = reservation.blocks[index]
        if self._pool.generations[block] != reservation.generations[index]:
            raise IndexError(f"block {index} was given to somebody else")
        return self._contents.block(block)

    def cancel(self, reservation: Reservation) -> int:
        """End a reservation; return how many blocks it held. Gone: 0. No write may be in progress."""
        if self.reservations.get(reservation.slot) is not reservation:
            return 0
        del self.reservations[reservation.slot]
        self._scheduler.slots_held -= 1
        self._pool.unreserve(reservation.blocks)
        return len(reservation.blocks)

    def adopt(self, reservation: Reservation, state: RunState) -> None:
        """Turn a reservation into a run. No write may be in progress. Raises `Refused` and changes nothing."""
        self._check(state.spec, state.outputs)
        run = self._new_run(reservation.slot, state.spec, state.outputs)
        run.preemptions = state.preemptions
        run.logprobs = list(state.logprobs)
        if state.computed == 0:
            self.cancel(reservation)
            self._scheduler.enqueue(run)
        else:
            self._take_over(reservation, run, state)
        self.runs[run.slot] = run

    def _take_over(self, reservation: Reservation, run: Run, state: RunState) -> None:
        known = reservation.cached * self._config.block_tokens
        computed = max(state.computed, known)
        if not (computed < len(run.tokens) and self._config.blocks_for(computed) <= len(reservation.blocks)):
            raise Refused("no_blocks", f"{computed} tokens of KV do not fit {len(reservation.blocks)} blocks")
        del self.reservations[reservation.slot]
        self._scheduler.slots_held -= 1
        self._pool.adopt(reservation.blocks)
        run.give(reservation.blocks, reservation.generations)
        run.computed = computed
        self._publish(run, reservation.cached)
        self._scheduler.join(run)

    # --- what it says about itself ---------------------------------------------------------------

    @property
    def prefixes(self) -> PrefixLog:
        """What the prefix cache holds."""
        return self._pool.prefixes

    def account(self) -> BlockAccount:
        """Where all blocks are."""
        pool = self._pool
        return BlockAccount(total=pool.total, owned=pool.owned, free=pool.free, reserved=pool.reserved)

    def load(self, step_ms: float, plan: Plan | None = None, ahead: int = 0) -> Load:
        """The load right now, `ahead` steps of a plan that are over being still to carry out.

        Frozen runs with blocks count as running.
        """
        size, scheduler = self._config.block_tokens, self._scheduler
        waiting = [(len(run.tokens) + size - 1) // size for run in scheduler.waiting]
        running = len(scheduler.running) + scheduler.slots_held - len(self.reservations)
        given = self._scheduler.blocks_wanted(plan, ahead + 1) if plan is not None and ahead else 0
        return Load(
            running=running,
            waiting=len(self.runs) - running,
            blocks_free=self._pool.free - given,
            blocks_reserved=self._pool.reserved,
            blocks_head=waiting[0] if waiting else 0,
            blocks_waiting=sum(waiting),
            step_ms=step_ms,
            preemptions=self._preemptions,
        )

    def faults(self) -> tuple[str, ...]:
        """Broken invariants in words (P05, P07); empty when all is well. For tests and the simulation's oracle."""
        found = list(self._pool.faults())
        for run in self.runs.values():
            if run.generations != [self._pool.generations[block] for block in run.table]:
                found.append(f"{run.slot} holds a block in an older life")
        if twice := self.runs.keys() & self.reservations.keys():
            found.append(f"both run and reservation: {sorted(twice)}")
        frozen = sum(run.is_frozen and run.status == RUNNING for run in self.runs.values())
        if self._scheduler.slots_held != frozen + len(self.reservations):
            found.append(f"{self._scheduler.slots_held} slots held, {frozen} frozen, {len(self.reservations)} reserved")
        return tuple(found)

    def _new_run(self, slot: str, spec: RequestSpec, outputs: tuple[int, ...]) -> Run:
        self._order += 1
        return Run(slot, spec, outputs, self._order)

    def _check(self, spec: RequestSpec, outputs: tuple[int, ...]) -> None:
        wrong = check_spec(spec, outputs, self._config)
        if wrong is not None:
            raise Refused("bad_request", wrong)
        length = len(spec.prompt) + max(spec.sampling.max_tokens, len(outputs))
        if length > self._config.length_max:
            raise Refused("too_long", f"prompt + max_tokens is {length}, at most {self._config.length_max} fit")
