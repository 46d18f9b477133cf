"""`midstream replay verify` on the archive of a real cluster: every decision again, or the first difference."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from midstream.api.cli.client import AdminProblem
from midstream.control.events import MoveDecided
from midstream.control.ids import parse_position
from tests.e2e.helpers import Client, Rig, running

SETTINGS = {
    "cooldown_ms": 300,
    "dispatch_policy": "round_robin",
    "move_policies": "drain,balance",
    "policy_params": {"balance": {"low": 20, "high": 21}},
}
"""Round-robin fills the small instance as fast as the large one, so that `balance` has work."""

CHANGED = "balance.cost_per_move=1000000"
"""No move is worth that: every recorded decision of `balance` is a difference."""

CROWDS_MAX = 5
"""On a machine that is busy with other things the streams may not overlap enough for `balance`: try again."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """A cluster that has moved some requests by policy and some by hand, and is quiet now."""
    async with running(tmp_path_factory.mktemp("replay"), (400, 80), **SETTINGS) as rig:
        await crowd(rig)
        for _ in range(CROWDS_MAX - 1):
            if "balance" in await policies_of(rig):
                break
            await crowd(rig)
        yield rig


async def crowd(rig: Rig) -> None:
    """Eight streams at once, two of them moved by hand."""
    clients = [rig.stream(400, prompt_tokens=60 + 10 * i) for i in range(8)]
    await clients[0].has(20)
    await asyncio.gather(*(move_by_hand(rig, client) for client in clients[:2]))
    for client in clients:
        await client.end()
        client.assert_undisturbed()
    await rig.idle()


async def policies_of(rig: Rig) -> set[str]:
    """What ordered the moves so far."""
    return {e.fact.event.policy for e in await rig.facts() if isinstance(e.fact.event, MoveDecided)}


async def move_by_hand(rig: Rig, client: Client) -> None:
    with contextlib.suppress(AdminProblem):  # a policy was first
        await rig.order("/migrations", request=client.request, target=None)


async def verify(rig: Rig, *options: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, report, what was said on stderr) of the command."""
    done = await rig.cli("replay", "verify", *options, "--json")
    return done.code, json.loads(done.out) if done.out else {}, done.err


@pytest.mark.parametrize("where", ["--local", "--remote"])
async def test_P17_every_decision_is_derived_again(rig: Rig, where: str) -> None:
    code, report, said = await verify(rig, where)
    assert code == 0, said
    assert report["is_equal"] is True
    assert report["equal"] == report["decisions"] > 0
    assert report["ticks_skipped"] == 0
    assert f"{report['equal']} of {report['decisions']} equal" in said
    assert await policies_of(rig) >= {"balance"}


@pytest.mark.parametrize("where", ["--local", "--remote"])
async def test_P17_another_parameter_shows_the_first_difference_and_fails(rig: Rig, where: str) -> None:
    code, report, said = await verify(rig, where, "--set", CHANGED)
    assert code == 1
    assert said.count("\n") == 1 and said.startswith("midstream: ")
    assert f"{report['equal']} of {report['decisions']} decisions" in said
    assert report["equal"] < report["decisions"]
    difference = report["first_difference"]
    recorded = [
        entry
        for entry in await rig.facts()
        if isinstance(entry.fact.event, MoveDecided) and entry.fact.event.policy == "balance"
    ]
    assert difference["recorded"]["kind"] == "MoveDecided"
    assert parse_position(difference["position"]) == recorded[0].position
    assert "nothing more is derived" in difference["explanation"]


async def test_a_replay_is_a_job_of_the_api_with_progress_and_result(rig: Rig) -> None:
    done = await rig.order("/replays", overrides={"balance.cost_per_move": 1_000_000})
    assert (done["status"], done["progress"], done["kind"]) == ("succeeded", 1.0, "replay")
    assert done["result"]["is_equal"] is False
    assert done["result"]["first_difference"]["recorded"]["policy"] == "balance"
    found = await rig.get(f"/replays/{done['operation']}")
    assert found == done


async def test_an_override_that_names_nothing_fails_with_one_line(rig: Rig) -> None:
    for where in ("--local", "--remote"):
        code, report, said = await verify(rig, where, "--set", "balance.nonsense=1")
        assert (code, report) == (2, {})
        assert "nonsense" in said and said.count("\n") == 1


async def test_P17_what_is_decided_after_a_replay_is_derived_again_too(rig: Rig) -> None:
    _, before, _ = await verify(rig, "--local")
    client = rig.stream(200)
    await client.has(10)
    await move_by_hand(rig, client)
    await client.end()
    await rig.facts()
    code, after, _ = await verify(rig, "--local")
    assert code == 0
    assert after["decisions"] > before["decisions"]
