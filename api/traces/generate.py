"""Made-up workloads, by name and seed: arrivals by Poisson or gamma, heavy-tailed lengths, tenants, shared prefixes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final

import msgspec

from midstream.api.traces.load import CONTENT_TOKENS, TraceRow
from midstream.control.errors import UnknownThing


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. `tail` is the exponent of a power law from `least` on: the smaller, the heavier; over 1."""

    least: int
    most: int
    tail: float

    def draw(self, rng: random.Random) -> int:
        """Inverse of the power law's distribution, cut at `most`."""
        return min(self.most, int(self.least * (1 - rng.random()) ** (-1 / (self.tail - 1))))


class Bounded(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts by a bounded Pareto distribution: a power law with this `exponent` between `least` and `most`."""

    least: int
    most: int
    exponent: float

    def draw(self, rng: random.Random) -> int:
        """Inverse of its distribution."""
        left = (self.least / self.most) ** self.exponent
        return int(self.least * (1 - rng.random() * (1 - left)) ** (-1 / self.exponent))


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How to make a workload. Rates are for `rate_scale` 1."""

    requests: int = 10_000
    per_s: float = 4.0
    cv: float = 1.0
    """Coefficient of variation of the gaps: 1 is Poisson, more is burstier (gamma)."""
    prompt: Lengths | Bounded
    output: Lengths | Bounded
    clients: int = 1
    """Tenants; the n-th sends 1/n as often as the first."""
    urgent: float = 0.0
    """Share of requests with priority -1, which runs before 0."""
    prefixes: int = 0
    """Shared beginnings (system prompts); the n-th is 1/n as frequent as the first."""
    prefix_blocks: int = 4
    """Length of each, in blocks of `CONTENT_TOKENS`."""


SHORT: Final = Bounded(least=18, most=6_000, exponent=0.95)
MEDIUM: Final = Bounded(least=8, most=6_000, exponent=0.45)
LONG: Final = Bounded(least=2, most=6_000, exponent=0.12)
"""Fitted to means and percentiles of the Llumnix paper's table 1: means of 128, 256 and 512 tokens, 6,000 at most."""

GENERATED: Final[dict[str, Recipe]] = {
    "heavy_tail": Recipe(
        prompt=Lengths(least=64, most=6_000, tail=2.0), output=Lengths(least=64, most=6_000, tail=2.0)
    ),
    "bursty": Recipe(
        prompt=Lengths(least=128, most=6_000, tail=2.2), output=Lengths(least=64, most=2_000, tail=2.2), cv=4.0
    ),
    "shared_prefix": Recipe(
        prompt=Lengths(least=32, most=2_000, tail=2.2), output=Lengths(least=64, most=2_000, tail=2.2), prefixes=32
    ),
    "tenants": Recipe(
        prompt=Lengths(least=128, most=6_000, tail=2.2),
        output=Lengths(least=64, most=2_000, tail=2.2),
        cv=2.0,
        clients=20,
        urgent=0.1,
    ),
    "short_short": Recipe(prompt=SHORT, output=SHORT),
    "medium_medium": Recipe(prompt=MEDIUM, output=MEDIUM),
    "long_long": Recipe(prompt=LONG, output=LONG),
    "short_long": Recipe(prompt=SHORT, output=LONG),
    "long_short": Recipe(prompt=LONG, output=SHORT),
    "long_long_bursty": Recipe(prompt=LONG, output=LONG, cv=4.0),
}
"""Power laws in the manner of the Llumnix paper's generated traces; those named by two lengths are its own."""


def generate(name: str, seed: int, requests: int | None = None) -> tuple[TraceRow, ...]:
    """A made-up workload. Raises `UnknownThing` with the known names."""
    if name not in GENERATED:
        raise UnknownThing(f"no generated workload {name}; known: {', '.join(GENERATED)}")
    return make(GENERATED[name], random.Random(f"workload {name} {seed}"), requests)


def make(recipe: Recipe, rng: random.Random, requests: int | None = None) -> tuple[TraceRow, ...]:
    """Rows of a recipe, all drawn from `rng`."""
    client, prefix = _ranked(recipe.clients, rng), _ranked(recipe.prefixes, rng)
    at_s, fresh, rows = 0.0, recipe.prefixes * recipe.prefix_blocks, []
    shape = 1 / recipe.cv**2
    for _ in range(requests or recipe.requests):
        at_s += rng.gammavariate(shape, 1 / (shape * recipe.per_s))
        tokens = recipe.prompt.draw(rng)
        content: tuple[int, ...] = ()
        if recipe.prefixes:
            tokens, content = _with_prefix(recipe, prefix(), tokens, fresh)
            fresh += len(content)
        row = TraceRow(
            at_s, tokens, recipe.output.draw(rng),
            client=str(client()) if recipe.clients > 1 else "",
            priority=-1 if recipe.urgent and rng.random() < recipe.urgent else 0,
            content=content,
        )  # fmt: skip
        rows.append(row)
    return tuple(rows)


def _with_prefix(recipe: Recipe, prefix: int, tokens: int, fresh: int) -> tuple[int, tuple[int, ...]]:
    first = prefix * recipe.prefix_blocks
    own = math.ceil(tokens / CONTENT_TOKENS)
    content = (*range(first, first + recipe.prefix_blocks), *range(fresh, fresh + own))
    return tokens + recipe.prefix_blocks * CONTENT_TOKENS, content


def _ranked(count: int, rng: random.Random) -> Callable[[], int]:
    """Draws of 0 .. count-1, the n-th 1/n as often as the first (Zipf)."""
    numbers, weights = range(count), [1 / (n + 1) for n in range(count)]
    return lambda: rng.choices(numbers, weights)[0] if count > 1 else 0
