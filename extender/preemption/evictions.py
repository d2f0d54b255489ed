"""Write evictions to the API: single pods through the eviction API, which enforces disruption budgets; Kueue's Workloads by deactivating them.

Decides nothing. Kueue suspends a Workload with `spec.active: false`, and its job: all its pods end, and it is not queued again until an operator
or user sets it to true. Each eviction is reported in two Events.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import structlog

from extender.preemption.history import PreemptionHistory
from extender.preemption.kueue_pods import KueuePods
from extender.preemption.victim_candidates import VictimCandidates, priority_of
from kube import paths
from kube.client import Client
from kube.errors import ApiError
from kube.events import ObjectReference, Recorder, about
from kube.objects import Pod
from kube.patch import merge
from vgpu.scheduling.victims.workloads import BoundWorkload

AGAIN: Final = "To queue it again, set its spec.active to true"

log = structlog.get_logger("extender.preemption.evictions")


class Evictions:
    """`kueue_pods`: None without Kueue."""

    def __init__(
        self,
        client: Client,
        candidates: VictimCandidates,
        history: PreemptionHistory,
        recorder: Recorder,
        kueue_pods: KueuePods | None,
    ) -> None:
        self._client, self._candidates, self._history, self._recorder = client, candidates, history, recorder
        self._workloads = kueue_pods.workloads if kueue_pods is not None else None
        self.evicted = 0
        """Pods evicted so far, those of Workloads included."""

    async def evict(self, pod: Pod, node: str, uid: str) -> bool:
        """Evict a single pod. Is this done, or to be retried? Raises ApiError if the API server refuses for good."""
        victim = self._candidates.pod(uid)
        if victim is None:
            return True
        meta = victim.metadata
        body = {
            "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": meta.name, "namespace": meta.namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }  # fmt: skip
        try:
            await self._client.send("POST", paths.pod(meta.namespace, meta.name, "eviction"), body)
        except ApiError as error:
            return _is_done_with(error, meta.key)
        self.evicted += 1
        self._history.preempted(victim)
        log.info("evicted a pod for another", pod=victim.key, node=node, preemptor=pod.key)
        self._report(
            pod,
            about(victim),
            f"Evicted for pod {pod.key} of priority {priority_of(pod)} (this one has {priority_of(victim)})",
            f"Evicted pod {victim.key} of priority {priority_of(victim)}",
            node,
        )
        return True

    async def deactivate(self, pod: Pod, node: str, workload: BoundWorkload) -> bool:
        """Deactivate a Workload with all its pods. Is this done, or to be retried? Raises ApiError if the API server refuses for good."""
        meta = self._workloads.find(workload.key) if self._workloads is not None else None
        if self._workloads is None or meta is None or meta.uid != workload.uid:
            return True  # another Workload has its name
        change = {"metadata": {"uid": workload.uid}, "spec": {"active": False}}
        try:
            await merge(self._client, self._workloads.path(meta), change)
        except ApiError as error:
            return _is_done_with(error, workload.key)
        self.evicted += len(workload.pods)
        for one in workload.pods:
            if (victim := self._candidates.pod(one.uid)) is not None:
                self._history.preempted(victim)
        highest = max(one.priority for one in workload.pods)
        log.info("deactivated a Workload for a pod", workload=workload.key, pods=len(workload.pods), preemptor=pod.key)
        self._report(
            pod,
            self._workloads.reference(meta),
            f"Deactivated for pod {pod.key} of priority {priority_of(pod)} (pods of this one have {highest} at most). {AGAIN}",
            f"Deactivated Workload {workload.key}, whose pods have priority {highest} at most",
            node,
        )
        return True

    def _report(self, pod: Pod, victim: ObjectReference, to_victim: str, to_pod: str, node: str) -> None:
        why = f"no single GPU of node {node} had enough free for it, though all together had"
        self._recorder.event(victim, "Preempted", f"{to_victim}: {why}", "Warning", action="Evicting")
        self._recorder.event(about(pod), "Preempting", f"{to_pod}: {why}", action="Evicting")


def _is_done_with(error: ApiError, key: str) -> bool:
    """After an eviction that failed. Raises it again when the API server refuses for good."""
    if error.not_found or error.conflict:
        return True
    if error.transient:
        budget = error.status == HTTPStatus.TOO_MANY_REQUESTS
        log.info("an eviction has to wait", victim=key, budget=budget, error=str(error))
        return False
    raise error
