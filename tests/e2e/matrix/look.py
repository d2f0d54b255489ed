"""Read everything that the invariants are about, from the sources that really know it."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from hack.stack import NAMESPACE
from tests.e2e.api import ANYWHERE
from tests.e2e.cluster import UUID, Cluster
from tests.e2e.matrix import node
from tests.e2e.matrix.pods import HELD_GIB
from tests.e2e.matrix.seen import Preemption, Seen, SeenPod, Share, Tried
from vgpu.api.codec import assignment_from_json, inventory_from_json
from vgpu.api.contract import uuid_of
from vgpu.api.inventory import Inventory
from vgpu.api.names import DEFAULT
from vgpu.protocol.status import StatusDocument

WINDOW_S: Final = 2.0
"""In which GPU time is counted."""
ROOM_GIB: Final = 1
"""Beside the limit for contexts: what is tried as an allocation that is allowed is this much less than what is left."""


def look(cluster: Cluster, namespace: str, *, longest_rest_s: Mapping[str, float], since: str) -> Seen:
    """`since`: when the round began, as the API writes times; Events of earlier rounds are about pods that are gone.

    First GPU time, over a window in which nothing else is done to the containers; then everything else, at one moment."""
    with ThreadPoolExecutor() as pool:
        before, began_s = node.ran_us(), time.monotonic()
        time.sleep(WINDOW_S)  # what is counted is what happens in this time
        after, passed_s = node.ran_us(), time.monotonic() - began_s
        events = cluster.api.listed("event", namespace)
        listed = cluster.api.listed("node") + cluster.api.listed("pod", ANYWHERE)
        own, pods = node_of(listed), pods_of(listed)
        status, processes = node.status(), node.gpu_processes()
        token = cluster.metrics_token()
        tries = [
            pool.submit(try_out, cluster, pod) for pod in pods if pod.key.startswith(f"{namespace}/") and pod.ready
        ]
        inventory = inventory_of(own)
        assert inventory is not None, "the node has no inventory"
        return Seen(
            inventory=inventory, allocatable=allocatable(own), pods=pods, processes=processes,
            grants=node.grants(), status=status, kubelet=kubelet_devices(), drift_metric=drift(listed, token), tried=tuple(one.result() for one in tries),
            shares=shares(status, {pid: (us - before.get(pid, us)) / passed_s / 1e4 for pid, us in after.items()}),
            longest_rest_s=longest_rest_s, unenforced_metric=metric(listed, token),
            unenforced_events=frozenset(_about(e) for e in events if e.get("reason") == "LimitNotEnforced"),
            preemptions=preemptions(events, since), waiting=waiting(listed, namespace),
        )  # fmt: skip


def node_of(listed: list[dict[str, Any]]) -> dict[str, Any]:
    """The node among objects."""
    return next(thing for thing in listed if thing["kind"] == "Node")


def inventory_of(own: Mapping[str, Any]) -> Inventory | None:
    """As the node's annotation has it."""
    text = (own["metadata"].get("annotations") or {}).get(DEFAULT.inventory)
    return inventory_from_json(text) if text else None


def allocatable(own: Mapping[str, Any]) -> dict[str, int]:
    """Of Tangram's resources."""
    offered = own["status"].get("allocatable", {})
    return {resource: int(units) for resource, units in offered.items() if DEFAULT.ours(resource)}


def pods_of(listed: list[dict[str, Any]]) -> tuple[SeenPod, ...]:
    """Those that have an assignment."""
    found = []
    for thing in listed:
        text = (thing["metadata"].get("annotations") or {}).get(DEFAULT.assignment)
        if thing["kind"] == "Pod" and text:
            meta, status = thing["metadata"], thing["status"]
            ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))
            going = "deletionTimestamp" in meta
            found.append(
                SeenPod(meta["uid"], f"{meta['namespace']}/{meta['name']}", assignment_from_json(text), status.get("phase", ""), ready and not going)
            )  # fmt: skip
    return tuple(found)


