"""Reads traces in the forms in which others publish them: Azure, BurstGPT, Mooncake, Bailian."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, Final

import msgspec

from midstream.api.traces.load import CONTENT_TOKENS, TraceRow
from midstream.control.errors import BadInput, UnknownThing

BAILIAN_TOKENS: Final = 16
"""Tokens of one hashed block there. Sharing is kept in whole blocks of `CONTENT_TOKENS`."""

Found = Iterator[tuple[int, TraceRow]]
"""(line, row), arrivals counted from anywhere."""


def import_trace(form: str, lines: Iterable[str], name: str) -> tuple[TraceRow, ...]:
    """Rows of a published trace, arrivals counted from the first.

    Requests without a prompt or an answer (BurstGPT has failed ones) are left out. Raises `UnknownThing` for an
    unknown form, `BadInput`, naming the line, for what is not in it.
    """
    if form not in FORMS:
        raise UnknownThing(f"no trace form {form}; known: {', '.join(FORMS)}")
    line = 1
    rows: list[TraceRow] = []
    try:
        for number, row in FORMS[form](lines):
            line = number
            if row.prompt_tokens >= 1 and row.output_tokens >= 1:
                rows.append(row)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"trace {name}, after line {line}: not as {form} writes it: {error!r}") from None
    if not rows:
        raise BadInput(f"trace {name}: no rows")
    first_s = min(row.arrival_s for row in rows)
    moved = (msgspec.structs.replace(row, arrival_s=row.arrival_s - first_s) for row in rows)
    return tuple(sorted(moved, key=lambda row: row.arrival_s))


def _azure(lines: Iterable[str]) -> Found:
    """`TIMESTAMP,ContextTokens,GeneratedTokens`, timestamps with seven digits behind the second."""
    reader = csv.DictReader(lines)
    for row in reader:
        when, _, part = row["TIMESTAMP"].strip().partition(".")
        at_s = (datetime.fromisoformat(when) - datetime(2000, 1, 1)).total_seconds() + float(f"0.{part[:7] or 0}")
        yield reader.line_num, TraceRow(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _burstgpt(lines: Iterable[str]) -> Found:
    """`Timestamp,…,Request tokens,Response tokens,…`, seconds; the session is the client."""
    reader = csv.DictReader(lines)
    for row in reader:
        found = TraceRow(float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))
        yield reader.line_num, msgspec.structs.replace(found, client=row.get("Session ID") or "")


def _mooncake(lines: Iterable[str]) -> Found:
    """JSON lines: `timestamp` in ms, `input_length`, `output_length`, `hash_ids` of 512 tokens."""
    for line, row in _json(lines):
        content = tuple(int(block) for block in row["hash_ids"])
        yield (
            line,
            TraceRow(row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), content=content),
        )


def _bailian(lines: Iterable[str]) -> Found:
    """JSON lines: `timestamp` in s, `chat_id`, lengths, `hash_ids` of 16 tokens."""
    step = CONTENT_TOKENS // BAILIAN_TOKENS
    for line, row in _json(lines):
        ids = [int(block) for block in row["hash_ids"]]
        blocks = -(-int(row["input_length"]) // CONTENT_TOKENS)
        content = tuple(ids[min((i + 1) * step, len(ids)) - 1] for i in range(blocks)) if ids else ()
        yield line, TraceRow(
            float(row["timestamp"]), int(row["input_length"]), int(row["output_length"]),
            client=str(row.get("chat_id", "")), content=content,
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
