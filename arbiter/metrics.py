"""The arbiter's Prometheus metrics, and whether it is alive. This module reads the ledgers and never changes them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from arbiter import swap_metrics
from arbiter.enforcement import enforcements
from arbiter.gputime import metrics as gpu_time_metrics
from arbiter.server import ArbiterServer
from observe.pages import Pages
from observe.refusals import Refusals, refused_family
from vgpu.api.grant import Grant

STUCK_AFTER_S: Final = 5.0
"""The loop completes a round at least once a second, a GPU's thread five times. Guessed from that."""

_LABELS: Final = ("namespace", "pod", "container")
_GAUGES: Final = {
    "limit": "limit of the container's GPU memory in all: above its guarantee where it may burst",
    "leased": "GPU memory leased by the container's processes; above the limit only after a restart, when processes re-state what they had",
    "used": "GPU memory that the container's processes allocated, as they last reported",
    "context": "GPU memory of the container's contexts: what NVML counts beside the allocations",
    "shared": "GPU memory that the container's processes have open and whose maker is gone: charged beside all leases",
    "over_limit": "GPU memory that NVML counts beyond the limit, for a container that is over its limit; else 0",
}


class ArbiterCollector(Collector):
    """Metrics of every container and of the arbiter, read when they are requested."""

    def __init__(self, server: ArbiterServer, restarts: int = 0, refusals: Refusals | None = None) -> None:
        self._server, self._restarts, self._refusals = server, restarts, refusals or Refusals("arbiter")

    def collect(self) -> Iterable[Metric]:
        """The metric families of one moment."""
        with self._server.lock:
            grants = {key: c.grant for key, c in self._server.containers.items() if c.grant is not None}
            return [
                *_of_memory(self._server, grants),
                *_of_containers(self._server, grants),
                *_of_gpus(self._server),
                *self._of_arbiter(),
                *swap_metrics.families(self._server.swapping, grants),
                *gpu_time_metrics.families(self._server.scheduler, grants),
            ]

    def _of_arbiter(self) -> Iterable[Metric]:
        server, containers = self._server, self._server.containers.values()
        refused = Counter({("containers", reason): count for reason, count in server.refused().items()})
        yield refused_family("tangram_arbiter_refused", refused + self._refusals.counts)
        counts = (
            ("bad_packets", "packets that ended their connection", server.bad_packets_before + sum(c.bad_packets for c in containers)),
            ("kills", "processes killed because their container was over its limit", server.kills_before + sum(c.kills for c in containers)),
            ("restarts", "times that the arbiter was restarted in its Kubernetes container after it had died", self._restarts),
        )  # fmt: skip
        for name, text, count in counts:
            family = CounterMetricFamily(f"tangram_arbiter_{name}", text)
            family.add_metric([], count)
            yield family
        reads = GaugeMetricFamily(
            "tangram_arbiter_nvml_up",
            "1 while NVML is read; 0 = contexts are unknown and no container is found over its limit",
        )
        reads.add_metric([], int(server.node_memory.works))
        yield reads


def _of_memory(server: ArbiterServer, grants: Mapping[str, Grant]) -> Iterable[Metric]:
    """By container and GPU."""
    gauges = {
        name: GaugeMetricFamily(f"tangram_container_gpu_memory_{name}_bytes", text, labels=(*_LABELS, "gpu_uuid"))
        for name, text in _GAUGES.items()
    }
    for key, grant in grants.items():
        container = server.containers[key]
        ledger, excesses = container.ledger, container.over_limit.excesses
        for number, gpu in enumerate(grant.gpus):
            values = {
                "limit": container.memory.limits_bytes[number],
                "leased": ledger.leased_bytes(number),
                "used": ledger.used_bytes(number),
                "context": ledger.context_bytes(number),
                "shared": ledger.shared_bytes(number),
                "over_limit": sum(e.measured_bytes - e.limit_bytes for e in excesses if e.uuid == gpu.uuid),
            }
            for name, value in values.items():
                gauges[name].add_metric([grant.namespace, grant.pod, grant.container, gpu.uuid], value)
    return gauges.values()


def _of_containers(server: ArbiterServer, grants: Mapping[str, Grant]) -> Iterable[Metric]:
    connections = GaugeMetricFamily("tangram_container_connections", "processes connected", labels=_LABELS)
    throttles = CounterMetricFamily(
        "tangram_container_throttles",
        "times the processes of a container had to wait because the container had used its part of the arbiter's time",
        labels=_LABELS,
    )
    unenforced = GaugeMetricFamily(
        "tangram_container_unenforced",
        "1 while a limit of the container is not enforced, for this reason",
        labels=(*_LABELS, "reason"),
    )
    found, throttled = enforcements(server), server.throttles()
    for key, grant in grants.items():
        labels = [grant.namespace, grant.pod, grant.container]
        connections.add_metric(labels, len(server.containers[key].connections))
        if key in throttled:
            throttles.add_metric(labels, throttled[key])
        for finding in found[key].findings:
            unenforced.add_metric([*labels, finding.reason], 1)
    return connections, throttles, unenforced


def _of_gpus(server: ArbiterServer) -> Iterable[Metric]:
    """Metrics of each GPU that has a grant. Unlisted memory only if it is known."""
    ungranted_bytes = GaugeMetricFamily(
        "tangram_gpu_memory_ungranted_bytes",
        "GPU memory of processes that belong to no grant on this GPU",
        labels=["gpu_uuid"],
    )
    processes = GaugeMetricFamily(
        "tangram_gpu_ungranted_processes",
        "processes with GPU memory that belong to no grant on this GPU",
        labels=["gpu_uuid"],
    )
    unlisted_bytes = GaugeMetricFamily(
        "tangram_gpu_memory_unlisted_bytes",
        "GPU memory in use that NVML lists for no process, where that is more than a tolerance; else 0. No sample: it is unknown",
        labels=["gpu_uuid"],
    )
    found = server.attributor.ungranted
    uuids = {gpu.uuid for one in server.containers.values() if one.grant is not None for gpu in one.grant.gpus}
    for uuid in sorted(uuids | {one.uuid for one in found}):
        ungranted_bytes.add_metric([uuid], sum(one.held_bytes or 0 for one in found if one.uuid == uuid))
        processes.add_metric([uuid], sum(one.uuid == uuid for one in found))
    unlisted = {one.uuid: one.bytes for one in server.unlisted_memory.found}
    for uuid in sorted(server.unlisted_memory.known | unlisted.keys()):
        unlisted_bytes.add_metric([uuid], unlisted.get(uuid, 0))
    return ungranted_bytes, processes, unlisted_bytes


def stuck(server: ArbiterServer, at_s: float) -> str:
    """The silent thread, the loop or a GPU's; empty = none."""
    idle_s = at_s - server.came_round_at_s
    if idle_s >= STUCK_AFTER_S:
        return f"the loop has not come round for {idle_s:.0f} s"
    gpu, idle_s = server.scheduler.suspend_threads.stuck(at_s) if server.scheduler is not None else ("", 0.0)
    return f"the thread of GPU {gpu} has not come round for {idle_s:.0f} s" if idle_s >= STUCK_AFTER_S else ""


def pages(server: ArbiterServer, restarts: int = 0, refusals: Refusals | None = None) -> Pages:
    """/metrics, /healthz and /readyz of this arbiter."""
    registry = CollectorRegistry()
    registry.register(ArbiterCollector(server, restarts, refusals))
    return Pages(registry, not_alive=lambda: stuck(server, time.monotonic()))
