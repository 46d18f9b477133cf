"""`python -m midstream.api.simulation`: run seeds, print progress and a summary; exit 1 on a violation."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from typing import Annotated

import typer

from midstream.api.simulation.run import SeedReport, minimal_faults, quiet, run_seeds, trace
from midstream.api.simulation.workload import draw_scenario

PROGRESS_EVERY = 100

EXAMPLES = """Simulate the whole cluster under faults, one seed after another.

Examples:

  python -m midstream.api.simulation --seeds 200

  python -m midstream.api.simulation --first 1234 --seeds 1 --trace
"""


def say(line: str) -> None:
    """Progress goes to stderr."""
    sys.stderr.write(line + "\n")


def simulate(
    seeds: Annotated[int, typer.Option(help="How many seeds.", min=1)] = 200,
    first: Annotated[int, typer.Option(help="The first seed.", min=0)] = 0,
    intensity: Annotated[float, typer.Option(help="Faults per node and ten seconds.", min=0)] = 1.0,
    jobs: Annotated[int, typer.Option(help="Processes. [default: all cores]", min=0)] = 0,
    stop_at_first: Annotated[bool, typer.Option(help="Stop at the first violation.")] = False,
    show_trace: Annotated[bool, typer.Option("--trace", help="Print the first failing seed as text.")] = False,
    shrink: Annotated[bool, typer.Option(help="Find the fewest faults that still fail.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object on stdout.")] = False,
) -> None:
    """Run seeds; violations are printed as they are found."""
    quiet()
    began, reports = time.monotonic(), list[SeedReport]()
    for report in run_seeds(range(first, first + seeds), intensity=intensity, jobs=jobs or os.cpu_count() or 1):
        reports.append(report)
        for violation in report.violations:
            say(f"seed {report.seed}: {violation}")
        if len(reports) % PROGRESS_EVERY == 0:
            say(f"{len(reports)} of {seeds} seeds")
        if report.violations and stop_at_first:
            break
    bad = [report for report in reports if report.violations]
    if bad and (show_trace or shrink):
        _explain(bad[0].seed, intensity, show_trace, shrink)
    elif show_trace:
        _explain(first, intensity, True, False)
    _summary(reports, time.monotonic() - began, as_json)
    raise typer.Exit(1 if bad else 0)


def _explain(seed: int, intensity: float, show_trace: bool, shrink: bool) -> None:
    scenario = draw_scenario(seed, intensity=intensity)
    if show_trace:
        for line in trace(scenario):
            say(line)
    if shrink:
        say("the fewest faults that still fail:")
        for fault in minimal_faults(scenario):
            say(f"  {fault}")


def _summary(reports: list[SeedReport], took_s: float, as_json: bool) -> None:
    kinds: Counter[str] = Counter()
    for report in reports:
        kinds.update(report.kinds)
    totals = {
        "seeds": len(reports),
        "moves": sum(report.moves for report in reports),
        "faults": sum(report.faults for report in reports),
        "facts": sum(report.facts for report in reports),
        "violations": sum(len(report.violations) for report in reports),
        "failing_seeds": [report.seed for report in reports if report.violations],
        "took_s": round(took_s, 1),
        "kinds": dict(sorted(kinds.items())),
    }
    if as_json:
        sys.stdout.write(json.dumps(totals) + "\n")
        return
    for name, value in totals.items():
        sys.stdout.write(f"{name:>14}: {value}\n")


if __name__ == "__main__":
    typer.run(simulate)
