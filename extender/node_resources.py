"""What nodes have left beside GPUs: CPU for the policies that use it, and every resource for preemption. kube-scheduler alone decides whether a pod fits.

Counts the requests of every pod that is bound or has a reservation, also of pods without a GPU. Pods that this extender does not place count
once the watch shows them. A resource that a node does not name is unlimited here: kube-scheduler may know it from elsewhere (resources that
another extender manages, or DRA).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kube.objects import NodeStatus
from kube.pod_requests import CPU, amounts_of
from vgpu.api.quantity import LARGEST_CPU_MILLI
from vgpu.scheduling.victims.eligibility import PODS

NOTHING: Final[Mapping[str, int]] = {}


def cpu_milli_of(requests: Mapping[str, int]) -> int:
    """CPU in thousandths, `LARGEST_CPU_MILLI` at most."""
    return min(LARGEST_CPU_MILLI, requests.get(CPU, 0))


def allocatable_of(status: NodeStatus) -> dict[str, int]:
    """What a node has for pods, in units of `kube.pod_requests`; empty if it reports nothing."""
    return amounts_of(status.allocatable)


class NodeResources:
    """By node: what is allocatable, and what pods request of it."""

    def __init__(self) -> None:
        self._allocatable: dict[str, Mapping[str, int]] = {}
        self._taken: dict[str, dict[str, int]] = {}
        self._allocated_pods: dict[str, tuple[str, Mapping[str, int]]] = {}
        """Pod UID -> node and requests."""

    def set_node(self, name: str, allocatable: Mapping[str, int]) -> None:
        """A node reports this much; empty: it is gone, or reports nothing."""
        if allocatable:
            self._allocatable[name] = allocatable
        else:
            self._allocatable.pop(name, None)

    def allocate(self, uid: str, node: str, requests: Mapping[str, int]) -> set[str]:
        """The pod requests this, in place of what it requested before. Do not change `requests`. Returns the nodes that changed."""
        if self._allocated_pods.get(uid) == (node, requests):
            return set()
        changed = self.release(uid)
        self._allocated_pods[uid] = node, requests
        taken = self._taken.setdefault(node, {PODS: 0})
        taken[PODS] += 1
        for resource, amount in requests.items():
            if amount:
                taken[resource] = taken.get(resource, 0) + amount
        return changed | {node}

    def release(self, uid: str) -> set[str]:
        """The pod requests nothing any more. Returns the node that changed."""
        allocated = self._allocated_pods.pop(uid, None)
        if allocated is None:
            return set()
        node, requests = allocated
        taken = self._taken[node]
        taken[PODS] -= 1
        if not taken[PODS]:
            del self._taken[node]
            return {node}
        for resource, amount in requests.items():
            if amount:
                taken[resource] -= amount
                if not taken[resource]:
                    del taken[resource]
        return {node}

    def of(self, uid: str) -> Mapping[str, int]:
        """What a pod requests."""
        return self._allocated_pods.get(uid, ("", NOTHING))[1]

    def free_cpu_milli(self, name: str) -> int | None:
        """Free CPU in thousandths, negative if overcommitted; None if the node reports none."""
        there = self._allocatable.get(name, NOTHING).get(CPU)
        if there is None:
            return None
        taken = self._taken.get(name, NOTHING).get(CPU, 0)
        return max(-LARGEST_CPU_MILLI, min(LARGEST_CPU_MILLI, there) - taken)

    def lacking(
        self, name: str, requests: Mapping[str, int], before: Sequence[Mapping[str, int]] = ()
    ) -> dict[str, int]:
        """By resource, how much the node lacks for one more pod with these requests. `before`: requests of pods that come first."""
        there, taken = self._allocatable.get(name), self._taken.get(name, NOTHING)
        if there is None:
            return {}
        short = {}
        for resource, amount in (*requests.items(), (PODS, 1)):
            if amount > 0 and (has := there.get(resource)) is not None:
                lack = amount - has + taken.get(resource, 0)
                lack += len(before) if resource == PODS else sum(one.get(resource, 0) for one in before)
                if lack > 0:
                    short[resource] = lack
        return short
