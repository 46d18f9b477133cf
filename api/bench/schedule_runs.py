"""Carries out simulated runs in several processes, each once: what was made is remembered, in a file if asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from midstream.api.bench.schedule_figures import Figures
from midstream.api.simulation.run import quiet
from midstream.control.errors import BadInput


class Run(NamedTuple):
    """One simulation to make."""

    trace: str
    arm: str
    seed: int
    rate_scale: float


class Made(NamedTuple):
    """A simulation that was made."""

    run: Run
    figures: Figures
    simulated_s: float
    took_s: float
    cpu_s: float
    """Of the one core that it ran on."""
    facts: int


class Kept(NamedTuple):
    """A line of the file: `setting` says under which commit and plan it was made."""

    setting: str
    made: Made


class Runs:
    """Makes runs; one that was made before, in this call or in one whose file was kept, is not made again."""

    def __init__(
        self, simulate: Callable[[Run], Made], pool: ProcessPoolExecutor, progress: Progress, kept: Path | None,
        setting: str,
    ) -> None:  # fmt: skip
        """Raises `BadInput` if the file `kept` is none of ours."""
        self._simulate = simulate
        self._pool = pool
        self._progress = progress
        self._kept = kept
        self._setting = setting
        self._done = {} if kept is None else read_kept(kept, setting)

    def make(self, runs: Sequence[Run], what: str) -> list[Made]:
        """All of these, in their order."""
        missing = [run for run in runs if run not in self._done]
        bar = self._progress.add_task(what, total=len(missing))
        for future in as_completed([self._pool.submit(self._simulate, run) for run in missing]):
            self._keep(future.result())
            self._progress.advance(bar)
        return [self._done[run] for run in runs]

    def _keep(self, made: Made) -> None:
        self._done[made.run] = made
        if self._kept is not None:
            with self._kept.open("ab") as lines:
                lines.write(msgspec.json.encode(Kept(self._setting, made)) + b"\n")


def read_kept(path: Path, setting: str) -> dict[Run, Made]:
    """The runs of a file that were made under `setting`; none if there is no file. Raises `BadInput`."""
    if not path.exists():
        return {}
    try:
        rows = [msgspec.json.decode(line, type=Kept) for line in path.read_bytes().splitlines()]
    except (OSError, msgspec.DecodeError) as error:
        raise BadInput(f"{path} does not hold kept runs: {error}") from error
    return {kept.made.run: kept.made for kept in rows if kept.setting == setting}


@contextmanager
def opened(simulate: Callable[[Run], Made], *, jobs: int, kept: Path | None, setting: str) -> Iterator[Runs]:
    """`Runs` in so many processes (0: one per core), with progress on stderr. Raises `BadInput`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        ProcessPoolExecutor(jobs or os.cpu_count() or 1, initializer=quiet) as pool,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        yield Runs(simulate, pool, progress, kept, setting)
