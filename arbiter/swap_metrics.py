"""Prometheus metrics of memory above the guarantees, read when they are requested. Without bursts on the node there are families and no samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from arbiter.node_swapping import NodeSwapping
from vgpu.api.grant import Grant

_LABELS: Final = ("namespace", "pod", "container")
MIB: Final = 2**20


def families(swapping: NodeSwapping, grants: Mapping[str, Grant]) -> Iterable[Metric]:
    """`grants`: by container. Under the server's lock."""
    yield from _of_memory(swapping, grants)
    yield from _of_containers(swapping, grants)
    yield from _of_gpus(swapping)
    kills = CounterMetricFamily(
        "tangram_arbiter_swap_kills", "containers whose processes were killed because they did not give way to the guarantee of another"
    )  # fmt: skip
    kills.add_metric([], swapping.kills)
    yield kills


def _of_memory(swapping: NodeSwapping, grants: Mapping[str, Grant]) -> Iterable[Metric]:
    guaranteed = GaugeMetricFamily(
        "tangram_container_gpu_memory_guaranteed_bytes",
        "GPU memory that the container is guaranteed: below the limit where it may burst",
        labels=(*_LABELS, "gpu_uuid"),
    )
    away = GaugeMetricFamily(
        "tangram_container_gpu_memory_away_bytes",
        "leased memory of the container that is in host memory",
        labels=(*_LABELS, "gpu_uuid"),
    )
    for key, grant in grants.items():
        _, gpus = swapping.status(key)
        for gpu in grant.gpus:
            labels = [grant.namespace, grant.pod, grant.container, gpu.uuid]
            guaranteed.add_metric(labels, gpu.mib * MIB)
            if gpu.uuid in gpus:
                away.add_metric(labels, gpus[gpu.uuid].away_bytes)
    return guaranteed, away


def _of_containers(swapping: NodeSwapping, grants: Mapping[str, Grant]) -> Iterable[Metric]:
    swaps = CounterMetricFamily(
        "tangram_container_swaps",
        "times that memory of the container was ordered out of a GPU, or back",
        labels=(*_LABELS, "direction"),
    )
    paused_s = CounterMetricFamily(
        "tangram_container_paused_seconds",
        "time in which the container did not run because memory of it was in host memory or moved",
        labels=_LABELS,
    )
    stranded = GaugeMetricFamily(
        "tangram_container_stranded", "1 while memory of the container cannot come back from host memory", labels=_LABELS
    )  # fmt: skip
    waiting = GaugeMetricFamily(
        "tangram_container_memory_requests_waiting",
        "requests of the container that wait for memory of a GPU",
        labels=_LABELS,
    )
    pool_full = GaugeMetricFamily(
        "tangram_container_host_pool_waiting",
        "1 while requests of the container above its guarantee wait for room in the host pool; the status has the sizes",
        labels=_LABELS,
    )
    unable = GaugeMetricFamily(
        "tangram_container_swap_unable",
        "1 while memory of the container cannot be swapped, so that it gets none above its guarantee; the status has the reason",
        labels=_LABELS,
    )
    for key, grant in grants.items():
        node, (status, _) = swapping.node, swapping.status(key)
        if node is None or status is None:
            continue
        labels = [grant.namespace, grant.pod, grant.container]
        swaps.add_metric([*labels, "out"], node.counts.swaps[key, "out"])
        swaps.add_metric([*labels, "in"], node.counts.swaps[key, "in"])
        paused_s.add_metric(labels, node.blocks.total_s(key))
        stranded.add_metric(labels, bool(status.stranded))
        waiting.add_metric(labels, status.waiting)
        pool_full.add_metric(labels, bool(status.pool_full))
        unable.add_metric(labels, bool(status.unable))
    return swaps, paused_s, stranded, waiting, pool_full, unable


def _of_gpus(swapping: NodeSwapping) -> Iterable[Metric]:
    moved = CounterMetricFamily(
        "tangram_gpu_swap_bytes", "memory that was moved out of a GPU, or back", labels=("gpu_uuid", "direction")
    )
    capacity = GaugeMetricFamily(
        "tangram_gpu_memory_container_capacity_bytes",
        "memory of a GPU that containers of this node can have at a time, by the arbiter's readings",
        labels=["gpu_uuid"],
    )
    ready = GaugeMetricFamily(
        "tangram_gpu_swap_ready",
        "1 while the GPU's copier answers the arbiter and its host pool can be used, else 0",
        labels=["gpu_uuid"],
    )
    for gpu in swapping.node.gpus() if swapping.node is not None else ():
        moved.add_metric([gpu.gpu, "out"], gpu.moved_bytes.get("out", 0))
        moved.add_metric([gpu.gpu, "in"], gpu.moved_bytes.get("in", 0))
        capacity.add_metric([gpu.gpu], gpu.capacity_bytes)
        ready.add_metric([gpu.gpu], gpu.ready)
    return moved, capacity, ready
