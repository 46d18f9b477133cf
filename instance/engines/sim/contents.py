"""What fills KV blocks and makes tokens: real bytes, or lengths alone.

With `kv = "bytes"` the next token is a function of the bytes read back, so that a lost or stale block shows. With
`kv = "lengths"` blocks are only counted and tokens only numbered: everything about scheduling stays, and a simulation
of a fleet's whole day becomes affordable.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from midstream.instance.engines.sim.config import STEPS_AT_ONCE_MAX, SimConfig
from midstream.instance.engines.sim.kv import KvMemory
from midstream.instance.engines.sim.model import FIRST_ID, Model, chain
from midstream.instance.engines.sim.run import Run

RAMP_IDS: Final = 64
"""Numbered tokens repeat after so many: position and order still show in them."""

_RAMP: Final = [FIRST_ID + index % RAMP_IDS for index in range(RAMP_IDS + STEPS_AT_ONCE_MAX)]


class Contents(Protocol):
    """All blocks' content of one engine."""

    def write(self, run: Run, first: int, end: int) -> None:
        """Fill the run's positions `first` .. `end` - 1."""
        ...

    def extend(self, run: Run, tokens: int) -> None:
        """Append the run's next output tokens, and their log probabilities if it wants them."""
        ...

    def block(self, block: int) -> memoryview:
        """One block: its writable bytes, or only their number."""
        ...


class BytesKv:
    """Real bytes, read back whole for every token."""

    def __init__(self, config: SimConfig, memory: memoryview | None) -> None:
        self._memory = KvMemory(config, memory)
        self._model = Model(config)

    def write(self, run: Run, first: int, end: int) -> None:
        """See `Contents.write`."""
        before = self._memory.word(run.table, first - 1, run.outputs) if first else self._model.start
        self._memory.write(run.table, first, chain(before, run.tokens[first:end], first))

    def extend(self, run: Run, tokens: int) -> None:
        """See `Contents.extend`. One at a time: the next one needs the KV of this one."""
        assert tokens == 1, "bytes are computed step by step"
        index = run.outputs
        candidates = self._model.candidates(self._memory.digest(run.rows, run.computed, index))
        token = run.chooser.choose(candidates, index)
        run.tokens.append(token)
        if run.spec.sampling.logprobs is not None:
            run.logprobs.append(run.chooser.entry(candidates, token))

    def block(self, block: int) -> memoryview:
        """See `Contents.block`."""
        return self._memory.block(block)


class LengthsKv:
    """No bytes. Token `i` of every request is number `i` of a ramp."""

    def __init__(self, config: SimConfig) -> None:
        self._block: memoryview = np.broadcast_to(np.zeros(1, dtype=np.uint8), config.block_bytes).data

    def write(self, run: Run, first: int, end: int) -> None:
        """Nothing to write."""

    def extend(self, run: Run, tokens: int) -> None:
        """See `Contents.extend`."""
        known = run.tokens
        start = (len(known) - run.prompt_tokens) % RAMP_IDS
        known += _RAMP[start : start + tokens]

    def block(self, block: int) -> memoryview:
        """A view with a block's length and no memory behind it."""
        return self._block


def make_contents(config: SimConfig, memory: memoryview | None = None) -> Contents:
    """As the settings say. `memory`: where the bytes lie; None: memory of its own."""
    return BytesKv(config, memory) if config.kv == "bytes" else LengthsKv(config)
