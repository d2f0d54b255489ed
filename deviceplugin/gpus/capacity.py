"""Memory of the node's GPUs that pods may have, that they have, and that is left: what a dashboard of a cluster sums up.

Counts pods that are bound to this node, terminating ones included, and orphans. The extender's reservations for pods that are not bound yet
are not counted here: they last for seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from deviceplugin.allocation import NodePod
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.mig_device import slot_of_device

MIB: Final = 2**20
USES: Final = ("free", "shared", "whole", "mig", "withdrawn", "unhealthy")
"""Of a GPU: nothing of it is allocated, shares of it are, all of it is to one container, it is in MIG mode, new pods do not get it whatever its health and none has a
share of it, it is not fit for use."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Of one GPU, MiB."""

    capacity_mib: int
    """All of it; in MIG mode that of its instances."""
    allocated_mib: int
    free_mib: int
    """What pods may still be given; 0 while the GPU is unhealthy or withdrawn."""
    use: str
    """One of `USES`."""


def memory_of(gpu: Gpu, assigned: Collection[AssignedGpu]) -> GpuMemory:
    """Of this GPU, with the parts of it and of its instances that pods have. With instances on demand all of it counts, and what no pod has is free."""
    if gpu.on_demand:
        allocated = min(gpu.mib, sum(one.mib for one in assigned))
        free = gpu.mib - allocated if gpu.offered else 0
        return GpuMemory(gpu.mib, allocated, free, _use(gpu, "mig", allocated))
    if gpu.mig:
        used = {one.uuid for one in assigned}
        instances = gpu.instances
        free = sum(one.mib for one in gpu.offered_instances if one.uuid not in used)
        allocated = sum(one.mib for one in instances if one.uuid in used)
        return GpuMemory(sum(one.mib for one in instances), allocated, free, _use(gpu, "mig", allocated))
    whole = any(one.kind == "whole" for one in assigned)
    allocated = gpu.mib if whole else sum(one.mib for one in assigned)
    use = "whole" if whole else "shared" if assigned else "free"
    free = max(0, gpu.mib - allocated) if gpu.offered else 0
    return GpuMemory(gpu.mib, allocated, free, _use(gpu, use, allocated))


def _use(gpu: Gpu, use: str, allocated_mib: int) -> str:
    if gpu.withdrawn and not allocated_mib:
        return "withdrawn"
    return use if gpu.healthy else "unhealthy"


def is_counted(gpu: Gpu, assigned: Collection[AssignedGpu]) -> bool:
    """Is it capacity of Tangram's? One that the operator left to others is not, once no pod of ours has any of it."""
    return bool(assigned) or gpu.selected


def memory_by_gpu(inventory: Inventory, assigned: Iterable[AssignedGpu]) -> Iterator[tuple[Gpu, GpuMemory]]:
    """Every GPU of the node that is Tangram's. Parts of a GPU that the node no longer has are left out."""
    of_gpu: dict[str, list[AssignedGpu]] = {}
    uuids = {uuid: gpu.uuid for gpu in inventory.gpus for uuid in (gpu.uuid, *(one.uuid for one in gpu.instances))}
    for one in assigned:
        slot = slot_of_device(one.uuid)
        of_gpu.setdefault(slot[0] if slot else uuids.get(one.uuid, ""), []).append(one)
    for gpu in inventory.gpus:
        if is_counted(gpu, of_gpu.get(gpu.uuid, ())):
            yield gpu, memory_of(gpu, of_gpu.get(gpu.uuid, ()))


class CapacityCollector(Collector):
    """The metrics of a node's GPUs and of its pods' whole GPUs and MIG instances, read at each scrape."""

    def __init__(
        self, node: str, inventory: Callable[[], Inventory], node_pods: Callable[[], Collection[NodePod]]
    ) -> None:
        self._node, self._inventory, self._node_pods = node, inventory, node_pods

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Eight families."""
        inventory, pods = self._inventory(), self._node_pods()
        orphans = chain.from_iterable(orphan.held for orphan in inventory.orphans)
        found = list(memory_by_gpu(inventory, chain(*(pod.assignment.held() for pod in pods), orphans)))
        for name, what in (
            ("capacity", "that pods may have; in MIG mode that of its instances"),
            ("allocated", "that bound pods have"),
            ("free", "that pods may still be given; 0 while it is unhealthy or withdrawn"),
        ):
            per_gpu = GaugeMetricFamily(
                f"tangram_gpu_memory_{name}_bytes", f"Memory of a GPU {what}.", labels=("node", "gpu_uuid", "gpu_index", "model")
            )  # fmt: skip
            per_node = GaugeMetricFamily(
                f"tangram_node_gpu_memory_{name}_bytes", f"Memory of the node's GPUs, together: that of each GPU {what}.", labels=("node",)
            )  # fmt: skip
            values = [getattr(memory, f"{name}_mib") * MIB for _, memory in found]
            for (gpu, _), value in zip(found, values, strict=True):
                per_gpu.add_metric((self._node, gpu.uuid, str(gpu.index), gpu.model), value)
            per_node.add_metric((self._node,), sum(values))
            yield from (per_gpu, per_node)
        yield self._gpus(memory for _, memory in found)
        yield self._of_pods(pods)

    def _gpus(self, found: Iterable[GpuMemory]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "tangram_node_gpus", f"GPUs of the node by use: {', '.join(USES)}.", labels=("node", "use")
        )
        counts = Counter(memory.use for memory in found)
        for use in USES:
            family.add_metric((self._node, use), counts[use])
        return family

    def _of_pods(self, pods: Iterable[NodePod]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "tangram_pod_gpus", "Whole GPUs (kind whole) and MIG instances (kind mig, with their profile) that a bound pod has.",
            labels=("namespace", "pod", "kind", "profile"),
        )  # fmt: skip
        for pod in pods:
            counts = Counter((one.kind, one.profile) for one in pod.assignment.held() if one.kind != "share")
            for (kind, profile), count in sorted(counts.items()):
                family.add_metric((pod.namespace, pod.name, kind, profile), count)
        return family
