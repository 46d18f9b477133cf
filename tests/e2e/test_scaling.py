"""A local cluster grows under load and shrinks after it, with real processes; its clients cannot tell."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from midstream.control.events import InstanceDrained, InstanceStopped, ScaleDecided
from midstream.control.replay import verify
from tests.e2e.helpers import running, until

SCALING = {
    "out_after_ms": 500, "in_after_ms": 4_000, "boot_ms": 2_000, "trend_ms": 3_000, "high": 40.0, "step_max": 1,
}  # fmt: skip
CLIENTS = 8
TOKENS = 2_000

pytestmark = pytest.mark.timeout(240)


async def test_P16_instances_come_when_they_are_needed_and_go_when_they_are_empty(tmp_path: Path) -> None:
    settings = {
        "autoscale": "1:2",
        "sim_blocks": 600,
        "move_policies": "drain,balance",
        "policy_params": {"scale_freeness": SCALING},
    }
    async with running(tmp_path, (600,), **settings) as rig:
        clients = [rig.stream(TOKENS, prompt_tokens=100) for _ in range(CLIENTS)]
        await until(lambda: len(rig.llumlets) == 2)
        (fresh,) = set(rig.llumlets) - {"i0"}
        for client in clients:
            await client.end()
            client.assert_undisturbed()
        await until(lambda: len(rig.llumlets) == 1)
        await rig.idle()
        entries = await rig.facts()
        (stayed,) = rig.llumlets
    decisions = [e.fact.event for e in entries if isinstance(e.fact.event, ScaleDecided)]
    assert [event.action for event in decisions] == ["add", "remove"]
    assert decisions[0].instance == fresh
    assert decisions[1].instance != stayed
    gone = [type(e.fact.event) for e in entries if isinstance(e.fact.event, InstanceDrained | InstanceStopped)]
    assert gone[:2] == [InstanceDrained, InstanceStopped], "it was empty before it was ended"
    assert verify(entries).is_equal


async def test_bounds_asked_for_are_in_force_also_where_policies_were_set_before(tmp_path: Path) -> None:
    async with running(tmp_path, (600,)) as rig:
        assert (await rig.cli("policies", "set", "cooldown_ms=777")).code == 0
    async with running(tmp_path, (600,), autoscale="1:3") as rig:
        policies = await rig.get("/policies")
        assert policies["scale"] == {"name": "scale_freeness", "params": {"instances_min": 1, "instances_max": 3}}
        assert policies["cooldown_ms"] == 777, "what was set stays"
        assert [line for line in rig.said if "scaling is now" in line]
        scale = {"name": "scale_freeness", "params": {"instances_max": 2, "high": 50.0, "is_dry_run": True}}
        assert (await rig.cli("policies", "set", f"scale={json.dumps(scale)}")).code == 0
        await rig.kill("controller-0")
        assert (await rig.get("/policies"))["scale"] == scale, "a controller that restarts overrules nobody"
    async with running(tmp_path, (600,), autoscale="1:4") as rig:
        params = (await rig.get("/policies"))["scale"]["params"]
        assert params == {"instances_min": 1, "instances_max": 4, "high": 50.0}


async def test_P23_a_cluster_that_ends_and_starts_again_in_its_folder_is_as_large_as_it_was(tmp_path: Path) -> None:
    for _ in range(2):
        async with running(tmp_path, (600, 600), autoscale="2:2") as rig:
            await asyncio.sleep(5)
            assert sorted(rig.llumlets) == ["i0", "i1"]
    async with running(tmp_path, (600, 600)) as rig:
        assert not [entry for entry in await rig.facts() if isinstance(entry.fact.event, ScaleDecided)]
