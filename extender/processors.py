"""What the nodes' processors have left, for policies that look at it. kube-scheduler alone decides whether a pod's CPU fits.

Counts what every pod requests that is bound, or that a place is held for: also pods that want no GPU. Pods that this extender does not
place count once the watch tells of them.
"""

from __future__ import annotations

from kube.objects import NodeStatus, Pod
from kube.pod_requests import CPU, milli, requests_of
from vgpu.quantity import LARGEST_CPU_MILLI


def wanted_milli(pod: Pod) -> int:
    """Thousandths of a processor that the pod has, or requests; no more than are told apart."""
    return min(LARGEST_CPU_MILLI, requests_of(pod).get(CPU, 0))


def allocatable_milli(status: NodeStatus) -> int | None:
    """What a node has for pods; None when it does not say."""
    text = (status.allocatable or {}).get(CPU)
    return None if text is None else min(LARGEST_CPU_MILLI, milli(text))


class Processors:
    """By node: what there is, and what pods have of it."""

    def __init__(self) -> None:
        self._allocatable: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._holders: dict[str, tuple[str, int]] = {}
        """Pod UID -> node and thousandths."""

    def set_node(self, name: str, allocatable: int | None) -> None:
        """A node has so much; None: it is gone, or does not say."""
        if allocatable is None:
            self._allocatable.pop(name, None)
        else:
            self._allocatable[name] = allocatable

    def hold(self, uid: str, node: str, wanted: int) -> set[str]:
        """The pod has this, and no longer what it had. Answers the nodes on which something changed."""
        if self._holders.get(uid) == (node, wanted):
            return set()
        changed = self.release(uid)
        self._holders[uid] = node, wanted
        self._taken[node] = self._taken.get(node, 0) + wanted
        return changed | {node}

    def release(self, uid: str) -> set[str]:
        """The pod has nothing. Answers the node on which something changed."""
        held = self._holders.pop(uid, None)
        if held is None:
            return set()
        node, wanted = held
        self._taken[node] = self._taken.get(node, 0) - wanted
        if not self._taken[node]:
            del self._taken[node]
        return {node}

    def wanted(self, uid: str) -> int:
        """What a pod has."""
        return self._holders.get(uid, ("", 0))[1]

    def free_milli(self, name: str) -> int | None:
        """What is left, less than nothing included; None when nobody told what there is."""
        there = self._allocatable.get(name)
        return None if there is None else max(-LARGEST_CPU_MILLI, there - self._taken.get(name, 0))
