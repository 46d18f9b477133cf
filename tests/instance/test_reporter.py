"""Load reports on virtual time: news soon, not too often, something every second, and few looks in vain."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import msgspec

from midstream.api.simulation.fleet import Fleet, FleetPlan, play
from midstream.api.traces import TraceRow
from midstream.control.events import Entry, LoadReported
from midstream.control.state import Load
from midstream.instance.engines.sim.engine import SimEngine
from midstream.instance.news import is_news
from tests.simulation.test_fleet import PLAN, rows

SAMPLE_S = 0.01


class Counted(SimEngine):
    """Counts how often somebody looks at its load."""

    looks = 0

    def load(self) -> Load:
        self.looks += 1
        return super().load()


class Watched:
    """A fleet whose loads are sampled far more often than its llumlets look, next to what these reported."""

    def __init__(self, plan: FleetPlan, workload: tuple[TraceRow, ...]) -> None:
        self.reports: dict[str, list[tuple[int, Load]]] = {}
        self.untold_s = 0.0
        """How long news waited for its report, at most."""
        self.news = 0
        self.in_flight: list[int] = []
        """Dispatches that count as load of their own, at each sample."""
        self.played = play(plan, workload, self._begin)
        self.looks = sum(llumlet.engine.looks for llumlet in self.fleet.llumlets)  # type: ignore[attr-defined]

    def _begin(self, fleet: Fleet) -> None:
        self.fleet = fleet
        fleet.store.readers.append(self._read)
        for llumlet in fleet.llumlets:
            llumlet.engine.__class__ = Counted
        self._task = asyncio.get_running_loop().create_task(self._sample())

    def _read(self, entry: Entry) -> None:
        event = entry.fact.event
        if isinstance(event, LoadReported):
            self.reports.setdefault(event.owner.instance, []).append((entry.fact.at_ms, event.load))

    async def _sample(self) -> None:
        since: dict[tuple[str, int], float] = {}
        while True:
            await asyncio.sleep(SAMPLE_S)
            now = asyncio.get_running_loop().time()
            self.in_flight.append(sum(sent.requests for sent in self.fleet._gateway.peers.in_flight().values()))
            for llumlet in self.fleet.llumlets:
                reports = self.reports.get(llumlet.me.instance, [])
                if reports and is_news(reports[-1][1], SimEngine.load(llumlet.engine)):  # type: ignore[arg-type]
                    came = since.setdefault((llumlet.me.instance, len(reports)), now)
                    self.untold_s = max(self.untold_s, now - came)
                    self.news = len(since)


def gaps_ms(reports: list[tuple[int, Load]]) -> list[int]:
    return [after - before for (before, _), (after, _) in pairwise(reports)]


def test_P21_news_is_told_within_100_ms_and_a_load_at_most_so_often_at_least_every_second() -> None:
    watched = Watched(msgspec.structs.replace(PLAN, drain_at_s=6.0), rows())
    assert watched.played.record.moves > 0 and watched.played.record.preemptions > 0, "nothing that could be missed"
    gaps = [gap for reports in watched.reports.values() for gap in gaps_ms(reports)]
    assert min(gaps) >= 99
    assert max(gaps) <= 1_001
    assert watched.news > 100
    assert watched.untold_s <= 0.1 + 2 * SAMPLE_S


def test_who_serves_little_is_looked_at_little() -> None:
    """Ten long requests on four instances: some 4 looks and reports a second each, not 10."""
    watched = Watched(PLAN, tuple(TraceRow(index / 5, 200, 1_000) for index in range(10)))
    seconds = watched.played.busy_s
    assert seconds > 20
    assert watched.looks < 4 * seconds * len(watched.fleet.llumlets)
    idle = Watched(PLAN, (TraceRow(30.0, 16, 1),))
    assert idle.looks < 1.2 * idle.played.simulated_s * 4 + 10


def test_P22_what_was_sent_counts_until_a_report_shows_it_and_no_longer() -> None:
    """Four at once: all count as load of their own until the report of the first look, which has them all."""
    plan = msgspec.structs.replace(PLAN, instances=1)
    watched = Watched(plan, tuple(TraceRow(0.0, 1_200, 60) for _ in range(4)))
    counted = "".join(map(str, watched.in_flight)).strip("0")
    assert set(counted) == {"4"}
    assert 0.05 <= len(counted) * SAMPLE_S <= 0.2
    shown = [load.running + load.waiting for _, load in watched.reports["i00"]]
    assert shown[shown.index(4) - 1] == 0
