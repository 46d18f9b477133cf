"""Which runs take part in the next step: continuous batching with chunked prefill and preemption.

Decoding runs come first, then unfinished prefills, then waiting runs in rank order without overtaking. When blocks run
out, the last in rank loses its blocks and recomputes later; a run never takes blocks from one before it in rank, so
the first in rank always gets on and two runs cannot preempt each other in turn (no livelock).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from operator import attrgetter
from typing import NamedTuple

from midstream.instance.engines.sim.blocks import BlockPool
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.run import RUNNING, WAITING, Run

_rank = attrgetter("rank")


class Chunk(NamedTuple):
    """Part of one step: compute the next `tokens` tokens of `run`."""

    run: Run
    tokens: int
    is_decode: bool


class Plan(NamedTuple):
    """One step, and which runs lost their blocks for it."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Run, ...]


class Scheduler:
    """The waiting and the running; frozen runs are in neither list but keep their slot."""

    def __init__(self, config: SimConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self.waiting: list[Run] = []
        self.running: list[Run] = []
        self.slots_held = 0
        """Slots of reservations and of frozen runs."""

    @property
    def slots_free(self) -> int:
        """Runs that may still be admitted."""
        return self._config.slots_max - len(self.running) - self.slots_held

    def enqueue(self, run: Run) -> None:
        """Put a run without blocks into the waiting queue, in rank order."""
        run.status = WAITING
        insort(self.waiting, run, key=_rank)

    def join(self, run: Run) -> None:
        """Put a run into the batch, past the waiting queue."""
        run.status = RUNNING
        insort(self.running, run, key=_rank)

    def leave(self, run: Run) -> None:
        """Take a run out of its list."""
        (self.running if run.status == RUNNING else self.waiting).remove(run)

    def plan(self) -> Plan:
        """Choose the next step and give its runs their blocks."""
        chunks: dict[str, Chunk] = {}
        preempted: list[Run] = []
        budget = self._config.step_tokens_max
        for run, is_decode in self._in_turn():
            tokens = min(len(run.tokens) - run.computed, budget)
            if tokens and run.status == RUNNING and self._grow(run, tokens, chunks, preempted):
                chunks[run.slot] = Chunk(run, tokens, is_decode)
                budget -= tokens
        if not preempted:
            self._admit(budget, chunks)
        return Plan(tuple(chunks.values()), tuple(preempted))

    def _in_turn(self) -> list[tuple[Run, bool]]:
        """The running, those that decode first; and do they."""
        decoding: list[tuple[Run, bool]] = []
        prefilling: list[tuple[Run, bool]] = []
        for run in self.running:
            is_decode = 0 < run.computed == len(run.tokens) - 1
            (decoding if is_decode else prefilling).append((run, is_decode))
        return decoding + prefilling

    def _admit(self, budget: int, chunks: dict[str, Chunk]) -> None:
        while budget and self.waiting and self.slots_free > 0:
            run = self.waiting[0]
            if not self._place(run):
                return
            del self.waiting[0]
            self.join(run)
            tokens = min(len(run.tokens) - run.computed, budget)
            chunks[run.slot] = Chunk(run, tokens, False)
            budget -= tokens

    def _place(self, run: Run) -> bool:
        """Give a waiting run all the blocks its tokens need, known ones first; the last token is always computed."""
        size, pool = self._config.block_tokens, self._pool
        needed = self._config.blocks_for(len(run.tokens))
        known = (len(run.tokens) - 1) // size if self._config.prefix_cache else 0
        hits = pool.hits(run.content_keys(known, size))
        if pool.cost(needed, hits) > pool.free:
            return False
        pool.acquire(hits)
        self._give(run, hits + self._must(needed - len(hits)))
        run.computed = len(hits) * size
        return True

    def _grow(self, run: Run, tokens: int, chunks: dict[str, Chunk], preempted: list[Run]) -> bool:
        """See that a run has blocks for its next `tokens` positions; False if it must sit this step out."""
        size, room = self._config.block_tokens, len(run.table)
        missing = (run.computed + tokens + size - 1) // size - room
        if missing <= 0:
            return True
        while self._pool.free < missing:
            victim = self.running[-1]
            if victim is run:
                return False
            self._preempt(victim, chunks)
            preempted.append(victim)
            if victim.pins:
                return False  # its blocks come back when the copy that reads them has stopped
        self._give(run, self._must(missing))
        return True

    def repeats(self, plan: Plan, most: int) -> int:
        """How many times in a row a plan just made may be carried out as it is, if nobody comes or goes meanwhile.

        Only the last of these steps may end a run, or bring a first token. A waiting head that found no room finds none
        later either: decodes only use up blocks.
        """
        if plan.preempted or len(plan.chunks) != len(self.running):
            return 1
        for run, _, is_decode in plan.chunks:
            if not is_decode or run.is_silent:
                return 1
            most = min(most, run.tokens_to_go)
        if self.blocks_wanted(plan, most) <= self._pool.free:
            return most
        return bisect_right(range(most), self._pool.free, lo=1, key=lambda steps: self.blocks_wanted(plan, steps + 1))

    def grow(self, run: Run) -> None:
        """Give a run the blocks up to its next position; `repeats` saw that there are enough."""
        self._give(run, self._must(self._config.blocks_for(run.computed + 1) - len(run.table)))

    def blocks_wanted(self, plan: Plan, steps: int) -> int:
        """Blocks to give out in the course of so many decode steps of a plan."""
        size, wanted = self._config.block_tokens, 0
        for run, _, _ in plan.chunks:
            missing = (run.computed + steps + size - 1) // size - len(run.table)
            if missing > 0:
                wanted += missing
        return wanted

    def _give(self, run: Run, blocks: list[int]) -> None:
        run.give(blocks, [self._pool.generations[block] for block in blocks])

    def _must(self, count: int) -> list[int]:
        blocks = self._pool.allocate(count)
        assert blocks is not None, "asked for more blocks than are free"
        return blocks

    def _preempt(self, run: Run, chunks: dict[str, Chunk]) -> None:
        chunks.pop(run.slot, None)
        self.leave(run)
        self._pool.release(run.strip())
        run.preemptions += 1
        self.enqueue(run)
