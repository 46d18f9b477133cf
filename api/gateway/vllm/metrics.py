"""`/metrics` of a face: vLLM's numbers for each of its models, and Midstream's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric


class FrontMetrics:
    """What the face counts before vLLM's application is asked."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.open = Gauge("midstream_http_open_requests", "HTTP requests being answered", registry=self.registry)
        self.answered = Counter(
            "midstream_http_answers", "HTTP responses by class of status", ("status",), registry=self.registry
        )  # 2xx 4xx 5xx, broken: none or not to the end

    def collect(self) -> Iterable[Metric]:
        """As a Prometheus collector."""
        return self.registry.collect()


def take_vllm_metrics() -> CollectorRegistry:
    """Move what one `AsyncLLM` has just registered into a registry of its own.

    vLLM keeps its metrics in the process's registry and throws out those of an earlier model there.
    """
    own = CollectorRegistry()
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("vllm:"):
            REGISTRY.unregister(collector)
            own.register(collector)
    return own


class Together:
    """Several registries as one: families of one name are joined, as the exposition format wants."""

    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        """As a Prometheus collector."""
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for metric in registry.collect():
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                family.samples.extend(metric.samples)
        return families.values()
