"""Kueue's Workloads that might be evicted as a whole for a pod that waits (`vgpu.scheduling.victims.workloads` decides).

A Workload's pods are all pods of its namespace that are bound and that the extender knows to be its own, on whatever node, with or without a GPU. If it is
in doubt about the Workload of one pod there, no Workload of that namespace is evicted: the pod might be of the Workload, and of a higher priority.

A Workload may be deactivated in vain: its pods do not end, because Kueue does not run or does not know their job. Or the API server refuses that for good. Then
others are chosen for some time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from typing import Final

from extender.preemption.kueue_pods import KueuePods
from extender.preemption.victim_candidates import VictimCandidates, leaving, priority_of
from kube.cache import Cache
from kube.objects import Pod
from vgpu.api.request import PodRequest
from vgpu.scheduling.victims.bounds import EvictionRules, EvictionTerms
from vgpu.scheduling.victims.eligibility import AllocatedPod
from vgpu.scheduling.victims.eviction_cost import Cost
from vgpu.scheduling.victims.node_search import Eviction
from vgpu.scheduling.victims.victim_search import least_eviction
from vgpu.scheduling.victims.workloads import (
    Bound,
    BoundWorkload,
    WorkloadEviction,
    least_cost,
    least_workload_eviction,
)

AT_A_TIME: Final = 100
"""Pods that are checked in one step: 0.25 ms where all are of Workloads (measured)."""

VAIN_S: Final = 3600.0
"""For so long a Workload that was deactivated in vain, or could not be, is not chosen. Guessed: by then an operator may have started Kueue."""

Known = Generator[None, None, dict[str, BoundWorkload]]


class WorkloadCandidates:
    """`pods` are all there are; without `kueue_pods` no pod is of a Workload."""

    def __init__(
        self,
        candidates: VictimCandidates,
        kueue_pods: KueuePods | None,
        pods: Cache[Pod],
        clock: Callable[[], float],
    ) -> None:
        self._candidates, self._kueue_pods, self._pods, self._clock = candidates, kueue_pods, pods, clock
        self._vain: dict[str, float] = {}
        """UIDs of Workloads that were deactivated in vain -> when that was seen."""

    def on(self, node: str, applicant: Pod) -> set[str]:
        """Workloads with a pod that has an allocation on this node, without the applicant's own or those that may be its own."""
        view = self._candidates.view(node)
        pods = [self._candidates.pod(one.uid) for one in view.pods] if view is not None else []
        keys, own = {key for pod in pods if pod is not None and (key := self._of(pod))}, self._of(applicant)
        if own is None:
            return {key for key in keys if _namespace(key) != applicant.metadata.namespace}
        return keys - {own}

    def _of(self, pod: Pod) -> str | None:
        return self._kueue_pods.workload_of(pod) if self._kueue_pods is not None else ""

    def lapsed(self, deactivated: Iterable[BoundWorkload]) -> None:
        """They were deactivated for a pod that waits no longer for that. If one has a pod that is not about to end, its deactivation was in vain."""
        for one in deactivated:
            pods = map(self._candidates.pod, one.uids)
            if any(pod is not None and not leaving(pod) for pod in pods):
                self.pass_over(one)

    def pass_over(self, workload: BoundWorkload) -> None:
        """It cannot be evicted: do not choose it for some time. Another one of its name may be."""
        now_s = self._clock()
        self._vain = {other: at_s for other, at_s in self._vain.items() if now_s < at_s + VAIN_S} | {
            workload.uid: now_s
        }

    def _uid(self, key: str) -> str | None:
        """Of the Workload that has this name now; None where it is not known, or was deactivated in vain."""
        one = self._kueue_pods.workloads.find(key) if self._kueue_pods is not None else None
        if one is None or self._clock() < self._vain.get(one.uid, float("-inf")) + VAIN_S:
            return None
        return one.uid

    def known(self, keys: Set[str]) -> Known:
        """These Workloads, in steps, but for those in doubt or deactivated in vain. One without pods is not known."""
        uids = {key: uid for key in keys if (uid := self._uid(key)) is not None}
        namespaces, doubted = {_namespace(key) for key in uids}, set[str]()
        found: dict[str, list[AllocatedPod]] = {}
        for at, pod in enumerate(list(self._pods.items())):
            namespace = pod.metadata.namespace
            if namespace in namespaces and pod.spec.node_name and not leaving(pod):
                key = self._of(pod)
                if key is None:
                    doubted.add(namespace)
                elif key in uids:
                    found.setdefault(key, []).append(self._candidates.member(pod))
            if at % AT_A_TIME == 0:
                yield
        certain = {key: pods for key, pods in found.items() if _namespace(key) not in doubted}
        return {key: BoundWorkload(key, tuple(pods), uids[key]) for key, pods in certain.items()}


