"""Reads traces in the forms in which others publish them: Azure, BurstGPT, Mooncake, Bailian."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from midstream.api.traces.load import CONTENT_TOKENS, ROWS_MAX, TraceRow
from midstream.control.errors import BadInput, UnknownThing

BAILIAN_TOKENS: Final = 16
"""Tokens of one hashed block there. Sharing is kept in whole blocks of `CONTENT_TOKENS`."""

TIMESTAMP: Final = re.compile(r"([\d-]+[ T][\d:]+)(\.\d+)?(Z|[+-]\d\d:?\d\d)?")

NO_CHAT: Final = (-1, "-1", "", None)
"""What a first turn has as the turn before."""

Found = Iterator[tuple[int, TraceRow]]
"""(line, row), arrivals counted from anywhere."""


def import_trace(
    form: str,
    lines: Iterable[str],
    name: str,
    *,
    start_s: float = 0.0,
    seconds: float = math.inf,
    rows_max: int = ROWS_MAX,
) -> tuple[TraceRow, ...]:
    """Rows of a published trace, arrivals counted from the first; of a long one those of a part of its time.

    `start_s` counts from its first line. Requests without a prompt or an answer (BurstGPT has failed ones) are left
    out. Raises `UnknownThing` for an unknown form, `BadInput`, naming the line, for what is not in it, and for more
    than `rows_max` rows.
    """
    if form not in FORMS:
        raise UnknownThing(f"no trace form {form}; known: {', '.join(FORMS)}")
    line = 1
    rows: list[TraceRow] = []
    begun_s: float | None = None
    from_s = start_s or -math.inf  # not every file is in order
    try:
        for number, row in FORMS[form](lines):
            line = number
            begun_s = row.arrival_s if begun_s is None else begun_s
            is_wanted = from_s <= row.arrival_s - begun_s < start_s + seconds
            if is_wanted and row.prompt_tokens >= 1 and row.output_tokens >= 1:
                rows.append(row)
            if len(rows) > rows_max:
                raise BadInput(f"trace {name}: more than {rows_max} rows; take a part of it with --start and --seconds")
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"trace {name}, after line {line}: not as {form} writes it: {error!r}") from None
    if not rows:
        raise BadInput(f"trace {name}: no rows")
    first_s = min(row.arrival_s for row in rows)
    moved = (msgspec.structs.replace(row, arrival_s=row.arrival_s - first_s) for row in rows)
    return tuple(sorted(moved, key=lambda row: row.arrival_s))


def _azure(lines: Iterable[str]) -> Found:
    """`TIMESTAMP,ContextTokens,GeneratedTokens`; 2023 with seven digits behind the second, 2024 with an offset."""
    reader = csv.DictReader(lines)
    for row in reader:
        at_s = _seconds(row["TIMESTAMP"])
        yield reader.line_num, TraceRow(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _seconds(text: str) -> float:
    """A time with or without a fraction and an offset, in seconds since 2000. Raises `ValueError`."""
    found = TIMESTAMP.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"no time: {text!r}")
    when, part, offset = found.groups()
    at = datetime.fromisoformat(when + (offset or "+00:00"))
    return (at - datetime(2000, 1, 1, tzinfo=UTC)).total_seconds() + float(f"0{part or ''}")


def _burstgpt(lines: Iterable[str]) -> Found:
    """`Timestamp,…,Request tokens,Response tokens,…`, seconds; the session is the client."""
    reader = csv.DictReader(lines)
    for row in reader:
        found = TraceRow(float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))
        yield reader.line_num, msgspec.structs.replace(found, client=row.get("Session ID") or "")


def _mooncake(lines: Iterable[str]) -> Found:
    """JSON lines: `timestamp` in ms, `input_length`, `output_length`, `hash_ids` of 512 tokens."""
    for line, row in _json(lines):
        tokens = int(row["input_length"])
        # Some rows name a block more than their prompt has, for its answer.
        content = tuple(int(block) for block in row["hash_ids"][: -(-tokens // CONTENT_TOKENS)])
        yield line, TraceRow(row["timestamp"] / 1000, tokens, int(row["output_length"]), content=content)


def _bailian(lines: Iterable[str]) -> Found:
    """JSON lines: `timestamp` in s, `chat_id`, `parent_chat_id`, lengths, `hash_ids` of 16 tokens.

    Each turn has a `chat_id` of its own and names that of the turn before; the first turn of all is the client.
    """
    step = CONTENT_TOKENS // BAILIAN_TOKENS
    first_of: dict[object, object] = {}
    for line, row in _json(lines):
        ids = [int(block) for block in row["hash_ids"]]
        blocks = -(-int(row["input_length"]) // CONTENT_TOKENS)
        chat, parent = row.get("chat_id", ""), row.get("parent_chat_id", -1)
        first_of[chat] = chat if parent in NO_CHAT else first_of.get(parent, parent)
        content = tuple(ids[min((i + 1) * step, len(ids)) - 1] for i in range(blocks)) if ids else ()
        yield line, TraceRow(
            float(row["timestamp"]), int(row["input_length"]), int(row["output_length"]),
            client=str(first_of[chat]), content=content,
        )  # fmt: skip


def _json(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, json.loads(line)


FORMS: Final[dict[str, Callable[[Iterable[str]], Found]]] = {
    "azure": _azure,
    "burstgpt": _burstgpt,
    "mooncake": _mooncake,
    "bailian": _bailian,
}
