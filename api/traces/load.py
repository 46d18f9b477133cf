"""Reads a trace CSV into rows. Columns: `arrival_s`, `prompt_tokens`, `output_tokens`; others are ignored."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

import msgspec

from midstream.control.errors import BadInput, UnknownThing

ROWS_MAX = 1_000_000
COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace: its arrival in seconds since the trace began, and its lengths in tokens."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def shipped_traces() -> tuple[str, ...]:
    """Names of the traces that come with Midstream."""
    files = resources.files(__package__).iterdir()
    return tuple(sorted(file.name.removesuffix(".csv") for file in files if file.name.endswith(".csv")))


def load_trace(name_or_path: str) -> tuple[TraceRow, ...]:
    """Read a shipped trace by name (`azure_conv_2023`) or a file by path, in arrival order.

    Raises `UnknownThing` when there is no such trace and `BadInput`, naming the line, when it cannot be read.
    """
    return parse_trace(_text(name_or_path).splitlines(), name_or_path)


def parse_trace(lines: Iterable[str], name: str) -> tuple[TraceRow, ...]:
    """Read CSV lines with a header. Raises `BadInput`; `name` is for its message."""
    reader = csv.DictReader(lines)
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise BadInput(f"trace {name}: no column {missing[0]}; it needs {', '.join(COLUMNS)}")
    rows = []
    for row in reader:
        rows.append(_row(row, f"trace {name}, line {reader.line_num}"))
        if len(rows) > ROWS_MAX:
            raise BadInput(f"trace {name}: more than {ROWS_MAX} rows")
    if not rows:
        raise BadInput(f"trace {name}: no rows")
    return tuple(sorted(rows, key=lambda row: row.arrival_s))


def window(rows: Sequence[TraceRow], *, start_s: float = 0.0, seconds: float) -> tuple[TraceRow, ...]:
    """The rows that arrive in `seconds` from `start_s` on, with arrivals counted from there."""
    return tuple(
        TraceRow(row.arrival_s - start_s, row.prompt_tokens, row.output_tokens)
        for row in rows
        if start_s <= row.arrival_s < start_s + seconds
    )


def _text(name_or_path: str) -> str:
    path = Path(name_or_path)
    try:
        if name_or_path in shipped_traces():
            return resources.files(__package__).joinpath(f"{name_or_path}.csv").read_text(encoding="utf-8")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        known = ", ".join(shipped_traces())
        raise UnknownThing(f"no trace {name_or_path}: neither a file nor a shipped one ({known})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"trace {name_or_path} cannot be read: {error}") from None


def _row(row: dict[str, str], where: str) -> TraceRow:
    try:
        parsed = TraceRow(float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]))
    except (TypeError, ValueError):
        raise BadInput(f"{where}: arrival_s must be a number, prompt_tokens and output_tokens whole numbers") from None
    if not (0 <= parsed.arrival_s < float("inf") and parsed.prompt_tokens >= 1 and parsed.output_tokens >= 1):
        raise BadInput(f"{where}: arrival_s must be >= 0, prompt_tokens and output_tokens >= 1")
    return parsed
