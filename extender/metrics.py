"""The extender's metrics. Gauges are read from the state at each scrape, so that none can go stale or leak."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extender.placeholders import Counts
from extender.state import State
from kube.cache import CacheStatistics
from observe.refusals import Refusals
from vgpu.scheduling.reservations import STAGES

BUCKETS_S: Final = (0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Around the targets: filter 1 and 3 ms at 1,000 nodes; bind is an API write, some 10 ms, and ends at 5 s (httpTimeout)."""

LABELS: Final = 64
"""Verbs with their outcomes: there are some twenty."""


class Metrics:
    """One registry for one extender."""

    def __init__(
        self,
        state: State,
        caches: Callable[[], Mapping[str, CacheStatistics]],
        evicted: Callable[[], int] = lambda: 0,
        nominations: Mapping[str, int] | None = None,
        gang_failures: Callable[[], int] = lambda: 0,
        unread_controllers: Callable[[], int] = lambda: 0,
        placeholders: Counts | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.refused = Refusals("extender")
        self.registry.register(self.refused)
        self._duration = Histogram(
            "tangram_extender_request_duration_seconds",
            "Time from a request's body to its answer, by verb.",
            ["verb"], buckets=BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._requests = Counter(
            "tangram_extender_requests_total",
            "Requests by verb and outcome.",
            ["verb", "outcome"],
            registry=self.registry,
        )
        self.registry.register(_Scraped(state, caches, evicted, nominations or {}, gang_failures, unread_controllers))
        self.registry.register(_Placeholders(placeholders or Counts()))
        self._duration_of = lru_cache(LABELS)(self._duration.labels)  # each looks them up by their text: 10 us a call
        self._requests_of = lru_cache(LABELS)(self._requests.labels)

    def count(self, verb: str, outcome: str, seconds: float) -> None:
        """A request was answered."""
        self._duration_of(verb).observe(seconds)
        self._requests_of(verb, outcome).inc()


class _Placeholders(Collector):
    """Pods for autoscalers (`extender.placeholders`)."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        counts = self._counts
        yield _gauge("placeholders", "Placeholder pods for autoscalers that exist.", counts.present)
        changes = CounterMetricFamily(
            "tangram_extender_placeholder_changes",
            "Placeholder pods for autoscalers: created, removed, refused by the API server (a quota, a policy, rights).",
            labels=["outcome"],
        )
        for outcome in ("created", "removed", "refused"):
            changes.add_metric([outcome], getattr(counts, outcome))
        yield changes


class _Scraped(Collector):
    """Read from the state and the caches at each scrape."""

    def __init__(
        self,
        state: State,
        caches: Callable[[], Mapping[str, CacheStatistics]],
        evicted: Callable[[], int],
        nominations: Mapping[str, int],
        gang_failures: Callable[[], int],
        unread_controllers: Callable[[], int],
    ) -> None:
        self._state, self._caches, self._evicted, self._nominations = state, caches, evicted, nominations
        self._gang_failures, self._unread_controllers = gang_failures, unread_controllers

    def collect(self) -> Iterable[Metric]:
        yield from self._of_reservations()
        yield from self._of_state()
        yield from self._of_caches()

    def _of_reservations(self) -> Iterable[Metric]:
        state = self._state
        stages = Tally(reservation.stage for reservation in state.reservations)
        by_stage = GaugeMetricFamily(
            "tangram_extender_reservations",
            "Reservations of GPU capacity for pods that the watch has not shown bound, by stage.",
            labels=["stage"],
        )
        for stage in STAGES:
            by_stage.add_metric([stage.replace(" ", "_")], stages[stage])
        yield by_stage
        yield _counter(
            "evictions",
            "Pods that the extender itself evicted: the preemptor fitted no single GPU, and kube-scheduler did not preempt.",
            self._evicted(),
        )
        nominations = CounterMetricFamily(
            "tangram_extender_nominations",
            "Pods nominated ahead of their scheduling cycle: written, refused by the API server, taken (followed by kube-scheduler), left (not followed).",
            labels=["outcome"],
        )
        for outcome, count in self._nominations.items():
            nominations.add_metric([outcome], count)
        yield nominations
        yield _counter(
            "reservations_expired", "Scheduling reservations that lapsed before their pod was bound.", state.expired
        )
        yield _counter(
            "gang_failures",
            "Times that reservations of a gang ended because it was not scheduled.",
            self._gang_failures(),
        )

    def _of_state(self) -> Iterable[Metric]:
        state = self._state
        yield _gauge(
            "allocated_pods",
            "Pods with a share, a GPU or a MIG instance, those with a reservation included.",
            len(state.allocations),
        )
        yield _gauge(
            "orphaned_pods",
            "Pods that were deleted by force and stay allocated, because their nodes report that their processes still run.",
            len(state.orphans),
        )
        yield _gauge(
            "unassigned_pods", "Bound pods that request GPUs and were not placed by Tangram.", len(state.unassigned)
        )
        yield _gauge("nodes", "Nodes that can take pods.", len(state.fleet))
        yield _gauge(
            "excluded_nodes",
            "Nodes that take no pods until an inventory or an assignment is corrected.",
            len(state.inventories.excluded_nodes),
        )
        yield _gauge(
            "overcommitted_gpus",
            "GPUs and MIG instances with more assigned than they have.",
            len(state.fleet.overcommitted()),
        )
        yield _gauge(
            "unread_controllers",
            "Controllers of pods that are not read yet or cannot be. With Kueue, those pods are not evicted.",
            self._unread_controllers(),
        )
        yield _counter(
            "node_repairs",
            "Nodes whose free capacity differed from a count anew and was repaired.",
            state.allocations.repaired,
        )

    def _of_caches(self) -> Iterable[Metric]:
        caches = self._caches()
        families: dict[str, tuple[str, Callable[[CacheStatistics], float]]] = {
            "age_seconds": ("Time since the API server last sent anything.", lambda seen: seen.age_s),
            "objects": ("Objects known.", lambda seen: seen.objects),
            "unknown_objects": ("Objects that cannot be decoded.", lambda seen: seen.unknown),
            "unapplied_objects": ("Objects whose last update failed; it is retried.", lambda seen: seen.unreported),
            "synced": ("1 once the first list is complete.", lambda seen: seen.synced),
        }
        for name, (what, read) in families.items():
            gauge = GaugeMetricFamily(f"tangram_extender_cache_{name}", what, labels=["cache"])
            for cache, seen in caches.items():
                gauge.add_metric([cache], read(seen))
            yield gauge
        events = CounterMetricFamily("tangram_extender_cache_events", "Changes seen by the watch.", labels=["cache"])
        relists = CounterMetricFamily(
            "tangram_extender_cache_relists",
            "Times that all objects were listed again, by reason.",
            labels=["cache", "reason"],
        )
        errors = CounterMetricFamily(
            "tangram_extender_cache_errors",
            "Failed calls, undecodable objects and failed updates.",
            labels=["cache", "kind"],
        )
        for cache, seen in caches.items():
            events.add_metric([cache], seen.events)
            for reason, count in seen.relists.items():
                relists.add_metric([cache, reason], count)
            for kind in ("failures", "undecodable", "callback_errors"):
                errors.add_metric([cache, kind], getattr(seen, kind))
        yield from (events, relists, errors)


def _gauge(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"tangram_extender_{name}", what, value=value)


def _counter(name: str, what: str, value: float) -> CounterMetricFamily:
    kept: Any = CounterMetricFamily(f"tangram_extender_{name}", what, value=value)
    counter: CounterMetricFamily = kept
    return counter
