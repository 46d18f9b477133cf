"""How commands answer: a table for people, JSON or JSON lines for programs. Results on stdout, words on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

CELL_CHARS_MAX = 80
TABLE_WIDTH_PIPED = 200


class Output(StrEnum):
    """Forms of output."""

    table = "table"
    json = "json"
    jsonl = "jsonl"


OutputOption = Annotated[Output, typer.Option("-o", "--output", help="Form of the answer.")]

Column = tuple[str, Callable[[Mapping[str, Any]], object]]
"""Heading, and how to get the cell from an item."""


def column(heading: str, path: str | None = None) -> Column:
    """A column that shows the value at a dotted path (`load.running`; a list is shown item by item)."""
    keys = (path or heading).split(".")

    def cell(item: Mapping[str, Any]) -> object:
        value: Any = item
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    return heading, cell


def show_items(items: Iterable[Mapping[str, Any]], columns: Sequence[Column], output: Output) -> None:
    """Show a list."""
    if output is Output.jsonl:
        for item in items:
            line(item)
    elif output is Output.json:
        write(json.dumps(list(items), indent=2))
    else:
        _table(items, columns)


def show_item(item: Mapping[str, Any], output: Output) -> None:
    """Show one thing."""
    if output is Output.jsonl:
        line(item)
    elif output is Output.json:
        write(json.dumps(item, indent=2))
    else:
        pairs = ({"field": name, "value": value} for name, value in _flat(item))
        _table(pairs, [column("field"), column("value")], cell_chars_max=None)


def line(item: Mapping[str, Any]) -> None:
    """One JSON line, at once."""
    write(json.dumps(item, separators=(",", ":")))


def write(text: str) -> None:
    """A line of results."""
    print(text, flush=True)  # noqa: T201 - the CLI's answer


def say(text: str) -> None:
    """A line of words for people, on stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the CLI's words


def _flat(item: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, object]]:
    for name, value in item.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _table(
    items: Iterable[Mapping[str, Any]], columns: Sequence[Column], cell_chars_max: int | None = CELL_CHARS_MAX
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, _ in columns:
        table.add_column(heading, overflow="fold")
    for item in items:
        table.add_row(*(_text(cell(item))[:cell_chars_max] for _, cell in columns))
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else TABLE_WIDTH_PIPED)
    console.print(table)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
