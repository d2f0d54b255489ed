"""Who holds what on a node, and who of them may be evicted: the state and the caches as `vgpu.preemption` reads them.

Reads and changes nothing. Who holds a GPU and is not known as a bound pod (a reservation, or room kept for another) is never evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from extender.starvation import Starvation, identity
from extender.state import State
from kube.objects import Budget, Pod
from kube.pod_requests import requests_of
from vgpu.grant import Slice
from vgpu.names import DEFAULT_CLASS
from vgpu.preemption import Holder


class Books:
    """`pod_of` finds a pod by `namespace/name`, `pods` and `budgets` are all there are."""

    def __init__(
        self,
        state: State,
        starvation: Starvation,
        pod_of: Callable[[str], Pod | None],
        pods: Callable[[], Iterable[Pod]],
        budgets: Callable[[], Iterable[Budget]],
    ) -> None:
        self._state, self._starvation = state, starvation
        self._pod_of, self._pods, self._budgets = pod_of, pods, budgets

    def pod(self, uid: str) -> Pod | None:
        """A pod that holds a GPU, None when there is none."""
        claim = self._state.claims.get(uid)
        pod = self._pod_of(claim.key) if claim is not None else None
        return pod if pod is not None and pod.uid == uid else None

    def others(self) -> Mapping[str, Pod]:
        """Every pod by UID. Walks through all: for pods that hold no GPU, and rarely."""
        return {pod.uid: pod for pod in self._pods()}

    def holders(self, node: str) -> list[Holder]:
        """All that holds something on a node."""
        return [
            Holder(uid, held, spared=True) if (pod := self._evictable(uid)) is None else self._holder(pod, held)
            for uid, held in self._state.claims.on(node).items()
        ]

    def any_below(self, node: str, priority: int) -> bool:
        """Is there anybody on the node that a pod of this priority may evict?"""
        uids = self._state.claims.on(node)
        return any((pod := self._evictable(uid)) is not None and priority_of(pod) < priority for uid in uids)

    def headroom(self) -> dict[str, int]:
        """Budget -> evictions that it allows now."""
        return {budget.key: budget.status.disruptions_allowed for budget in self._budgets()}

    def terminating(self, node: str) -> frozenset[str]:
        """UIDs of the node's holders that are leaving."""
        uids = self._state.claims.on(node)
        return frozenset(uid for uid in uids if (pod := self.pod(uid)) is not None and leaving(pod))

    def _evictable(self, uid: str) -> Pod | None:
        pod = self.pod(uid)
        return None if pod is None or uid in self._state.reservations or leaving(pod) else pod

    def _holder(self, pod: Pod, held: tuple[Slice, ...]) -> Holder:
        budgets = frozenset(budget.key for budget in self._budgets() if budget.counts(pod))
        klass = pod.metadata.annotation(self._state.names.klass) or DEFAULT_CLASS
        spared = self._starvation.spared(pod, self._alike)
        return Holder(pod.uid, held, priority_of(pod), klass, pod.status.start_time or "", budgets, spared)

    def _alike(self, one: str) -> int:
        return sum(identity(pod) == one for pod in self._pods())


def priority_of(pod: Pod) -> int:
    """Pods without a PriorityClass have 0."""
    return pod.spec.priority or 0


def leaving(pod: Pod) -> bool:
    """Is it deleted, and still there?"""
    return pod.metadata.deletion_timestamp is not None


def requests_elsewhere(pod: Pod, ours: Callable[[str], bool]) -> dict[str, int]:
    """What a pod on a node has of resources that are not Tangram's (`kube.pod_requests`)."""
    return {resource: amount for resource, amount in requests_of(pod).items() if not ours(resource)}
