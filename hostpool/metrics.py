"""What the host pool's program reports as numbers, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hostpool.copier_process import CopierProcess
from observe.refusals import Refusals


class PoolCollector(Collector):
    """The metrics of each GPU's pool. `copiers`: those of now; `share_of`: bytes of a GPU's pool as it is set."""

    def __init__(self, copiers: Callable[[], list[CopierProcess]], share_of: Callable[[str], int]) -> None:
        self._copiers, self._share_of = copiers, share_of

    def collect(self) -> Iterator[Metric]:
        """Four families."""
        sizes = GaugeMetricFamily(
            "tangram_host_pool_bytes",
            "Host memory of a GPU's pool, by state: set (its part of burst.hostPool), allocated, registered with the driver.",
            labels=("gpu_uuid", "state"),
        )
        ready = GaugeMetricFamily(
            "tangram_host_pool_ready", "1 when the GPU's copier takes jobs, else 0.", labels=("gpu_uuid",)
        )
        restarts = CounterMetricFamily(
            "tangram_host_pool_copier_restarts",
            "Copiers of a GPU that ended and were started again.",
            labels=("gpu_uuid",),
        )
        start = GaugeMetricFamily(
            "tangram_host_pool_start_duration_seconds",
            "Time from the start of the present copier until its pool was ready.", labels=("gpu_uuid",),
        )  # fmt: skip
        for copier in self._copiers():
            for state, value in (
                ("set", self._share_of(copier.gpu)),
                ("allocated", copier.progress.allocated_bytes),
                ("registered", copier.progress.registered_bytes),
            ):
                sizes.add_metric((copier.gpu, state), value)
            ready.add_metric((copier.gpu,), copier.ready)
            restarts.add_metric((copier.gpu,), copier.restarts)
            if copier.start_s is not None:
                start.add_metric((copier.gpu,), copier.start_s)
        return iter((sizes, ready, restarts, start))


class Metrics:
    """All metrics of the program."""

    def __init__(
        self, copiers: Callable[[], list[CopierProcess]] = list, share_of: Callable[[str], int] = lambda _: 0
    ) -> None:
        self.registry = CollectorRegistry()
        self.refused = Refusals("hostpool")
        self.registry.register(self.refused)
        self.registry.register(PoolCollector(copiers, share_of))
