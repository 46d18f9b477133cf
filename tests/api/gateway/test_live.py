"""A stream as its one reader sees it: by iterating, or by watching and taking."""

from __future__ import annotations

import asyncio

from midstream.api.gateway.live import Live
from midstream.api.gateway.port import Chunk
from midstream.migration.protocol.messages import RequestSpec, Sampling

SPEC = RequestSpec(request="r1", model="sim", prompt=(1, 2), sampling=Sampling(max_tokens=8))


class Nobody:
    def cancel(self, live: Live, cause: str) -> None:
        live.error = ("cancelled", cause)


def grown(live: Live, *ids: int, finish: str | None = None) -> None:
    live.ids += ids
    live.finish = finish
    live.wake()


def test_P02_every_token_is_taken_once_and_the_end_once() -> None:
    live, news = Live(SPEC, Nobody(), 0.0), []
    live.watch(lambda: news.append(len(live.ids)))
    assert live.take() is None
    grown(live, 5, 6)
    grown(live, 7)
    assert news == [0, 2, 3]
    assert live.take() == Chunk(ids=(5, 6, 7))
    assert live.take() is None
    grown(live, 8, finish="length")
    assert live.take() == Chunk(ids=(8,), finish="length")
    assert live.take() is None


def test_P04_what_came_before_somebody_watched_is_told_and_an_end_without_tokens_too() -> None:
    live, news = Live(SPEC, Nobody(), 0.0), []
    grown(live, 5)
    live.watch(lambda: news.append(live.is_over))
    assert news == [False]
    live.cancel("shutdown")
    assert live.take() == Chunk(ids=(5,), error=("cancelled", "shutdown"))
    assert live.take() is None


async def test_P02_iterating_waits_for_more_and_ends_with_the_request() -> None:
    live = Live(SPEC, Nobody(), 0.0)
    heard: list[Chunk] = []

    async def read() -> None:
        heard.extend([chunk async for chunk in live])

    reading = asyncio.create_task(read())
    for token in (5, 6):
        grown(live, token)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    grown(live, finish="stop")
    async with asyncio.timeout(10):
        await reading
    assert [token for chunk in heard for token in chunk.ids] == [5, 6]
    assert [chunk.finish for chunk in heard][-1] == "stop"
