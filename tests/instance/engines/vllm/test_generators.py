"""Where a seeded request's generator stands after so many tokens, by vLLM's own sampler."""

from __future__ import annotations

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from midstream.instance.engines.vllm.generators import ReplayedGenerator, generator_for, state_of

CPU = torch.device("cpu")
SEED, VOCABULARY = 42, 50


current_platform.import_kernels()


def sample(generator: torch.Generator, steps: int) -> list[int]:
    """So many steps of vLLM's sampler over logits that do not change."""
    sampler = TopKTopPSampler()
    logits = torch.linspace(0, 2, VOCABULARY).repeat(2, 1)
    tokens = []
    for _ in range(steps):
        sampled, _ = sampler.forward(logits.clone(), {1: generator}, None, None)
        tokens.append(int(sampled[1]))
    return tokens


def fresh() -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(SEED)
    return generator


@pytest.mark.parametrize("done", [0, 1, 2, 37])
def test_P03_a_generator_derived_from_seed_and_outputs_goes_on_exactly(done: int) -> None:
    undisturbed = sample(fresh(), done + 20)
    outputs = undisturbed[:done]
    assert sample(generator_for(SEED, outputs.__len__, b"", CPU, VOCABULARY), 20) == undisturbed[done:]


def test_P03_a_carried_state_and_a_derived_one_are_the_same() -> None:
    generator = fresh()
    outputs = sample(generator, 12)
    assert state_of(generator) == state_of(generator_for(SEED, outputs.__len__, b"", CPU, VOCABULARY))
    carried = generator_for(SEED, outputs.__len__, state_of(generator), CPU, VOCABULARY)
    assert sample(carried, 5) == sample(fresh(), 17)[12:]


def test_what_a_chunk_of_a_prefill_drew_is_taken_back() -> None:
    """What vLLM does after a step whose token it throws away; a plain CPU generator raises there."""
    outputs: list[int] = []
    generator = generator_for(SEED, outputs.__len__, b"", CPU, VOCABULARY)
    assert isinstance(generator, ReplayedGenerator)
    for _ in range(3):
        sample(generator, 1)
        generator.set_offset(generator.get_offset() - 4)
    assert sample(generator, 10) == sample(fresh(), 10)
    outputs += [0] * 10
    sample(generator, 1)
    generator.set_offset(generator.get_offset() - 4)
    assert sample(generator, 5) == sample(fresh(), 15)[10:]


def test_the_stock_generator_still_needs_ours() -> None:
    """The day this fails, seeded requests may go through vLLM's own door."""
    with pytest.raises(RuntimeError, match="offset"):
        fresh().set_offset(0)
