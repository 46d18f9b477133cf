"""Planted bugs: one line of production code changed, and the simulation must notice.

A bug is planted in a copy of the source tree, so nothing is patched at run time:
`python -m tests.simulation.planted` prints after how many seeds each was found.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
PARTS = ("api", "control", "instance", "migration", "migrations", "src")
SEEDS_MAX = 500
INTENSITY = 3.0
TIMEOUT_S = 900


class Bug(msgspec.Struct, frozen=True, kw_only=True):
    """`old` must stand in `file` exactly once."""

    name: str
    file: str
    old: str
    new: str


BUGS = (
    Bug(
        name="no epoch check",
        file="migration/protocol/ledger.py",
        old="    if not ledger.is_held_by(what.owner, what.epoch):\n        return ledger, _answer_stale",
        new='    if ledger.phase == "ended":\n        return ledger, _answer_stale',
    ),
    Bug(
        name="free before the decision",
        file="migration/protocol/source.py",
        old="    return seat, (*before, SendFinal(run.slot, move.migration, move.state))",
        new="    from midstream.migration.protocol.effects import Abort\n\n"
        "    return seat, (*before, SendFinal(run.slot, move.migration, move.state), Abort(run.slot))",
    ),
    Bug(
        name="source resumes on its own timer after the final copy",
        file="migration/protocol/source.py",
        old="    return _with_move(seat, run, move), (Send(run.gateway, reclaim_of(seat, run, move)),)",
        new="    return _with_move(seat, run, None), (Thaw(run.slot),)",
    ),
    Bug(
        name="lease forgotten",
        file="migration/protocol/target.py",
        old='    return free_reservation(seat, "expired")',
        new="    return seat, ()",
    ),
    Bug(
        name="repeated append applied twice",
        file="control/fold/__init__.py",
        old="        if seq < expected:\n            return False",
        new="        if seq < expected:\n            pass",
    ),
)


class Hunt(msgspec.Struct, frozen=True, kw_only=True):
    """How a bug fared: `seeds` run until the first violation, or all of them."""

    bug: str
    found: bool
    seeds: int
    violation: str


def hunt(bug: Bug, *, first: int = 0, seeds: int = SEEDS_MAX, jobs: int = 0) -> Hunt:
    """Plant a bug in a copy of the tree and simulate until it shows."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder)
        for part in PARTS:
            shutil.copytree(ROOT / part, tree / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        _plant(tree, bug)
        return _simulate(tree, bug, first, seeds, jobs)


def _plant(tree: Path, bug: Bug) -> None:
    path = tree / bug.file
    text = path.read_text()
    if text.count(bug.old) != 1:
        raise ValueError(f"{bug.name}: its line stands {text.count(bug.old)} times in {bug.file}")
    path.write_text(text.replace(bug.old, bug.new))


def _simulate(tree: Path, bug: Bug, first: int, seeds: int, jobs: int) -> Hunt:
    numbers = {"--first": first, "--seeds": seeds, "--intensity": INTENSITY, "--jobs": jobs}
    options = [str(part) for pair in numbers.items() for part in pair] + ["--stop-at-first", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "midstream.api.simulation", *options],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"},  # noqa: TID251
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{bug.name}: the simulation did not run: {done.stderr[-2000:]}")
    totals = json.loads(done.stdout)
    violations = [line for line in done.stderr.splitlines() if line.startswith("seed ") and ": P" in line]
    return Hunt(
        bug=bug.name,
        found=totals["violations"] > 0,
        seeds=totals["seeds"],
        violation=violations[0] if violations else "",
    )


def main() -> int:
    """Hunt all of them; 0 if each was found."""
    missed = 0
    for bug in BUGS:
        one = hunt(bug)
        missed += not one.found
        sys.stdout.write(f"{one.bug}: {'found' if one.found else 'MISSED'} after {one.seeds} seeds  {one.violation}\n")
        sys.stdout.flush()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
