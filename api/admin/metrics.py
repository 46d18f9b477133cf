"""Gauges of the cluster, read from the live fold when Prometheus asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from midstream.api.admin.deps import Follower
from midstream.control.state import InstanceView, State

HEALTHS = ("up", "suspect", "lost", "stopped")


class ClusterCollector(Collector):
    """Series vanish with the instances they speak of (P27)."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def collect(self) -> Iterator[Metric]:
        """One pass over the state."""
        state = self._follower.state
        healths = Counter(view.health for view in state.instances.values())
        yield _by("midstream_instances", "Instances by health", "health", {h: healths[h] for h in HEALTHS})
        yield GaugeMetricFamily("midstream_requests", "Live requests", len(state.requests))
        moving = sum(move.is_open for move in state.migrations.values())
        yield GaugeMetricFamily("midstream_migrations_open", "Moves without an outcome", moving)
        yield GaugeMetricFamily("midstream_log_generation", "Generation of the log", state.generation)
        yield GaugeMetricFamily("midstream_log_seq", "Last folded position in it", state.position.seq)
        yield GaugeMetricFamily("midstream_log_gaps", "Holes seen in source numbers", state.gaps)
        yield from _loads(state)


def render(follower: Follower) -> bytes:
    """The exposition text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ClusterCollector(follower))
    return generate_latest(registry)


def _loads(state: State) -> Iterator[Metric]:
    here = {name: view for name, view in state.instances.items() if view.health in ("up", "suspect")}

    def gauge(name: str, text: str, value: str) -> Metric:
        return _by(name, text, "instance", {key: _value(view, value) for key, view in here.items()})

    yield gauge("midstream_instance_running", "Running requests", "running")
    yield gauge("midstream_instance_waiting", "Waiting requests", "waiting")
    yield gauge("midstream_instance_blocks_free", "Free KV blocks", "blocks_free")


def _value(view: InstanceView, field: str) -> float:
    return float(getattr(view.load, field))


def _by(name: str, text: str, label: str, values: dict[str, float] | dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
