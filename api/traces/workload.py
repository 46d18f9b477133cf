"""A workload by its name, ready to play: a shipped trace, a file or a generated one, moved in time, cut to size."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from midstream.api.traces.generate import GENERATED, generate
from midstream.api.traces.load import TraceRow, load_trace

SPREAD_S = {"mooncake_conversation_2025": 3.0}
"""Traces whose arrivals stand on a grid, and the grid: played as they are, every instance would see a saw-tooth."""


def workload(name: str, *, seed: int, rate_scale: float = 1.0, requests: int | None = None) -> tuple[TraceRow, ...]:
    """The rows to play, arrivals divided by `rate_scale` and counted from the first.

    With fewer `requests` than a trace has, each seed takes another part of it. Raises `UnknownThing`, `BadInput`.
    """
    if name in GENERATED:
        rows: Sequence[TraceRow] = generate(name, seed, requests)
    else:
        rows = part(load_trace(name), seed, requests)
        if name in SPREAD_S:
            rows = spread(rows, SPREAD_S[name], random.Random(f"spread {seed}"))
    return tuple(msgspec.structs.replace(row, arrival_s=row.arrival_s / rate_scale) for row in rows)


def part(rows: Sequence[TraceRow], seed: int, requests: int | None) -> Sequence[TraceRow]:
    """`requests` rows from a place that the seed chooses; all of them if there are no more."""
    if requests is None or requests >= len(rows):
        return rows
    first = seed * requests % (len(rows) - requests + 1)
    start_s = rows[first].arrival_s
    return [msgspec.structs.replace(row, arrival_s=row.arrival_s - start_s) for row in rows[first : first + requests]]


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
