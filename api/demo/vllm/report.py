"""The demo's result for people."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from midstream.api.demo.vllm.moves import Seam
    from midstream.api.demo.vllm.run import Verdict
    from midstream.api.demo.vllm.stage import Played

MIB = 1 << 20
NEAR = 8


def report(verdict: Verdict, console: Console) -> None:
    """Print one row per move, then what was verified."""
    console.print(_moves(verdict))
    console.print(_checks(verdict))


def _moves(verdict: Verdict) -> Table:
    table = Table(title="Pauses that a client sees, real vLLM")
    for name in ("prompt", "move", "context", "copied", "gap", "at seam", "downtime", "steps"):
        table.add_column(name, justify="left" if name in {"prompt", "move"} else "right")
    for one in verdict.played:
        title = one.act.ask.title
        for seam in one.seams:
            table.add_row(title, f"{seam.source} → {seam.target} {seam.mode}", *_move(one, seam))
        if one.killed_after is not None:
            table.add_row(title, "recomputed", *_replay(one, one.killed_after))
    return table


def _move(one: Played, seam: Seam) -> tuple[str, ...]:
    return (
        str(one.moved.prompt_tokens + seam.index),
        f"{seam.copied_bytes / MIB:.1f} MiB",
        *_pause(seam.normal_gap_ms, seam.downtime_ms),
    )


def _replay(one: Played, index: int) -> tuple[str, ...]:
    """The longest gap around the kill: tokens that were on their way still arrived after it."""
    gaps = [gap for i in range(index, index + NEAR) if (gap := one.moved.gap_ms(i)) is not None]
    usual = median(gap for i in range(1, index) if (gap := one.moved.gap_ms(i)) is not None)
    return (str(one.moved.prompt_tokens + index), "-", *_pause(usual, max(gaps, default=usual) - usual))


def _pause(normal_ms: float, extra_ms: float) -> tuple[str, str, str, str]:
    steps = extra_ms / normal_ms if normal_ms else 0.0
    return f"{normal_ms:.0f} ms", f"{normal_ms + extra_ms:.0f} ms", f"{extra_ms:.0f} ms", f"{steps:.1f}"


def _checks(verdict: Verdict) -> Table:
    found = verdict.audit
    table = Table(title="Verified", show_header=False, min_width=72)
    moved = [one for one in verdict.played if one.killed_after is None]
    equal = [one for one in moved if one.is_equal]
    killed = [one for one in verdict.played if one.killed_after is not None]
    rows = [
        ("moved answers equal, token for token", f"{len(equal)} of {len(moved)}"),
        ("tokens compared", str(sum(len(one.moved.ids) for one in equal))),
        *((f"{one.act.ask.title}: the answer went on", "whole" if one.moved.error is None else "no") for one in killed),
        ("moves", str(sum(len(one.seams) for one in verdict.played))),
        ("moves given up (request stayed)", str(sum(len(one.refusals) for one in verdict.played))),
        ("requests failed", str(found.requests_failed)),
        ("blocks leaked", "none" if not verdict.leaks else "; ".join(verdict.leaks)),
        ("facts archived, holes", f"{found.facts}, {len(found.holes)}"),
        ("decisions re-derived from the log", f"{found.decisions_equal} of {found.decisions} equal"),
        ("took", f"{verdict.seconds:.0f} s"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table
