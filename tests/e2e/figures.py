"""What a move costs its client, measured on a real cluster: `python -m tests.e2e.figures --moves 100`.

One stream goes to and fro between two instances, alone or among others. Figures come from the log's own facts.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from midstream.api.demo.audit import percentile
from midstream.control.events import DowntimeMeasured, Entry, MigrationAdopted, MigrationCommitted, RoundCopied
from tests.e2e.helpers import Client, Rig, running

SIZES = (1_500, 1_500)
STEP_MS = 30.0
"""A decode step at scale 1."""


async def to_and_fro(rig: Rig, client: Client, moves: int, every: int) -> list[str]:
    """Move a request `moves` times, each time after `every` more tokens; return the owners in order."""
    owners = [await rig.owner(client)]
    first, second = rig.llumlets
    for move in range(moves):
        await client.has(every * (move + 1))
        target = second if owners[-1] == first else first
        done = await rig.move(client, target)
        assert done["status"] == "succeeded", done
        owners.append(target)
    return owners


async def measure(folder: Path, moves: int, scale: float, others: int) -> list[Entry]:
    """The facts of a run of so many moves, with `others` streams beside the moved one."""
    every = max(5, round(400 / (STEP_MS * scale)))
    async with running(folder, SIZES, sim_time_scale=scale, tick_ms=50) as rig:
        beside = [rig.stream(10_000, prompt_tokens=100 + 10 * i) for i in range(others)]
        for client in beside:
            await client.has(2)
        client = rig.stream(20_000, prompt_tokens=200)
        await client.has(20)
        await to_and_fro(rig, client, moves, every)
        await client.leave()
        facts = await rig.facts()
        got = tuple(client.ids)
        assert got == client.expected()[: len(got)]
        return facts


def report(entries: Sequence[Entry]) -> str:
    """Downtime and freeze-to-adopt of all moves."""
    events = [entry.fact.event for entry in entries]
    measured = [event for event in events if isinstance(event, DowntimeMeasured)]
    finals = [event.duration_ms for event in events if isinstance(event, RoundCopied) and event.is_final]
    adopted = [event.freeze_to_adopt_ms for event in events if isinstance(event, MigrationAdopted)]
    commits = sum(isinstance(event, MigrationCommitted) for event in events)
    lines = [
        f"{commits} moves committed, decode step {_shares([m.normal_gap_ms for m in measured])} ms",
        f"downtime, decode steps: {_shares(m.downtime_ms / m.normal_gap_ms for m in measured)}",
        f"downtime, ms: {_shares(m.downtime_ms for m in measured)}",
        f"freeze to adopt, ms: {_shares(ms for ms in adopted if ms is not None)}",
        f"final copy, ms: {_shares(finals)}",
    ]
    return "\n".join(lines)


def _shares(values: Iterable[float]) -> str:
    ordered = tuple(sorted(values))
    named = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return " ".join(f"{name} {percentile(ordered, share) or 0.0:.2f}" for name, share in named.items())


def main(
    moves: Annotated[int, typer.Option(min=1)] = 50,
    scale: Annotated[float, typer.Option(help="Factor on step times; 1 is a decode step of 30 ms.")] = 0.33,
    others: Annotated[int, typer.Option(min=0, help="Streams beside the moved one.")] = 0,
) -> None:
    """Measure."""
    with tempfile.TemporaryDirectory(prefix="figures-") as folder:
        entries = asyncio.run(measure(Path(folder), moves, scale, others))
    sys.stdout.write(report(entries) + "\n")


if __name__ == "__main__":
    typer.run(main)
