"""The undisturbed run: which tokens a request yields when nothing ever happens to it. No engine, no blocks."""

from __future__ import annotations

import numpy as np

from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.model import MASK, Model, chain, weights
from midstream.instance.engines.sim.sampler import Chooser
from midstream.migration.protocol.messages import RequestSpec


def reference_output(spec: RequestSpec, config: SimConfig) -> tuple[tuple[int, ...], str]:
    """Output token ids and finish reason of a request on any engine of this model.

    Sizes and speed of `config` do not matter. Costs a few microseconds a token: the digest of the KV grows by one
    term a token instead of being read back.
    """
    model, chooser = Model(config), Chooser(spec)
    words = chain(model.start, spec.prompt, 0)
    position = len(words)
    factors = weights(position + spec.sampling.max_tokens)
    digest = int(np.dot(np.array(words, dtype=np.uint64), factors[:position])) & MASK
    word = words[-1]
    outputs: list[int] = []
    for factor in factors[position:].tolist():
        token = chooser.choose(model.candidates(digest), len(outputs))
        outputs.append(token)
        finish = chooser.finish(token, len(outputs))
        if finish is not None:
            return tuple(outputs), finish
        (word,) = chain(word, (token,), position)
        digest = (digest + word * factor) & MASK
        position += 1
    raise AssertionError("unreachable: max_tokens ends every run")