class WorkloadSearch:
    """For the least set of Workloads, and of single pods beside them, whose eviction lets a pod fit on one of the nodes.

    `terms`: what a node still requires once pods there are gone.
    """

    def __init__(
        self,
        workloads: WorkloadCandidates,
        candidates: VictimCandidates,
        pod: Pod,
        request: PodRequest,
        nodes: Sequence[str],
        terms: Callable[[str, frozenset[str]], EvictionTerms],
        only: Mapping[str, Set[str]] | None,
    ) -> None:
        self._workloads, self._candidates, self._pod, self._request, self._priority = (
            workloads,
            candidates,
            pod,
            request,
            priority_of(pod),
        )
        self._nodes, self._terms, self._only = nodes, terms, only
        self._headroom = candidates.headroom()
        self.best: WorkloadEviction | None = None
        """So far."""

    def steps(self, below: Cost | None) -> Iterator[None]:
        """Search for what costs less than `below`, and yield every few milliseconds."""
        on: dict[str, set[str]] = {}
        for node in self._nodes:
            if keys := self._workloads.on(node, self._pod):
                on[node] = keys
            yield
        known = yield from self._workloads.known(set[str]().union(*on.values()))
        for bound, node in (yield from self._in_order(on, known)):
            some = [known[key] for key in on[node] if key in known]
            limit = self.best.cost if self.best is not None else below
            if limit is not None and bound > limit[:5]:
                return
            for found in least_workload_eviction(
                node, some, self._suffices(node), self._priority, self._headroom, limit
            ):
                self.best = found or self.best
                yield

    def _in_order(
        self, on: Mapping[str, Set[str]], known: Mapping[str, BoundWorkload]
    ) -> Generator[None, None, Sequence[tuple[Bound, str]]]:
        """Nodes with Workloads that may go, and what these cost at least: those with the lowest cost first."""
        found = list[tuple[Bound, str]]()
        for node, keys in on.items():
            some = [known[key] for key in keys if key in known]
            if (bound := least_cost(node, some, self._priority, self._headroom)) is not None:
                found.append((bound, node))
            yield
        return sorted(found)

    def eviction(self, found: WorkloadEviction) -> Eviction:
        """The same with the Workloads' pods among the victims, as far as they have an allocation on the node."""
        gone = frozenset[str]().union(*(one.uids for one in found.workloads))
        view = self._candidates.view(found.singles.node)
        here = {one.uid for one in view.pods if one.uid in gone} if view is not None else set()
        victims = tuple(sorted({*found.singles.victims, *here}))
        return Eviction(found.singles.node, victims, 0, found.singles.assignment, found.cost)

    def _suffices(self, node: str) -> Callable[[frozenset[str]], tuple[Eviction, Sequence[AllocatedPod]] | None]:
        def suffices(gone: frozenset[str]) -> tuple[Eviction, Sequence[AllocatedPod]] | None:
            view = self._candidates.view(node)
            if view is None:
                return None
            here = frozenset(one.uid for one in view.pods if one.uid in gone)
            rules = EvictionRules(self._priority, self._headroom, violate=False, terms={node: self._terms(node, here)})
            found = least_eviction(self._request, [node], self._candidates.view, rules, self._only)
            return (found, [one for one in view.pods if one.uid in found.victims]) if found is not None else None

        return suffices


def _namespace(key: str) -> str:
    return key.partition("/")[0]
