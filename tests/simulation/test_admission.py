"""Waiting at the gateway: for room and in turn, bounded, cancelled cleanly, and never while the log is away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from midstream.api.gateway.gateway import Gateway
from midstream.api.gateway.live import Live
from midstream.api.gateway.settings import GatewaySettings
from midstream.api.simulation.scenarios.cluster import Cluster
from midstream.api.simulation.scenarios.play import ENGINE
from midstream.control.errors import Refused
from midstream.control.events import RequestCancelled, RequestDispatched, RequestFinished, WaitingReported
from midstream.control.simulate.loop import run_virtual
from midstream.control.state import PolicySettings
from midstream.migration.protocol.messages import RequestSpec, Sampling


def spec(name: str, *, tenant: str = "", priority: int = 0, tokens: int = 100, prompt_tokens: int = 320) -> RequestSpec:
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    prompt = random.Random(name).choices(
        range(3, 127), k=prompt_tokens
    )  # no two alike: nothing is shared in the prefix cache
    return RequestSpec(request=name, prompt=tuple(prompt), sampling=sampling, tenant=tenant, priority=priority)


def in_cluster(scene: Callable[[Cluster, Gateway], Awaitable[Any]], **settings: Any) -> Any:
    """One instance of 256 blocks: twelve such requests fill it."""

    async def run() -> Any:
        cluster = Cluster({"a": ENGINE}, policies=PolicySettings(), gateway=GatewaySettings(**settings))
        await cluster.start()
        try:
            return await scene(cluster, cluster.gateway.gateway)
        finally:
            await cluster.stop()

    return run_virtual(run, seed=3, timeout_s=2_000)


def is_waiting(live: Live) -> bool:
    return live.ledger.phase == "new"


async def finished(live: Live) -> int:
    last = None
    async for chunk in live:
        last = chunk
    assert last is not None and last.finish is not None, last
    return len(live.ids)


def test_P04_what_finds_no_room_waits_and_all_end_well() -> None:
    async def scene(cluster: Cluster, gateway: Gateway) -> Any:
        lives = [gateway.admit(spec(f"r{index}")) for index in range(30)]
        waiting = sum(map(is_waiting, lives))
        tokens = await asyncio.gather(*map(finished, lives))
        await asyncio.sleep(2)
        return waiting, set(tokens), gateway.admission.waiting, cluster.state.waiting, await cluster.history()

    waiting, tokens, left, known, entries = in_cluster(scene)
    assert 10 < waiting < 25
    assert (tokens, left, known) == ({100}, 0, {}), "and the last fact says that nothing waits"
    said = [entry.fact.event for entry in entries]
    assert sum(isinstance(event, RequestFinished) for event in said) == 30
    waited = [event.waited_ms for event in said if isinstance(event, RequestDispatched)]
    assert sum(ms > 500 for ms in waited) >= 10
    reports = [event for event in said if isinstance(event, WaitingReported)]
    assert max(event.requests for event in reports) >= 10
    assert all((event.head_tokens > 0) == (event.requests > 0) for event in reports), "whose turn it is, if anybody's"


def test_P09_a_request_that_waits_is_cancelled_at_once_and_takes_nobodys_turn() -> None:
    async def scene(cluster: Cluster, gateway: Gateway) -> Any:
        lives = [gateway.admit(spec(f"r{index}")) for index in range(20)]
        gone = [live for live in lives if is_waiting(live)][:3]
        for live in gone:
            live.cancel()
            live.cancel()
        before = gateway.admission.waiting
        rest = await asyncio.gather(*(finished(live) for live in lives if live not in gone))
        assert gateway.admission.waiting == 0
        await asyncio.sleep(2)
        return [live.error for live in gone], before, rest, await cluster.history()

    errors, before, rest, entries = in_cluster(scene)
    assert errors == [("cancelled", "client")] * 3
    assert len(rest) == 17
    assert before + 3 <= 20
    said = [entry.fact.event for entry in entries]
    gone = {event.request for event in said if isinstance(event, RequestCancelled)}
    assert len(gone) == 3
    assert not any(isinstance(event, RequestDispatched) and event.request in gone for event in said)


def test_P28_a_full_queue_refuses_its_tenant_and_no_other() -> None:
    async def scene(cluster: Cluster, gateway: Gateway) -> Any:
        refused, lives = [], []
        for index in range(40):
            try:
                lives.append(gateway.admit(spec(f"r{index}", tenant="flood")))
            except Refused as refusal:
                refused.append(refusal.code)
        lives.append(gateway.admit(spec("other", tenant="other")))
        await asyncio.gather(*map(finished, lives))
        return refused

    refused = in_cluster(scene, tenant_waiting_max=5)
    assert set(refused) == {"tenant_queue_full"}
    assert len(refused) > 10


def test_a_request_of_the_high_class_does_not_wait_at_the_gateway() -> None:
    async def scene(cluster: Cluster, gateway: Gateway) -> Any:
        lives = [gateway.admit(spec(f"r{index}", priority=1)) for index in range(30)]
        high = gateway.admit(spec("high", priority=-1))
        at_once = not is_waiting(high)
        await asyncio.gather(*map(finished, [*lives, high]))
        later = [live.gaps.ttft_ms for live in lives if live.gaps.ttft_ms > high.gaps.ttft_ms]
        return at_once, len(later)

    at_once, later = in_cluster(scene)
    assert at_once and later >= 15


def test_P20_nothing_waits_while_the_log_is_away() -> None:
    async def scene(cluster: Cluster, gateway: Gateway) -> Any:
        lives = [gateway.admit(spec(f"r{index}")) for index in range(30)]
        await asyncio.sleep(0.5)
        before = sum(map(is_waiting, lives))
        cluster.world.store.is_down = True
        await asyncio.sleep(5)
        after = sum(map(is_waiting, lives))
        late = gateway.admit(spec("late"))
        at_once = not is_waiting(late)
        cluster.world.store.is_down = False
        await asyncio.gather(*map(finished, [*lives, late]))
        return before, after, at_once

    before, after, at_once = in_cluster(scene)
    assert before > 5
    assert (after, at_once) == (0, True)


def test_what_waits_fails_when_there_is_no_instance_for_long() -> None:
    async def scene(cluster: Cluster, gateway: Gateway) -> Any:
        lives = [gateway.admit(spec(f"r{index}", tokens=60)) for index in range(25)]
        waiting = [live for live in lives if is_waiting(live)]
        await cluster.llumlets["a"].crash()
        await asyncio.sleep(40)
        return [live.error for live in waiting]

    errors = in_cluster(scene, seek_ms=5_000, alone_ms=4_000)
    assert errors and {error and error[0] for error in errors} == {"no_capacity"}


@pytest.mark.parametrize(("count", "prompt_tokens"), [(1, 320), (3, 320), (16, 96)])
def test_an_idle_cluster_lets_nobody_wait(count: int, prompt_tokens: int) -> None:
    """Not even those that arrive when the first of them are in a report, in line for the engine's next step."""

    async def scene(cluster: Cluster, gateway: Gateway) -> Any:
        lives = []
        for index in range(count):
            lives.append(gateway.admit(spec(f"r{index}", tokens=20, prompt_tokens=prompt_tokens)))
            await asyncio.sleep(0.01 * (index % 8 == 7))
        waiting = sum(map(is_waiting, lives))
        await asyncio.gather(*map(finished, lives))
        return waiting

    assert in_cluster(scene) == 0


def test_P21_when_all_that_waits_is_cancelled_the_log_says_so() -> None:
    async def scene(cluster: Cluster, gateway: Gateway) -> Any:
        lives = [gateway.admit(spec(f"r{index}", tokens=400)) for index in range(20)]
        await asyncio.sleep(0.5)
        before = dict(cluster.state.waiting)
        for live in [live for live in lives if is_waiting(live)]:
            live.cancel()
        await asyncio.sleep(0.5)
        after = dict(cluster.state.waiting)
        for live in lives:
            live.cancel()
        return before, after

    before, after = in_cluster(scene)
    assert before["g"].requests > 0
    assert after == {}
