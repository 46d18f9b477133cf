"""Through the SDK, on two real engines: requests move while they stream, and no client can tell."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from statistics import median

import openai
import pytest
import pytest_asyncio

from midstream.api.gateway.live import Live
from midstream.control.events import (
    CommandRefused,
    MigrationAborted,
    MigrationCommitted,
    RequestDispatched,
)
from tests.api.gateway.vllm.cluster import NAME, Cluster, running
from tests.api.gateway.vllm.mix import Heard, hear
from tests.api.gateway.vllm.rig import sdk, until
from tests.instance.engines.vllm.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),  # vLLM reads its own old field
]

STREAMS = 50
MOVES_MAX = 6
"""Moves at once; one that was refused or given up is ordered again."""
RECOVERY_MS_MAX = 3_000
"""From the kill to a first new token, besides its prefill: aimed at 1 s, on a machine that may be busy."""
ENDS = (CommandRefused, MigrationAborted, MigrationCommitted)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with running(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unmoved(cluster: Cluster) -> list[Heard]:
    """What the streams say when nothing moves."""
    heard = await listen(cluster)
    await cluster.at_rest()
    return heard


async def listen(cluster: Cluster, leaving: dict[int, int] | None = None, streams: int = STREAMS) -> list[Heard]:
    """All streams of the mix at once."""
    async with sdk(cluster.face) as client:
        client.timeout = 600
        leave = leaving or {}
        return await asyncio.gather(*(hear(client, index, NAME, leave.get(index)) for index in range(streams)))


@contextlib.asynccontextmanager
async def moving(cluster: Cluster, times: int = 1, after_tokens: int = 4) -> AsyncIterator[None]:
    """Meanwhile every request is moved until `times` moves of it were committed, a few at once."""
    open_moves: dict[str, str] = {}

    def order_some() -> None:
        for event in cluster.events(*ENDS):
            open_moves.pop(event.migration, None)
        done = committed(cluster)
        for live in cluster.live():
            is_due = done[live.request] < times and len(live.ids) >= after_tokens * (done[live.request] + 1)
            is_free = live.ledger.phase == "running" and live.request not in open_moves.values()
            if is_due and is_free and len(open_moves) < MOVES_MAX:
                open_moves[cluster.move(live)] = live.request

    async def go() -> None:
        while True:
            order_some()
            await asyncio.sleep(0.01)

    mover = asyncio.create_task(go())
    try:
        yield
    finally:
        mover.cancel()
        await asyncio.gather(mover, return_exceptions=True)


def committed(cluster: Cluster) -> Counter[str]:
    """Moves so far, by request."""
    return Counter(event.request for event in cluster.events(MigrationCommitted))


def moved(cluster: Cluster, since: Counter[str]) -> Counter[int]:
    """Moves since then, by index in the mix."""
    indexes = Counter[int]()
    for request, count in (committed(cluster) - since).items():
        found = re.search(r"mix-(\d+)", request)
        assert found is not None
        indexes[int(found.group(1))] += count
    return indexes


async def test_P03_fifty_mixed_streams_all_moved_read_as_if_none_had_been(
    cluster: Cluster, unmoved: list[Heard]
) -> None:
    before = committed(cluster)
    async with moving(cluster):
        heard = await listen(cluster)
    for index, (mine, theirs) in enumerate(zip(heard, unmoved, strict=True)):
        assert mine.usages, index
        mine.assert_same(theirs)
    assert set(moved(cluster, before)) == set(range(STREAMS))
    await cluster.at_rest()


async def test_P09_a_third_leaves_at_random_moments_of_moves_and_nothing_is_left_behind(
    cluster: Cluster, unmoved: list[Heard]
) -> None:
    rng = random.Random(11)
    leaving = {index: rng.randrange(1, 120) for index in range(0, STREAMS, 3)}
    async with moving(cluster):
        heard = await listen(cluster, leaving)
    for index, (mine, theirs) in enumerate(zip(heard, unmoved, strict=True)):
        if index in leaving:
            mine.assert_begins(theirs)
        else:
            mine.assert_same(theirs)
    await cluster.at_rest()
    processor = cluster.face.models[0].llm.output_processor
    await until(lambda: not processor.request_states)
    assert not processor.parent_requests


async def test_P03_a_stream_moved_there_and_back_and_there_again(cluster: Cluster, unmoved: list[Heard]) -> None:
    before = committed(cluster)
    async with moving(cluster, times=3, after_tokens=10):
        heard = await listen(cluster, streams=8)
    for mine, theirs in zip(heard, unmoved, strict=False):
        mine.assert_same(theirs)
    assert max(moved(cluster, before).values()) >= 3
    await cluster.at_rest()


async def test_P16_an_engine_killed_under_ten_streams_costs_none_of_them(
    cluster: Cluster, unmoved: list[Heard]
) -> None:
    """The last test: one engine is gone afterwards."""
    dying = cluster.llumlets["a"]
    listening = asyncio.create_task(listen(cluster, streams=10))
    await until(lambda: sum(len(live.ids) > 5 for live in cluster.live() if cluster.owner(live) == "a") >= 3, 60)
    victims = [live for live in cluster.live() if cluster.owner(live) == "a"]
    survivors, known = len(cluster.live()) - len(victims), [[*live.spec.prompt, *live.ids] for live in victims]
    os.killpg(dying.engine.process_group, signal.SIGKILL)
    recovered_ms = await recoveries(victims)
    heard = await listening
    for mine, theirs in zip(heard, unmoved, strict=False):
        mine.assert_same(theirs)
    assert any(event.cause != "new" for event in cluster.events(RequestDispatched))
    prefill_ms = await prefills(cluster, known, survivors)
    sys.stdout.write(f"recovered after {_shown(recovered_ms)} ms, their prefill alone takes {_shown(prefill_ms)} ms\n")
    assert max(recovered_ms) - max(prefill_ms) < RECOVERY_MS_MAX


async def recoveries(victims: list[Live]) -> list[float]:
    """Milliseconds from now to each stream's first token from another owner."""
    clock = asyncio.get_running_loop().time
    begun = clock()

    async def first_token(live: Live) -> float:
        await until(lambda: live.is_over or live.ledger.owner.instance == "b", 60)
        had = len(live.ids)
        await until(lambda: live.is_over or len(live.ids) > had, 60)
        return 1e3 * (clock() - begun)

    return await asyncio.gather(*map(first_token, victims))


async def prefills(cluster: Cluster, prompts: list[list[int]], beside: int) -> list[float]:
    """Milliseconds to the first token of as many requests as long, sent at once to the same engine, as busy."""
    clock = asyncio.get_running_loop().time

    async def first_token(client: openai.AsyncOpenAI, prompt: list[int]) -> float:
        begun = clock()
        await client.completions.create(model=NAME, prompt=prompt, max_tokens=1, temperature=0)
        return 1e3 * (clock() - begun)

    async with sdk(cluster.face) as client:
        client.timeout = 600
        load = asyncio.create_task(listen(cluster, streams=beside))
        await until(lambda: sum(len(live.ids) > 5 for live in cluster.live()) >= beside, 60)
        times = await asyncio.gather(*(first_token(client, prompt) for prompt in prompts))
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    return times


def _shown(times_ms: list[float]) -> str:
    return f"{median(times_ms):.0f} (at most {max(times_ms):.0f})"
