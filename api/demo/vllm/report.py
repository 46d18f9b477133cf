"""The demo's result for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from midstream.api.demo.vllm.moves import Seam
    from midstream.api.demo.vllm.run import Verdict

MIB = 1 << 20


def report(verdict: Verdict, console: Console) -> None:
    """Print one row per move, then what was verified."""
    console.print(_moves(verdict))
    console.print(_checks(verdict))


def _moves(verdict: Verdict) -> Table:
    table = Table(title="Moves of running requests, real vLLM")
    for name in (
        "prompt",
        "sampling",
        "context",
        "move",
        "at token",
        "copied",
        "gap before",
        "gap at seam",
        "downtime",
    ):
        table.add_column(name, justify="left" if name in {"prompt", "sampling", "move"} else "right")
    for one in verdict.played:
        for number, seam in enumerate(one.seams):
            is_first = number == 0
            table.add_row(
                one.act.ask.title if is_first else "",
                one.act.ask.sampling if is_first else "",
                str(one.moved.prompt_tokens + seam.index),
                f"{seam.source} → {seam.target}",
                str(seam.index),
                f"{seam.copied_bytes / MIB:.1f} MiB, {seam.rounds} rounds",
                f"{seam.normal_gap_ms:.0f} ms",
                f"{seam.normal_gap_ms + seam.downtime_ms:.0f} ms",
                _downtime(seam),
            )
    return table


def _downtime(seam: Seam) -> str:
    steps = seam.downtime_ms / seam.normal_gap_ms if seam.normal_gap_ms else 0.0
    return f"{seam.downtime_ms:.0f} ms ({steps:.2f} steps)"


def _checks(verdict: Verdict) -> Table:
    found = verdict.audit
    table = Table(title="Verified", show_header=False, min_width=72)
    equal = [one for one in verdict.played if one.is_equal]
    rows = [
        ("moved answers equal to the undisturbed ones, token for token", f"{len(equal)} of {len(verdict.played)}"),
        ("tokens compared", str(sum(len(one.moved.ids) for one in equal))),
        ("moves", str(sum(len(one.seams) for one in verdict.played))),
        ("requests failed", str(found.requests_failed)),
        ("blocks leaked", "none" if not verdict.leaks else "; ".join(verdict.leaks)),
        ("facts archived, holes", f"{found.facts}, {len(found.holes)}"),
        ("decisions re-derived from the log", f"{found.decisions_equal} of {found.decisions} equal"),
        ("took", f"{verdict.seconds:.0f} s"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table
