"""Numbers and health over HTTP: /metrics, /healthz (the process makes progress), /readyz (the plugin is registered, and NVML answers)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from deviceplugin.allocation import DeviceRequest, NodePod
from deviceplugin.gpus.capacity import MIB, CapacityCollector
from deviceplugin.gpus.health_metrics import HealthCollector, OwnerSourceCollector
from observe.refusals import Refusals
from vgpu.api.inventory import Inventory, Orphan
from vgpu.health.conditions import Reading
from vgpu.health.owners import Source

BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0, 5.0, 10.0)


class Metrics:
    """All metrics of the plugin."""

    def __init__(
        self,
        node: str = "",
        inventory: Callable[[], Inventory] = lambda: Inventory(()),
        node_pods: Callable[[], Collection[NodePod]] = tuple,
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(CapacityCollector(node, inventory, node_pods))
        self.readings: Callable[[], Mapping[str, Reading]] = dict
        """UUID -> what the GPU's sensors showed last."""
        self.registry.register(HealthCollector(inventory, lambda: self.readings()))
        self.owner_sources: Callable[[], Mapping[Source, str]] = dict
        """Sources of whose GPUs are whose that do not answer now, and why."""
        self.registry.register(OwnerSourceCollector(lambda: self.owner_sources()))
        self.listeners = Refusals("deviceplugin")
        self.registry.register(self.listeners)
        counter = partial(Counter, registry=self.registry)
        self.call = Histogram(
            "tangram_deviceplugin_call_duration_seconds", "Time to answer a call of the kubelet.", ("call", "resource"), buckets=BUCKETS_S,
            registry=self.registry,
        )  # fmt: skip
        self._calls: dict[tuple[str, str], Histogram] = {}
        """(call, resource) -> its series: looking it up by its labels takes longer than counting."""
        self.refusals = counter(
            "tangram_deviceplugin_calls_refused_total", "Calls of the kubelet that were refused.", ("call", "resource"),
        )  # fmt: skip
        self._of_gpus()
        self._of_pods()

    def _of_gpus(self) -> None:
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.healthy = gauge(
            "tangram_deviceplugin_gpu_healthy", "1 when the GPU is fit for use, else 0.", ("gpu_uuid", "gpu_index"),
        )  # fmt: skip
        self.xids = counter(
            "tangram_deviceplugin_xids_total", "XID errors that the driver reported.", ("gpu_uuid", "xid"),
        )  # fmt: skip
        self.drift = gauge(
            "tangram_deviceplugin_drift_devices",
            "Device IDs that the kubelet counts on a GPU beyond what its pods were assigned there.", ("resource", "gpu_uuid"),
        )  # fmt: skip
        self.nvml_ends = counter(
            "tangram_deviceplugin_nvml_processes_ended_total", "NVML processes that were ended, by reason.", ("reason",),
        )  # fmt: skip
        self.nvml_abandoned = gauge(
            "tangram_deviceplugin_nvml_processes_abandoned", "NVML processes that hang in the driver and cannot be killed.",
        )  # fmt: skip

        self.mig_changes = counter(
            "tangram_deviceplugin_mig_changes_total",
            "MIG instances on demand that were made or removed, and those that the driver did not make (failed).", ("change",),
        )  # fmt: skip
        self.host_pool = gauge(
            "tangram_node_host_pool_ready",
            "1 when every GPU of the node that is shared has its host pool, else 0. Without burst.hostPool: 0.",
        )  # fmt: skip

    def _of_pods(self) -> None:
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.swaps = counter(
            "tangram_deviceplugin_swaps_total", "Containers that the kubelet gave the devices of another pod of the same size.",
        )  # fmt: skip
        self.removals = counter(
            "tangram_deviceplugin_pods_removed_total", "Pods deleted or evicted so that their controllers make others.", ("reason",),
        )  # fmt: skip
        self.failed_removals = counter(
            "tangram_deviceplugin_pod_removals_failed_total", "Pods that had to go and could not be deleted or evicted.", ("reason",),
        )  # fmt: skip
        self.bursts_reduced = counter(
            "tangram_deviceplugin_bursts_reduced_total",
            "Bursts that do not apply as a pod requests them: its annotations cannot be read (ignored), or the GPU has less (limited).", ("reason",),
        )  # fmt: skip
        self.over_limit = gauge(
            "tangram_deviceplugin_over_limit_containers", "Containers that use more memory than they were granted, as the arbiter finds.",
        )  # fmt: skip
        self.stranded = gauge(
            "tangram_deviceplugin_stranded_containers", "Containers whose memory cannot come back from host memory, as the arbiter finds.",
        )  # fmt: skip
        self.arbiter_unreachable = counter(
            "tangram_deviceplugin_arbiter_status_failures_total",
            "Times that the arbiter's status was not there (unreachable) or not understood (unreadable).", ("reason",),
        )  # fmt: skip
        self.orphans = gauge(
            "tangram_deviceplugin_orphan_bytes",
            "GPU memory granted to a pod that was deleted by force and whose processes still run.", ("namespace", "pod", "gpu_uuid"),
        )  # fmt: skip
        self.processes_seen = gauge(
            "tangram_deviceplugin_processes_visible",
            "1 when the node's processes can be seen, 0 when not: then the capacity of a pod that is deleted by force is free at once.",
        )  # fmt: skip
        self.records_damaged = gauge(
            "tangram_deviceplugin_damaged_records", "Records of allocations and pods that cannot be read.",
        )  # fmt: skip
        self.grants = gauge("tangram_deviceplugin_grants", "Grant folders on the node.")

    def served(self, call: str, resource: str, seconds: float) -> None:
        """A call was answered."""
        series = self._calls.get((call, resource))
        if series is None:
            series = self._calls[call, resource] = self.call.labels(call, resource)
        series.observe(seconds)

    def refused(self, call: str, request: DeviceRequest) -> None:
        """A call was refused."""
        self.refusals.labels(call, request.resource).inc()

    def removed(self, reason: str, done: bool) -> None:
        """The removal of a pod ended."""
        (self.removals if done else self.failed_removals).labels(reason).inc()

    def set_orphans(self, orphans: Iterable[Orphan]) -> None:
        """Replace the series of pods that the API lacks and whose processes run on."""
        self.orphans.clear()
        for orphan in orphans:
            for gpu in orphan.held:
                self.orphans.labels(orphan.namespace, orphan.pod, gpu.uuid).set(gpu.mib * MIB)

    def set_drift(self, found: Mapping[tuple[str, str], int]) -> None:
        """Replace the series of drift."""
        self.drift.clear()
        for (resource, uuid), count in found.items():
            self.drift.labels(resource, uuid).set(count)
