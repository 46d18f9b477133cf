"""The object that every benchmark prints, and what machine it was measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from midstream.api.cli.output import Output, show_item, show_items, write

VERSION = 1
GIT_S = 5.0
COLUMNS_MAX = 12
"""A table of more columns and fewer rows is shown on its side."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What one benchmark found. A figure that could not be taken is None."""

    params: dict[str, Any]
    summary: dict[str, Any]
    rows: tuple[dict[str, Any], ...] = ()
    machine: dict[str, Any]


def show(name: str, measured: Measured, *, as_json: bool) -> int:
    """Print; 0 if no figure is missing."""
    if as_json:
        head = {"bench": name, "version": VERSION, "commit": commit()}
        write(json.dumps(head | msgspec.to_builtins(measured)))
    else:
        rows = [dict(_shown(row)) for row in measured.rows]
        if rows:
            is_wide = len(rows) < len(rows[0]) > COLUMNS_MAX
            (_show_on_its_side if is_wide else _show_rows)(rows)
        show_item(measured.summary, Output.table)
    return 1 if is_missing(measured.summary) else 0


def _show_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    show_items(rows, [(key, _cell(key)) for key in rows[0]], Output.table)


def _show_on_its_side(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each figure and a column for each row, under the value of its first field."""
    head, *figures = rows[0]
    lines = [{head: figure} | {str(number): row.get(figure) for number, row in enumerate(rows)} for figure in figures]
    columns = [(str(row[head]), _cell(str(number))) for number, row in enumerate(rows)]
    show_items(lines, [(head, _cell(head)), *columns], Output.table)


def _shown(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A row as a table has it: nested figures side by side, without their extremes."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _shown(value, f"{prefix}{key} ")
        elif not key.endswith(("_min", "_max")):
            yield f"{prefix}{key}", value


def is_missing(value: object) -> bool:
    """Is there a None anywhere in a summary."""
    if isinstance(value, Mapping):
        return any(is_missing(part) for part in value.values())
    return value is None


def rank(values: Sequence[float], share: float) -> float | None:
    """The value at a share of the order (0.99: p99); None of nothing."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def machine() -> dict[str, Any]:
    """What it runs on; take it before measuring, so that `load_before` is the others' load."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def commit() -> str | None:
    """The commit of this checkout; None outside one."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=GIT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def spread(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """The median of the repeats that have one, under a name, with their extremes beside it; None of nothing."""
    found = [round(value, 4) for value in values if value is not None]
    middle = round(median(found), 4) if found else None
    return {name: middle, f"{name}_min": min(found, default=None), f"{name}_max": max(found, default=None)}


def _cell(key: str) -> Any:
    return lambda item: item[key]
