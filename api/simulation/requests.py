"""The requests that the rows of a trace stand for: as many tokens as they say, made of what they share with others."""

from __future__ import annotations

from functools import lru_cache

from midstream.api.traces.load import CONTENT_TOKENS, TraceRow
from midstream.instance.engines.sim.model import FIRST_ID
from midstream.migration.protocol.messages import RequestSpec, Sampling


def spec_of(index: int, row: TraceRow) -> RequestSpec:
    """The request of the row at `index`; it makes exactly the row's number of tokens.

    Its client is one tenant with one session: a row says no more.
    """
    return RequestSpec(
        request=f"r{index}",
        prompt=_prompt(row),
        sampling=Sampling(max_tokens=row.output_tokens, ignore_eos=True),
        priority=row.priority,
        tenant=row.client,
        session=row.client,
        arrival_ms=round(row.arrival_s * 1000),
    )


def _prompt(row: TraceRow) -> tuple[int, ...]:
    if not row.content:
        return _filler(row.prompt_tokens)
    tokens: list[int] = []
    for block in row.content:
        tokens += (FIRST_ID + block,) * CONTENT_TOKENS
    return tuple(tokens[: row.prompt_tokens])


@lru_cache(maxsize=4_096)
def _filler(tokens: int) -> tuple[int, ...]:
    """Shared by all prompts of a length: nobody looks at what they say."""
    return (FIRST_ID,) * tokens
