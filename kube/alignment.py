"""What of a pod's spec the kubelet aligns to NUMA nodes: whole CPUs that a container gets for itself, and devices.

A container gets CPUs for itself if its pod is of the QoS class Guaranteed and it requests a whole number of them. A pod with resources for the pod as a
whole gets none: the kubelet's gate for that is off by default, and where it is on nothing is predicted (`vgpu.api.numa`).

Source: k8s.io/kubernetes v1.36.3, pkg/apis/core/v1/helper/qos and pkg/kubelet/cm (cpumanager/policy_static.go, devicemanager/topology_hints.go).
"""

from __future__ import annotations

from typing import Final

from kube.objects import Container, PodSpec
from kube.pod_requests import CPU, amounts_of
from vgpu.api.numa import ContainerNeeds

MEMORY: Final = "memory"
NO_DEVICES: Final = (CPU, MEMORY, "ephemeral-storage", "pods")
NO_DEVICE_PREFIXES: Final = ("hugepages-", "attachable-volumes-")
MILLI: Final = 1000


def container_needs(spec: PodSpec) -> tuple[ContainerNeeds, ...]:
    """Of every container, in the order in which the kubelet admits them."""
    exclusive = guaranteed(spec)
    return tuple(
        ContainerNeeds(one.name, _whole_cpus(one) if exclusive else 0, _devices(one), init=init)
        for one, init in (
            *((one, one.restart_policy != "Always") for one in spec.init_containers),
            *((one, False) for one in spec.containers),
        )
    )


def guaranteed(spec: PodSpec) -> bool:
    """Is a pod of this spec of the QoS class Guaranteed, by what its containers request?"""
    if spec.resources is not None and (spec.resources.limits or spec.resources.requests):
        return False
    every = (*spec.containers, *spec.init_containers)
    limits = [_compute(one, of_limits=True) for one in every]
    if any(not one[CPU] or not one[MEMORY] for one in limits):
        return False
    requests = [_compute(one, of_limits=False) for one in every]
    return all(sum(one[name] for one in limits) == sum(one[name] for one in requests) for name in (CPU, MEMORY))


def _compute(one: Container, *, of_limits: bool) -> dict[str, int]:
    """Thousandths of CPUs, and bytes. The API server requests what is only limited."""
    limits, requests = one.resources.limits or {}, one.resources.requests or {}
    found = amounts_of(limits if of_limits else {**limits, **requests})
    return {name: found.get(name, 0) for name in (CPU, MEMORY)}


def _whole_cpus(one: Container) -> int:
    milli = _compute(one, of_limits=False)[CPU]
    return milli // MILLI if milli % MILLI == 0 else 0


def _devices(one: Container) -> dict[str, int]:
    found = amounts_of(one.resources.limits)
    return {
        name: amount
        for name, amount in found.items()
        if name not in NO_DEVICES and not name.startswith(NO_DEVICE_PREFIXES)
    }
