"""Every policy in a whole cluster under faults: promises hold whatever decides, and caches are followed."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from msgspec.structs import replace

from midstream.api.simulation.cluster import Cluster
from midstream.api.simulation.oracle import breaches, history
from midstream.api.simulation.workload import Arrival, Scenario, draw_scenario
from midstream.control.events import Entry, MoveDecided, PolicyConfigured, RequestDispatched
from midstream.control.policies import DISPATCH, MOVES
from midstream.control.simulate.loop import run_virtual
from midstream.control.state import PolicyChoice, PolicySettings
from midstream.migration.protocol.messages import RequestSpec, Sampling

SEEDS = (11, 12)
FAULTS = 1.0
VIRTUAL_MAX_S = 1_000.0
ALL_MOVES = tuple(PolicyChoice(name) for name in ("drain", *sorted(set(MOVES) - {"drain", "none"})))


class Ruled(Cluster):
    """A cluster whose policies an operator sets at the start."""

    policies = PolicySettings()

    async def _client(self, outcome):  # type: ignore[no-untyped-def]
        if outcome is self.outcomes[0]:
            self.admin.publisher.record(PolicyConfigured(policies=self.policies, actor="test"))
            await asyncio.sleep(0)
        await super()._client(outcome)


def play(scenario: Scenario, policies: PolicySettings) -> tuple[list[str], list[Entry]]:
    async def main() -> tuple[list[str], list[Entry]]:
        cluster = Ruled(scenario)
        cluster.policies = policies
        try:
            await cluster.play()
            return await breaches(cluster), await history(cluster)
        finally:
            await cluster.stop()

    return run_virtual(main, seed=scenario.seed, timeout_s=VIRTUAL_MAX_S)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", DISPATCH)
def test_P01_to_P21_hold_under_every_dispatcher_and_all_movers(policy: str) -> None:
    """The oracle replays every decision too (P17)."""
    settings = PolicySettings(dispatch=PolicyChoice(policy), moves=ALL_MOVES, cooldown_ms=500)
    chosen: Counter[str] = Counter()
    for seed in SEEDS:
        violations, entries = play(draw_scenario(seed, intensity=FAULTS), settings)
        assert violations == [], f"seed {seed}"
        events = [entry.fact.event for entry in entries]
        chosen.update(event.policy for event in events if isinstance(event, RequestDispatched | MoveDecided))
    assert chosen[policy] > 0


def test_a_request_goes_where_its_prefix_is_although_others_are_emptier() -> None:
    """What the engines tell of their caches comes to the gateways with their pings."""
    quiet = draw_scenario(5, intensity=0.0)
    prompt = tuple(range(3, 103))
    short = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)

    def arrival(number: int, at_ms: int, asked: tuple[int, ...]) -> Arrival:
        spec = RequestSpec(request=f"r{number}", prompt=asked, sampling=short)
        return Arrival(at_ms=at_ms, gateway="g1", spec=spec)

    first = [arrival(0, 1_000, prompt), arrival(1, 1_050, prompt[:5]), arrival(2, 1_100, prompt[:6])]
    later = [arrival(number, 8_000 + 2_000 * number, (*prompt[:80], number)) for number in range(3, 6)]
    engine = replace(quiet.engines["a"], blocks_total=96, slots_max=8, time_scale=1.0)
    scenario = replace(
        quiet, engines=dict.fromkeys(quiet.engines, engine), arrivals=(*first, *later), orders=(), faults=()
    )
    policies = PolicySettings(dispatch=PolicyChoice("prefix_affinity"), moves=(PolicyChoice("none"),))
    violations, entries = play(scenario, policies)
    assert violations == []
    owners = {
        entry.fact.event.request: entry.fact.event
        for entry in entries
        if isinstance(entry.fact.event, RequestDispatched)
    }
    home = owners["r0"].owner
    assert [owners[f"r{number}"].owner for number in range(3, 6)] == [home] * 3
    assert "80 of 81 prompt tokens are cached there" in owners["r5"].reason
