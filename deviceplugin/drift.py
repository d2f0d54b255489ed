"""Invariant I3: per GPU, the kubelet's records agree with the assignments of the pods. Pure.

A difference is no one's loss by itself (the environment or the CDI device decides what a container sees), but the kubelet may then
refuse a pod that the extender placed rightly, so it is measured and reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from deviceplugin.allocation import NodePod, assigned_devices
from deviceplugin.pod_resources import ContainerDevices
from vgpu.api.contract import uuid_of
from vgpu.api.errors import BadDocument
from vgpu.api.names import Names

Drift = dict[tuple[str, str], int]
"""(resource, GPU UUID) -> device IDs that the kubelet counts there beyond what is assigned; negative when fewer."""


def drift(holdings: Iterable[ContainerDevices], node_pods: Iterable[NodePod], names: Names) -> Drift:
    """Where the records differ. Zeros are left out.

    Pods that we do not know are left out, and pods that the kubelet may not know yet or any longer. One that it has started and does
    not list counts: it lost its checkpoint. Init containers that run to completion are left out on both sides: the kubelet
    does not list their devices.
    """
    listed = list(holdings)
    known = {(t.namespace, t.name): t for t in node_pods}
    difference: Counter[tuple[str, str]] = Counter()
    for held in listed:
        node_pod = known.get((held.namespace, held.pod))
        request = next((a for a in node_pod.requests if a.container == held.container), None) if node_pod else None
        if node_pod is None or request is None:
            continue
        difference.update((held.resource, _gpu(one)) for one in held.ids)
        for uuid, count in assigned_devices(node_pod, request, held.resource, names).items():
            difference[held.resource, uuid] -= count
    there = {(held.namespace, held.pod) for held in listed}
    for node_pod in known.values():
        if not (node_pod.waiting or node_pod.leaving or (node_pod.namespace, node_pod.name) in there):
            difference.subtract(_all_of(node_pod, names))
    return {key: count for key, count in difference.items() if count}


def _all_of(node_pod: NodePod, names: Names) -> Counter[tuple[str, str]]:
    """What its containers that keep running were assigned."""
    found: Counter[tuple[str, str]] = Counter()
    for request in node_pod.requests:
        for resource in () if request.init else request.resources(names):
            for uuid, count in assigned_devices(node_pod, request, resource, names).items():
                found[resource, uuid] += count
    return found


def _gpu(device_id: str) -> str:
    try:
        return uuid_of(device_id)
    except BadDocument:
        return device_id
