"""A workload by its name, ready to play: a shipped trace, a file or a generated one, moved in time, cut to size."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import msgspec

from midstream.api.traces.generate import GENERATED, generate
from midstream.api.traces.load import TraceRow, load_trace

GOLDEN = 0.6180339887498949

GRID_SHARE = 0.5
"""Arrivals stand on a grid if more of them than this share their time with another."""


def workload(name: str, *, seed: int, rate_scale: float = 1.0, requests: int | None = None) -> tuple[TraceRow, ...]:
    """The rows to play, arrivals divided by `rate_scale` and counted from the first.

    With fewer `requests` than a trace has, each seed takes another part of it; parts may overlap (`overlap`). Raises
    `UnknownThing`, `BadInput`.
    """
    if name in GENERATED:
        rows: Sequence[TraceRow] = generate(name, seed, requests)
    else:
        whole = load_trace(name)
        rows = part(whole, seed, requests)
        if over_s := grid_s(whole):
            rows = spread(rows, over_s, random.Random(f"spread {seed}"))
    return tuple(msgspec.structs.replace(row, arrival_s=row.arrival_s / rate_scale) for row in rows)


def part(rows: Sequence[TraceRow], seed: int, requests: int | None) -> Sequence[TraceRow]:
    """`requests` rows from a place that the seed chooses; all of them if there are no more."""
    if requests is None or requests >= len(rows):
        return rows
    first = _first(len(rows), seed, requests)
    start_s = rows[first].arrival_s
    return [msgspec.structs.replace(row, arrival_s=row.arrival_s - start_s) for row in rows[first : first + requests]]


def _first(count: int, seed: int, requests: int) -> int:
    """Parts without a row in common as long as there are any, then evenly spread ones (by the golden ratio)."""
    if (seed + 1) * requests <= count:
        return seed * requests
    return int(seed * GOLDEN % 1 * (count - requests + 1))


def overlap(name: str, seeds: int, requests: int) -> float:
    """The greatest share of rows that two seeds' parts have in common: 1 if all play the same. Raises as `workload`."""
    if name in GENERATED or seeds < 2:
        return 0.0
    count = len(load_trace(name))
    if requests >= count:
        return 1.0
    firsts = sorted(_first(count, seed, requests) for seed in range(seeds))
    return max(0.0, 1 - min(later - earlier for earlier, later in pairwise(firsts)) / requests)


def grid_s(rows: Sequence[TraceRow]) -> float:
    """The usual step of a trace whose arrivals stand on a grid, seconds; 0 for one whose do not.

    Played as they are, every instance would see a saw-tooth.
    """
    counts = Counter(row.arrival_s for row in rows)
    steps = [round(later - earlier, 3) for earlier, later in pairwise(sorted(counts))]
    shared = sum(count for count in counts.values() if count > 1)
    return median(steps) if steps and shared > GRID_SHARE * len(rows) else 0.0


def spread(rows: Sequence[TraceRow], over_s: float, rng: random.Random) -> Sequence[TraceRow]:
    """Rows that share their time with another are moved by up to `over_s`."""
    times = [row.arrival_s for row in rows]
    shared = {a for a, b in pairwise(times) if a == b}
    moved = [
        msgspec.structs.replace(row, arrival_s=row.arrival_s + rng.random() * over_s)
        if row.arrival_s in shared
        else row
        for row in rows
    ]
    return sorted(moved, key=lambda row: row.arrival_s)


def has_content(rows: Sequence[TraceRow]) -> bool:
    """Do rows say what they share: only then is a prefix cache worth simulating."""
    return any(row.content for row in rows)
