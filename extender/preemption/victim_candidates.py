"""The pods of a node that might be evicted: the state and the caches as `vgpu.scheduling.victims.victim_search` reads them.

Changes nothing. An allocation that is not of a known bound pod (a reservation) is never evicted. A node's view is kept until an allocation, a
pod, the inventory or a disruption budget changes there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Final, TypeAlias

from extender.preemption.disruption_budgets import DisruptionBudgets
from extender.preemption.history import PreemptionHistory, identity
from extender.preemption.kueue_pods import KueuePods
from extender.state import State
from kube.cache import Cache
from kube.objects import Pod
from kube.pod_requests import requests_of, total_of
from vgpu.api.grant import AssignedGpu
from vgpu.api.names import DEFAULT_CLASS
from vgpu.scheduling.victims.eligibility import PODS, AllocatedPod, started_at
from vgpu.scheduling.victims.node import NodeView

MOST_KEPT: Final = 65_536
"""Pods in views that are kept, some 20 MiB. The views of further nodes are made at each search: 0.3 ms for 64 pods."""

AT_A_TIME: Final = 1_000
"""Pods visited in one step of a walk through all: 0.1 ms."""


_Version: TypeAlias = tuple[int, object]
"""Of the budgets of a namespace, and of Kueue's Workloads there."""


@dataclass(slots=True)
class _CachedView:
    view: NodeView
    version: int
    versions: tuple[tuple[str, _Version], ...]
    """Namespace of its pods -> version of what is known there."""
    changes: int
    """Of all budgets, when these versions were looked at last."""
    identities: frozenset[str]


