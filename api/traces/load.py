"""Reads a trace CSV into rows, and writes one.

Columns: `arrival_s`, `prompt_tokens`, `output_tokens`; if they are there also `client`, `priority`, and
`prefix_parent_row` with `shared_prefix_blocks` (`api/traces/README.md`). Others are ignored.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

import msgspec

from midstream.control.errors import BadInput, UnknownThing

ROWS_MAX = 1_000_000
COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
MORE_COLUMNS = ("client", "priority", "prefix_parent_row", "shared_prefix_blocks")

CONTENT_TOKENS = 512
"""Prompt tokens of one block of known content."""


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace: its arrival in seconds since the trace began, and its lengths in tokens."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    client: str = ""
    priority: int = 0
    content: tuple[int, ...] = ()
    """Ids of the prompt's blocks of `CONTENT_TOKENS`: equal ids, equal content up to there. Empty: nobody knows."""


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
    contents = _Contents()
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise BadInput(f"trace {name}: no column {missing[0]}; it needs {', '.join(COLUMNS)}")
    rows = []
    for row in reader:
        rows.append(_row(row, contents, f"trace {name}, line {reader.line_num}"))
        if len(rows) > ROWS_MAX:
            raise BadInput(f"trace {name}: more than {ROWS_MAX} rows")
    if not rows:
        raise BadInput(f"trace {name}: no rows")
    return tuple(sorted(rows, key=lambda row: row.arrival_s))


def window(rows: Sequence[TraceRow], *, start_s: float = 0.0, seconds: float) -> tuple[TraceRow, ...]:
    """The rows that arrive in `seconds` from `start_s` on, with arrivals counted from there."""
    return tuple(
        msgspec.structs.replace(row, arrival_s=row.arrival_s - start_s)
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


def write_trace(rows: Sequence[TraceRow]) -> str:
    """Rows as CSV with every column that has something to say; `parse_trace` reads them back."""
    columns = {"client": [row.client for row in rows], "priority": [str(row.priority) for row in rows]}
    said = {name: cells for name, cells in columns.items() if set(cells) - {"", "0"}} | _sharing(rows)
    lines = [",".join((*COLUMNS, *said))]
    for index, row in enumerate(rows):
        cells = (f"{row.arrival_s:.3f}", str(row.prompt_tokens), str(row.output_tokens))
        lines.append(",".join((*cells, *(column[index] for column in said.values()))))
    return "\n".join(lines) + "\n"


def _sharing(rows: Sequence[TraceRow]) -> dict[str, list[str]]:
    """Which earlier row each shares its first blocks with, and how many."""
    parents: list[str] = []
    counts: list[str] = []
    last_seen: dict[int, int] = {}
    for index, row in enumerate(rows):
        shared = next((i for i, block in enumerate(row.content) if block not in last_seen), len(row.content))
        parents.append(str(last_seen[row.content[shared - 1]] if shared else -1))
        counts.append(str(shared))
        last_seen.update(dict.fromkeys(row.content, index))
    return {"prefix_parent_row": parents, "shared_prefix_blocks": counts} if last_seen else {}


class _Contents:
    """Block ids made again from who shares how many leading blocks with whom."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._next = 0

    def next(self, parent: int, shared: int, prompt_tokens: int) -> tuple[int, ...]:
        """Ids of the next row. Raises ValueError for sharing that cannot be."""
        blocks = -(-prompt_tokens // CONTENT_TOKENS)
        known = self._rows[parent] if 0 <= parent < len(self._rows) else ()
        if not 0 <= shared <= min(blocks, len(known)):
            raise ValueError(f"{shared} blocks shared with row {parent}")
        fresh = range(self._next, self._next + blocks - shared)
        self._next += len(fresh)
        self._rows.append((*known[:shared], *fresh))
        return self._rows[-1]


def _row(row: dict[str, str], contents: _Contents, where: str) -> TraceRow:
    try:
        parsed = TraceRow(float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]))
    except (TypeError, ValueError):
        raise BadInput(f"{where}: arrival_s must be a number, prompt_tokens and output_tokens whole numbers") from None
    if not (0 <= parsed.arrival_s < float("inf") and parsed.prompt_tokens >= 1 and parsed.output_tokens >= 1):
        raise BadInput(f"{where}: arrival_s must be >= 0, prompt_tokens and output_tokens >= 1")
    return _with_more(parsed, row, contents, where)


def _with_more(parsed: TraceRow, row: dict[str, str], contents: _Contents, where: str) -> TraceRow:
    if not any(column in row for column in MORE_COLUMNS):
        return parsed
    try:
        content: tuple[int, ...] = ()
        if "prefix_parent_row" in row:
            parent, shared = int(row["prefix_parent_row"]), int(row["shared_prefix_blocks"])
            content = contents.next(parent, shared, parsed.prompt_tokens)
        return msgspec.structs.replace(
            parsed, client=row.get("client", ""), priority=int(row.get("priority") or 0), content=content
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{where}: {error}") from None