def waiting(listed: list[dict[str, Any]], namespace: str) -> tuple[str, ...]:
    """Pods of the namespace that neither run nor have ended: together they fit the node."""
    pods = [thing for thing in listed if thing["kind"] == "Pod" and thing["metadata"]["namespace"] == namespace]
    return tuple(pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") == "Pending")


def try_out(cluster: Cluster, pod: SeenPod) -> Tried:
    """Which GPUs a process in the container sees; then allocate what its limit leaves, and more than it leaves."""
    assert pod.assignment is not None
    (assigned,) = pod.assignment.held()
    left_gib = assigned.mib // 1024 - HELD_GIB - 2 * ROOM_GIB
    namespace, name = pod.key.split("/")
    script = f"gpuview; echo; echo --; gpuview grab {left_gib}Gi; echo; echo --; gpuview grab {left_gib + 2 * ROOM_GIB + 1}Gi; true"
    sees, within, beyond = cluster.exec(namespace, name, "sh", "-c", script).split("\n--\n")
    return Tried(pod.key, frozenset(UUID.findall(sees)), within, beyond)


def shares(status: StatusDocument, percent: Mapping[int, float]) -> tuple[Share, ...]:
    """Of each container whose processes have a limit of GPU time and work."""
    found = []
    for container in status.containers:
        limit = sum(gpu.core_percent for gpu in container.gpus)
        had = [percent[process.pid] for process in container.processes if process.pid in percent]
        if limit and had:
            found.append(Share(container.pod, sum(had), limit))
    return tuple(found)


def kubelet_devices() -> dict[tuple[str, str, str], int]:
    """(pod UID, resource, GPU UUID) -> devices, by the kubelet's own checkpoint."""
    document = json.loads((node.DEVICE_PLUGINS / "kubelet_internal_checkpoint").read_text())
    counted: Counter[tuple[str, str, str]] = Counter()
    for entry in document["Data"]["PodDeviceEntries"] or ():
        for devices in entry["DeviceIDs"].values():
            for device in devices:
                counted[entry["PodUID"], entry["ResourceName"].partition("/")[2], uuid_of(device)] += 1
    return dict(counted)


def metric(listed: list[dict[str, Any]], token: str) -> frozenset[tuple[str, str]]:
    """(pod, reason) of `tangram_container_unenforced`."""
    found = labels_of(node.page(address_of(listed, "node"), 9403, "/metrics", token), "tangram_container_unenforced")
    return frozenset((f"{one['namespace']}/{one['pod']}", one["reason"]) for one in found)


def drift(listed: list[dict[str, Any]], token: str) -> frozenset[tuple[str, str]]:
    """(resource, GPU UUID) of `tangram_deviceplugin_drift_devices`."""
    found = labels_of(
        node.page(address_of(listed, "node"), 9402, "/metrics", token), "tangram_deviceplugin_drift_devices"
    )
    return frozenset((one["resource"].partition("/")[2], one["gpu_uuid"]) for one in found)


def labels_of(text: str, name: str) -> list[dict[str, str]]:
    """Of each sample of a metric that is not 0."""
    samples = (line.rpartition(" ") for line in text.splitlines() if line.startswith(f"{name}{{"))
    return [dict(re.findall(r'(\w+)="([^"]*)"', head)) for head, _, value in samples if float(value)]


def address_of(listed: list[dict[str, Any]], component: str) -> str:
    """IP of the pod of one of Tangram's parts."""
    for thing in listed:
        meta = thing["metadata"]
        labels = meta.get("labels") or {}
        named = labels.get("app.kubernetes.io/component") == component and meta.get("namespace") == NAMESPACE
        if named and "deletionTimestamp" not in meta:
            return str(thing["status"].get("podIP", ""))
    return ""


def _about(event: Mapping[str, Any]) -> str:
    thing = event.get("regarding") or {}
    return f"{thing.get('namespace')}/{thing.get('name')}"


def preemptions(events: list[dict[str, Any]], since: str) -> tuple[Preemption, ...]:
    """As kube-scheduler reports them."""
    found = []
    for event in events:
        preemptor = UUID.search(event.get("note", ""))
        if event.get("reason") == "Preempted" and preemptor and event["metadata"]["creationTimestamp"] >= since:
            found.append(Preemption(_about(event), preemptor[0]))
    return tuple(found)
