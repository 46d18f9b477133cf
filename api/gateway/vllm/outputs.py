"""Chunks of a Midstream stream as outputs of a vLLM engine core."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from midstream.api.gateway.port import Chunk

FINISHES = {str(reason): reason for reason in FinishReason}


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of one output position: the sampled token first, then the most likely ones."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int
    """Rank of the sampled token among all, from 1."""


_rows = msgspec.msgpack.Decoder(Row)


def output_of(request: str, chunk: Chunk, *, has_logprobs: bool) -> EngineCoreOutput:
    """One chunk without error. Raises `ValueError` for logprobs that do not fit the ids, or an unknown finish."""
    finish, stop = finish_of(chunk.finish)
    return EngineCoreOutput(
        request_id=request,
        new_token_ids=list(chunk.ids),
        new_logprobs=lists_of(chunk) if has_logprobs and chunk.ids else None,
        finish_reason=finish,
        stop_reason=stop,
    )


def finish_of(text: str | None) -> tuple[FinishReason | None, int | str | None]:
    """vLLM's finish and stop reason, as the engine wrote them (`instance.engines.vllm.finish`).

    Raises `ValueError` for an unknown one.
    """
    if text is None:
        return None, None
    name, colon, stop = text.partition(":")
    if name not in FINISHES:
        raise ValueError(f"unknown finish {text[:64]!r}")
    if not colon:
        return FINISHES[name], None
    return FINISHES[name], int(stop) if stop.isdecimal() else stop


def lists_of(chunk: Chunk) -> LogprobsLists:
    """The logprobs of a chunk's tokens, one row per token."""
    rows = [_rows.decode(entry) for entry in chunk.logprobs]
    if len(rows) != len(chunk.ids):
        raise ValueError(f"{len(rows)} logprob rows for {len(chunk.ids)} tokens")
    return LogprobsLists(
        logprob_token_ids=np.array(_even([row.ids for row in rows], -1), dtype=np.int32),
        logprobs=np.array(_even([row.logprobs for row in rows], -np.inf), dtype=np.float32),
        sampled_token_ranks=np.array([row.rank for row in rows], dtype=np.int32),
    )


def _even(rows: Sequence[tuple[float, ...]], filler: float) -> list[tuple[float, ...]]:
    width = max(map(len, rows))
    return [row + (filler,) * (width - len(row)) for row in rows]