class VictimCandidates:
    """`pods` are all pods of the cluster. Without `kueue_pods` every pod may be evicted by itself."""

    def __init__(
        self,
        state: State,
        history: PreemptionHistory,
        pods: Cache[Pod],
        budgets: DisruptionBudgets,
        kueue_pods: KueuePods | None = None,
    ) -> None:
        self._state, self._history = state, history
        self._pods, self._budgets, self._kueue_pods = pods, budgets, kueue_pods
        self._kept: dict[str, _CachedView] = {}
        self._allocated_pods = 0
        """In views that are kept."""
        self._replicas = Counter[str]()
        """Identity of pods that a controller gives a new name each time -> how many there are."""

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """A pod was added, changed or removed. To be called before any question about its node."""
        for pod, more in ((old, -1), (new, 1)):
            if pod is None:
                continue
            if pod.spec.node_name:
                self._forget(pod.spec.node_name)
            one = identity(pod)
            if one != pod.key:
                self._replicas[one] += more
                if not self._replicas[one]:
                    del self._replicas[one]

    def pod(self, uid: str) -> Pod | None:
        """A pod with a GPU, None if there is none of this UID."""
        allocation = self._state.allocations.get(uid)
        pod = self._pods.get(allocation.key) if allocation is not None else None
        return pod if pod is not None and pod.uid == uid else None

    def find(self, uids: Set[str]) -> Iterator[Pod | None]:
        """These pods, also ones without a GPU. Walks through all pods, and yields None now and then."""
        for at, pod in enumerate(list(self._pods.items())):
            if pod.uid in uids:
                yield pod
            elif at % AT_A_TIME == 0:
                yield None

    def view(self, node: str) -> NodeView | None:
        """All pods with an allocation on a node; None if the node takes no pods."""
        inventory = self._state.fleet.inventory.get(node)
        if inventory is None:
            self._forget(node)
            return None
        kept = self._kept.get(node)
        version, often = self._state.allocations.version(node), self._history.often_preempted
        if (
            kept is not None
            and kept.version == version
            and kept.view.inventory is inventory
            and self._is_known_so(kept)
            and kept.identities.isdisjoint(often)
        ):
            return kept.view
        self._forget(node)
        held = self._state.allocations.on(node)
        doubts = self._doubts
        pods = [self._evictable(uid) for uid in held]
        allocated = list(map(self._allocated_pod, held, held.values(), pods))
        view = NodeView(node, inventory, allocated, self._state.fleet.limits.overcommit)
        if self._allocated_pods + len(pods) <= MOST_KEPT:
            known = [pod for pod in pods if pod is not None]
            identities = frozenset(map(identity, known))
            if not identities.isdisjoint(often) or self._doubts != doubts:
                return view  # time alone may change which pods may be evicted there
            versions = tuple((one, self._version(one)) for one in {pod.metadata.namespace for pod in known})
            self._kept[node] = _CachedView(view, version, versions, self._budgets.changes, identities)
            self._allocated_pods += len(pods)
        return view

    def alone(self, pod: Pod | None) -> bool:
        """May it be evicted by itself, as far as Kueue is concerned? None: a pod that is not known."""
        return self._kueue_pods is None or (pod is not None and self._kueue_pods.alone(pod))

    def is_doubted(self, pod: Pod | None) -> bool:
        """May it be evicted by itself once more is known of Kueue's Workloads?"""
        return self._kueue_pods is not None and pod is not None and self._kueue_pods.is_doubted(pod)

    def touching(self, nodes: Iterable[str]) -> Iterator[None]:
        """Visit all pods with a GPU there, in steps, so that the controllers that are not known yet are read from then on."""
        for node in nodes:
            self.view(node)
            yield

    def headroom(self) -> dict[str, int]:
        """Budget -> evictions that it allows now."""
        return self._budgets.headroom()

    def violations(self, uids: Collection[str]) -> int:
        """How far evictions of these pods with a GPU go beyond what budgets allow."""
        return self._budgets.violations(pod for uid in uids if (pod := self.pod(uid)) is not None)

    def terminating(self, node: str) -> frozenset[str]:
        """UIDs of the node's pods that are terminating."""
        uids = self._state.allocations.on(node)
        return frozenset(uid for uid in uids if (pod := self.pod(uid)) is not None and leaving(pod))

    def frees(self, uids: Iterable[str]) -> dict[str, int]:
        """What the end of these pods frees of resources that are not Tangram's; nothing for a pod that is terminating already."""
        pods = [pod for uid in uids if (pod := self.pod(uid)) is not None and not leaving(pod)]
        freed = total_of(map(requests_of, pods))
        return {name: amount for name, amount in freed.items() if not self._state.names.ours(name)}

    def requests(self, uids: Iterable[str]) -> dict[str, int]:
        """What these pods request of their node, also while they terminate."""
        pods = [pod for uid in uids if (pod := self.pod(uid)) is not None]
        return total_of(map(requests_of, pods)) | {PODS: len(pods)}

    def _is_known_so(self, kept: _CachedView) -> bool:
        """Do its pods count in the same budgets and Workloads as then?"""
        if self._kueue_pods is None and kept.changes == self._budgets.changes:
            return True
        kept.changes = self._budgets.changes
        return all(self._version(namespace) == seen for namespace, seen in kept.versions)

    @property
    def _doubts(self) -> int:
        return self._kueue_pods.doubts if self._kueue_pods is not None else 0

    def _version(self, namespace: str) -> _Version:
        return self._budgets.version(namespace), self._kueue_pods and self._kueue_pods.version(namespace)

    def _forget(self, node: str) -> None:
        kept = self._kept.pop(node, None)
        self._allocated_pods -= len(kept.view.pods) if kept is not None else 0

    def _evictable(self, uid: str) -> Pod | None:
        pod = self.pod(uid)
        return None if pod is None or uid in self._state.reservations or leaving(pod) else pod

    def member(self, pod: Pod) -> AllocatedPod:
        """A bound pod of a Workload, with or without a GPU: what its end costs, as one of all of the Workload's."""
        service_class = pod.metadata.annotation(self._state.names.service_class) or DEFAULT_CLASS
        return AllocatedPod(
            pod.uid, (), priority_of(pod), service_class, started_at(pod.status.start_time or ""), self._budgets.of(pod),
            self._history.protected(pod, self._replicas.__getitem__),
        )  # fmt: skip

    def _allocated_pod(self, uid: str, held: tuple[AssignedGpu, ...], pod: Pod | None) -> AllocatedPod:
        if pod is None:
            return AllocatedPod(uid, held, protected=True)
        service_class = pod.metadata.annotation(self._state.names.service_class) or DEFAULT_CLASS
        return AllocatedPod(
            uid, held, priority_of(pod), service_class, started_at(pod.status.start_time or ""), self._budgets.of(pod),
            self._history.protected(pod, self._replicas.__getitem__) or not self.alone(pod), requests_of(pod),
        )  # fmt: skip


def priority_of(pod: Pod) -> int:
    """Pods without a PriorityClass have 0."""
    return pod.spec.priority or 0


def leaving(pod: Pod) -> bool:
    """Is it deleted, and still there?"""
    return pod.metadata.deletion_timestamp is not None
