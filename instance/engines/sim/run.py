"""What one engine knows of one request: a run, or a reservation for one that is to arrive."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from midstream.instance.engines.base import Output, SlotProgress
from midstream.instance.engines.sim.kv import Rows
from midstream.instance.engines.sim.model import block_keys
from midstream.instance.engines.sim.sampler import Chooser
from midstream.migration.protocol.messages import RequestSpec, RunState

WAITING = "waiting"
RUNNING = "running"

Rank = tuple[int, int, int]


class Run:
    """One run: tokens, how many of them have KV, and the blocks that hold it. Changed by the core alone."""

    __slots__ = (
        "_rows",
        "chooser",
        "computed",
        "generations",
        "in_flight",
        "is_frozen",
        "is_silent",
        "keys",
        "logprobs",
        "pins",
        "preemptions",
        "prompt_tokens",
        "rank",
        "slot",
        "spec",
        "status",
        "table",
        "tokens",
        "told",
    )

    def __init__(self, slot: str, spec: RequestSpec, outputs: tuple[int, ...], order: int) -> None:
        self.slot = slot
        self.spec = spec
        self.tokens = [*spec.prompt, *outputs]
        self.prompt_tokens = len(spec.prompt)
        self.told = len(outputs)
        """Output tokens that were given to the llumlet."""
        self.is_silent = True
        """It told none of its own tokens yet."""
        self.rank: Rank = (spec.priority, spec.arrival_ms, order)
        """Lower goes first: priority, then arrival, then the order in which this engine met them."""
        self.chooser = Chooser(spec, outputs)
        self.logprobs: list[bytes] = [b""] * len(outputs) if spec.sampling.logprobs is not None else []
        self.status = WAITING
        self.is_frozen = False
        self.computed = 0
        self.in_flight = 0
        """Tokens that the step in progress computes."""
        self.pins = 0
        """Copies that read its blocks."""
        self.preemptions = 0
        self.keys: list[bytes] = []
        self.table: list[int] = []
        self.generations: list[int] = []
        self._rows: Rows | None = None

    @property
    def outputs(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def rows(self) -> Rows:
        """Its blocks, for looking up all of their words at once."""
        if self._rows is None:
            self._rows = np.array(self.table, dtype=np.intp)
        return self._rows

    @property
    def is_decoding(self) -> bool:
        """Its next step makes a token from one new position."""
        return 0 < self.computed == len(self.tokens) - 1

    @property
    def phase(self) -> str:
        """`waiting prefill decode frozen`."""
        if self.is_frozen:
            return "frozen"
        if self.status == WAITING:
            return "waiting"
        return "decode" if self.is_decoding else "prefill"

    def content_keys(self, count: int, block_tokens: int) -> Iterator[bytes]:
        """Keys of its first `count` full blocks."""
        block_keys(self.tokens, self.keys, count, block_tokens)
        return islice(self.keys, count)

    def give(self, blocks: list[int], generations: list[int]) -> None:
        """Add blocks to its table, each with the life in which it was given."""
        self.table += blocks
        self.generations += generations
        self._rows = None

    def strip(self) -> list[int]:
        """Take all blocks from it."""
        blocks, self.table, self.generations = self.table, [], []
        self._rows = None
        self.computed = 0
        return blocks

    def progress(self, ahead: int, block_tokens: int) -> SlotProgress:
        """How far it has come, `ahead` decode steps that are over being still to carry out."""
        computed, blocks = self.computed + ahead, len(self.table)
        return SlotProgress(
            slot=self.slot,
            phase=self.phase,
            tokens=len(self.tokens) + ahead,
            outputs=self.outputs + ahead,
            computed=computed,
            blocks=max(blocks, computed // block_tokens + 1) if ahead else blocks,
            preemptions=self.preemptions,
        )

    @property
    def tokens_to_go(self) -> int:
        """Output tokens until its length ends it."""
        return self.prompt_tokens + self.spec.sampling.max_tokens - len(self.tokens)

    def tell(self, finish: str | None = None) -> Output:
        """Everything not told yet, as an output."""
        first, self.told, self.is_silent = self.told, self.outputs, False
        return Output(
            slot=self.slot,
            first=first,
            ids=tuple(self.tokens[self.prompt_tokens + first :]),
            logprobs=tuple(self.logprobs[first:]),
            finish=finish,
        )

    def state(self, block_tokens: int) -> RunState:
        """All of it besides KV; the seeded sampler counts outputs and so has no state of its own."""
        return RunState(
            spec=self.spec,
            outputs=tuple(self.tokens[self.prompt_tokens :]),
            computed=self.computed,
            blocks=-(-self.computed // block_tokens),
            logprobs=tuple(self.logprobs),
            preemptions=self.preemptions,
        )


class Reservation:
    """Blocks and a run slot held for an arriving run. Blocks before `cached` already have their content."""

    __slots__ = ("blocks", "cached", "generations", "slot")

    def __init__(self, slot: str, blocks: list[int], cached: int, generations: list[int]) -> None:
        self.slot = slot
        self.blocks = blocks
        self.cached = cached
        self.generations = generations
