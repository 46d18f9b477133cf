"""The random generator of a seeded request in vLLM's V1 runner: how a token uses it up, and how to be where it was.

On CPU the sampler takes exactly one number per step and request, `torch.randint(0, 2**31, (1,))`, so after
n output tokens a generator is its seed and n such draws. On CUDA it fills a row of the vocabulary with
exponential noise; its Philox offset grows by the same amount each time (by reading, not run).
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class ReplayedGenerator(torch.Generator):
    """A CPU generator that can go back to where the request's last kept token left it.

    vLLM takes back what a chunk of a prefill drew with `set_offset`, which CPU generators do not have:
    a stock engine dies there. `kept` says how many output tokens there are.
    """

    seed_used: int
    kept: Callable[[], int]

    def get_offset(self) -> int:
        """There is none; `set_offset` needs none."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Forget every draw that made no token."""
        self.manual_seed(self.seed_used)
        draw_cpu(self, self.kept())


def draw_cpu(generator: torch.Generator, tokens: int) -> None:
    """Use a CPU generator up as the sampling of so many tokens does."""
    for _ in range(tokens):
        torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)


def draw_cuda(generator: torch.Generator, tokens: int, vocabulary: int) -> None:
    """Use a CUDA generator up as the sampling of so many tokens does. Not run: no GPU was there."""
    before = generator.get_offset()
    torch.empty(vocabulary, device=generator.device).exponential_(generator=generator)
    generator.set_offset(before + tokens * (generator.get_offset() - before))


def generator_for(
    seed: int, kept: Callable[[], int], state: bytes, device: torch.device, vocabulary: int
) -> torch.Generator:
    """A generator in `state`, or, if that is empty, where `kept()` output tokens leave one that began with `seed`."""
    generator = ReplayedGenerator(device=device) if device.type == "cpu" else torch.Generator(device=device)
    if isinstance(generator, ReplayedGenerator):
        generator.seed_used, generator.kept = seed, kept
    generator.manual_seed(seed)
    if state:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif device.type == "cpu":
        draw_cpu(generator, kept())
    elif kept():
        draw_cuda(generator, kept(), vocabulary)
    return generator


def state_of(generator: torch.Generator) -> bytes:
    """All of a generator, as bytes."""
    return bytes(generator.get_state().numpy().tobytes())
