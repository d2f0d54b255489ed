"""What the arbiter tells: Prometheus metrics and whether it is alive. It reads the ledgers and never changes them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from arbiter.enforcement import enforcements
from arbiter.gputime import metrics as turn_metrics
from arbiter.server import Server
from observe.pages import Pages
from observe.refusals import Refusals, refused_family

STUCK_AFTER_S: Final = 5.0
"""The loop comes round at least once a second, a GPU's thread five times. Guessed from that."""

_GPU_LABELS: Final = ("namespace", "pod", "container", "gpu_uuid")
_GAUGES: Final = {
    "limit": "GPU memory the container may hold",
    "leased": "GPU memory leased by the container's processes; never above the limit unless re-stated after a restart",
    "used": "GPU memory the container's processes last said they allocated",
    "context": "GPU memory of the container's contexts: what NVML counts beside the allocations",
    "shared": "GPU memory that the container's processes have open, and whose maker is gone: charged beside all leases",
    "over_limit": "GPU memory that NVML counts beyond the limit, for a container that is over it; else 0",
}


class LedgerCollector(Collector):
    """Metrics of every container, read when they are requested."""

    def __init__(self, server: Server, restarts: int = 0, refusals: Refusals | None = None) -> None:
        self._server, self._restarts, self._refusals = server, restarts, refusals or Refusals("arbiter")

    def collect(self) -> Iterable[Metric]:
        """Families of one moment."""
        gauges = {
            name: GaugeMetricFamily(f"tangram_arbiter_{name}_bytes", text, labels=_GPU_LABELS)
            for name, text in _GAUGES.items()
        }
        connections = GaugeMetricFamily("tangram_arbiter_connections", "processes connected", labels=_GPU_LABELS[:3])
        throttles = CounterMetricFamily(
            "tangram_arbiter_throttles",
            "times the processes of a container had to wait, having used the container's part of the arbiter's time",
            labels=_GPU_LABELS[:3],
        )
        bad = CounterMetricFamily("tangram_arbiter_bad_packets", "packets that ended their connection")
        kills = CounterMetricFamily(
            "tangram_arbiter_kills", "processes killed because their container was over its limit"
        )
        unenforced = GaugeMetricFamily(
            "tangram_arbiter_unenforced",
            "1 while a limit of the container is not enforced, for this reason",
            labels=(*_GPU_LABELS[:3], "reason"),
        )
        measures = GaugeMetricFamily(
            "tangram_arbiter_measures", "1 while NVML is read; 0 = contexts are unknown and the guard sees nothing"
        )
        measures.add_metric([], int(self._server.measuring.works))
        ungranted = _ungranted(self._server)
        total_bad = total_kills = 0
        with self._server.lock:
            found = enforcements(self._server)
            throttled = self._server.throttles()
            refused = Counter({("containers", reason): count for reason, count in self._server.refused().items()})
            for key, container in self._server.containers.items():
                total_bad += container.bad_packets
                total_kills += container.kills
                grant = container.grant
                if grant is None:
                    continue
                place = [grant.namespace, grant.pod, grant.container]
                connections.add_metric(place, len(container.connections))
                if key in throttled:
                    throttles.add_metric(place, throttled[key])
                for finding in found[key].findings:
                    unenforced.add_metric([*place, finding.reason], 1)
                for number, gpu in enumerate(grant.gpus):
                    labels = [*place, gpu.uuid]
                    gauges["limit"].add_metric(labels, gpu.mib * 2**20)
                    gauges["leased"].add_metric(labels, container.ledger.leased_bytes(number))
                    gauges["used"].add_metric(labels, container.ledger.used_bytes(number))
                    gauges["context"].add_metric(labels, container.ledger.context_bytes(number))
                    gauges["shared"].add_metric(labels, container.ledger.shared_bytes(number))
                    over = sum(
                        e.measured_bytes - e.limit_bytes for e in container.lookout.excesses if e.uuid == gpu.uuid
                    )
                    gauges["over_limit"].add_metric(labels, over)
            grants = {key: c.grant for key, c in self._server.containers.items() if c.grant is not None}
            turns = list(turn_metrics.families(self._server.turns, grants))
            total_bad += self._server.bad_packets_before
            total_kills += self._server.kills_before
        restarts = CounterMetricFamily(
            "tangram_arbiter_restarts", "times that the arbiter was started again in this container, after it had died"
        )
        restarts.add_metric([], self._restarts)
        bad.add_metric([], total_bad)
        kills.add_metric([], total_kills)
        refusals = refused_family("tangram_arbiter_refused", refused + self._refusals.counts)
        found_there = [*gauges.values(), connections, throttles, refusals, unenforced, *ungranted]
        return [*found_there, bad, kills, restarts, measures, *turns]


def _ungranted(server: Server) -> list[Metric]:
    """By GPU; of each that has a grant."""
    held = GaugeMetricFamily(
        "tangram_arbiter_ungranted_bytes", "GPU memory of processes that belong to no grant there", labels=["gpu_uuid"]
    )
    count = GaugeMetricFamily(
        "tangram_arbiter_ungranted_processes",
        "processes with GPU memory that belong to no grant there",
        labels=["gpu_uuid"],
    )
    with server.lock:
        found = server.attributing.ungranted
        uuids = {gpu.uuid for one in server.containers.values() if one.grant is not None for gpu in one.grant.gpus}
    for uuid in sorted(uuids | {one.uuid for one in found}):
        held.add_metric([uuid], sum(one.held_bytes or 0 for one in found if one.uuid == uuid))
        count.add_metric([uuid], sum(one.uuid == uuid for one in found))
    return [held, count, _unlisted(server)]


def _unlisted(server: Server) -> Metric:
    """Of each GPU that has a grant and of which it can be told."""
    held = GaugeMetricFamily(
        "tangram_arbiter_unlisted_bytes",
        "GPU memory in use that NVML lists for no process, where that is more than the slack; else 0. No sample: it cannot be told",
        labels=["gpu_uuid"],
    )
    with server.lock:
        found = {one.uuid: one.bytes for one in server.unlisting.found}
        known = server.unlisting.known
    for uuid in sorted(known | found.keys()):
        held.add_metric([uuid], found.get(uuid, 0))
    return held


def stuck(server: Server, at_s: float) -> str:
    """Which thread has not come round for long, the loop or a GPU's; empty = all do."""
    idle_s = at_s - server.turned_at_s
    if idle_s >= STUCK_AFTER_S:
        return f"the loop has not come round for {idle_s:.0f} s"
    gpu, idle_s = server.turns.gpu_threads.stuck(at_s) if server.turns is not None else ("", 0.0)
    return f"the thread of GPU {gpu} has not come round for {idle_s:.0f} s" if idle_s >= STUCK_AFTER_S else ""


def pages(server: Server, restarts: int = 0, refusals: Refusals | None = None) -> Pages:
    """/metrics, /healthz and /readyz of this arbiter."""
    registry = CollectorRegistry()
    registry.register(LedgerCollector(server, restarts, refusals))
    return Pages(registry, not_alive=lambda: stuck(server, time.monotonic()))
