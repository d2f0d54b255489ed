"""What happens to pods on this node, for their users and for operators: Events and metrics, and the removal of pods that have to go.

The parts that find it out report it here, as their observers. Which policy applies is in what they report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

from deviceplugin.admission import DevicesSwapped, StartRefused
from deviceplugin.allocation import DeviceRequest
from deviceplugin.gpus.cdi_check import CDI_IGNORED
from deviceplugin.gpus.host_pool import NO_HOST_POOL
from deviceplugin.grants.mount_check import REASON as MISPLACED
from deviceplugin.metrics import Metrics
from deviceplugin.pods.burst import IGNORED
from deviceplugin.pods.conditions import PodConditions
from deviceplugin.pods.eviction import Evictor
from deviceplugin.pods.limit_violations import (
    BYPASSED,
    EVICT,
    NOTICES,
    POOL_FULL,
    STRANDED,
    UNENFORCED,
    UNGRANTED,
    UNLISTED,
    LimitViolation,
    not_evicted_note,
)
from deviceplugin.pods.limit_violations import REASON as OVER_LIMIT
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.pod_tasks import Reason as RemovalReason
from deviceplugin.pods.removal import Remover
from deviceplugin.pods.service_class import REASON as CLASS_IGNORED
from deviceplugin.pods.status_watch import Trouble
from kube.client import Client
from kube.events import ObjectReference, Recorder, about
from kube.objects import Pod
from vgpu.health.notes import Note
from vgpu.mig.declared import State

GPU_UNFIT: Final = "GpuUnfit"
"""An Event's reason: a GPU of the pod is unhealthy, or no longer in the node."""
MIG_NOT_ON_DEMAND: Final = "MigNotOnDemand"
"""An Event's reason: instances that others made, a driver that contradicts the tables, or a model that is not in them."""
MIG_PROFILE_NOT_LISTED: Final = "MigProfileNotListed"
"""An Event's reason: kube-scheduler does not know that a MIG profile is Tangram's."""
MIG_CONFIG: Final[dict[State, str]] = {
    "success": "MigConfigApplied", "pending": "MigConfigPending", "failed": "MigConfigFailed",
}  # fmt: skip
"""Events' reasons: the state of the node's declared MIG layout."""
_DELETIONS: Final[dict[str, RemovalReason]] = {BYPASSED: "bypass"}
"""An Event's reason -> that of the deletion that follows; any other: over-limit."""


class Reports:
    """Of one node. `is_stranded` says whether the memory of a pod, by its UID, is stranded now; `is_unfit` whether it must leave its GPU."""

    def __init__(
        self,
        client: Client,
        node_name: str,
        pods: NodePods,
        recorder: Recorder,
        metrics: Metrics,
        conditions: PodConditions,
        is_stranded: Callable[[str], bool],
        is_unfit: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._node_name, self._pods, self._is_stranded, self._is_unfit = node_name, pods, is_stranded, is_unfit
        self._recorder, self._metrics, self._conditions = recorder, metrics, conditions
        self.remover = Remover(client, metrics.removed)
        self.evictor = Evictor(client, self, metrics.removed)

    async def close(self) -> None:
        """End the removals and evictions in progress."""
        await self.remover.close()
        await self.evictor.close()

    def served(self, call: str, resource: str, seconds: float) -> None:
        """A call of the kubelet was answered."""
        self._metrics.served(call, resource, seconds)

    def refused(self, call: str, request: DeviceRequest, error: Exception) -> None:
        """A call of the kubelet was refused: report it to the pod's user, and have a swapped pod replaced."""
        self._metrics.refused(call, request)
        pod = error.pod if isinstance(error, StartRefused) else None
        if pod is None and call == "Allocate" and (other_scheduler := self._pods.other_schedulers_pod(request)):
            pod = other_scheduler.pod
        if pod is None:
            return
        reason = "DevicesSwapped" if isinstance(error, DevicesSwapped) else f"{call}Refused"
        self._recorder.event(about(pod), reason, str(error), "Warning")
        if isinstance(error, DevicesSwapped):
            self._metrics.swaps.inc()
            self.remover.remove(pod, "swapped")

    def over_limit(self, pod: Pod, offence: LimitViolation) -> None:
        """A container uses more memory than it was granted, or its memory cannot come back: report that to the pod's user, and apply its policy."""
        self._recorder.event(
            about(pod, offence.container), offence.reason, offence.note, "Warning", series=offence.series
        )
        if offence.policy == EVICT and offence.reason == STRANDED:
            self.evictor.evict(pod, "stranded")
        elif offence.policy == EVICT:
            self.remover.remove(pod, _DELETIONS.get(offence.reason, "over-limit"))

    def still_wanted(self, pod: Pod) -> bool:
        """Whether memory of a pod that is to be evicted is still stranded, or its GPU still unfit."""
        return self._is_stranded(pod.uid) or self._is_unfit(pod.uid)

    def eviction_refused(self, pod: Pod, message: str, *, again: bool) -> None:
        """The API server refuses an eviction: report it to the pod's user."""
        series = "not evicted yet" if again else "not evicted"
        if self._is_unfit(pod.uid):
            later = (
                ". The eviction is tried again until it is allowed, or until the GPU is well"
                if again
                else ", and it is not tried again"
            )
            note = f"the pod is on an unhealthy GPU and is not evicted: {message.rstrip('.')}{later}"
            self._recorder.event(about(pod), GPU_UNFIT, note, "Warning", series=series)
            return
        self._recorder.event(about(pod), STRANDED, not_evicted_note(message, again=again), "Warning", series=series)

    def violated_now(self, found: Sequence[LimitViolation]) -> None:
        """All containers that are over their limit, or whose memory cannot come back."""
        self._metrics.over_limit.set(sum(one.reason == OVER_LIMIT for one in found))
        self._metrics.stranded.set(sum(one.reason == STRANDED for one in found))
        self._conditions.follow(found)

    def noticed(self, pod: Pod, container: str, reason: str) -> None:
        """Something is wrong with a container's GPU time: report it to the pod's user."""
        self._recorder.event(about(pod, container), reason, NOTICES[reason].format(container), "Warning")

    def pool_full(self, pod: Pod, container: str, note: str) -> None:
        """Requests of a container wait for room in the host pool: report it to the pod's user."""
        self._recorder.event(about(pod, container), POOL_FULL, note, "Warning")

    def unenforced(self, pod: Pod, container: str, note: str) -> None:
        """A limit of a container is not enforced: report it to the pod's user."""
        self._recorder.event(about(pod, container), UNENFORCED, note, "Warning")

    def ungranted(self, note: str) -> None:
        """Memory of a shared GPU belongs to no grant: report it to the operator, on the node."""
        self._report_on_node(UNGRANTED, note)

    def unlisted(self, note: str, pod: Pod | None = None, container: str = "") -> None:
        """Memory of a shared GPU is in use and NVML lists it for no process: report it to the operator, on the node, or to the user of the pod that may use it."""
        if pod is None:
            self._report_on_node(UNLISTED, note)
        else:
            self._recorder.event(about(pod, container), UNLISTED, note, "Warning")

    def cdi_on_node(self, reason: str, note: str, level: Literal["Normal", "Warning"]) -> None:
        """Whether containers get CDI devices depends on a setting of the runtime, or they get none: report it to the operator, on the node."""
        self._report_on_node(reason, note, level)

    def cdi_ignored(self, pod: Pod, container: str, note: str) -> None:
        """A container was started without its CDI devices: report it to the pod's user."""
        self._recorder.event(about(pod, container), CDI_IGNORED, note, "Warning")

    def host_pool_missing(self, note: str) -> None:
        """The node has no host pool, or not for each GPU: report it to the operator, on the node."""
        self._report_on_node(NO_HOST_POOL, note)

    def mig_not_on_demand(self, note: str) -> None:
        """A GPU in MIG mode makes no instances on demand: report it to the operator, on the node."""
        self._report_on_node(MIG_NOT_ON_DEMAND, note)

    def mig_config(self, state: State, note: str) -> None:
        """The node's declared MIG layout is in another state: report it to the operator, on the node."""
        self._report_on_node(MIG_CONFIG[state], note, "Warning" if state == "failed" else "Normal")

    def mig_profile_not_listed(self, profile: str) -> None:
        """The node has a MIG profile that it does not offer: report it to the operator, on the node."""
        note = f"MIG profile {profile} is not offered: it is neither in migProfiles nor in extraMigProfiles of the chart, so kube-scheduler would not leave its pods to Tangram"
        self._report_on_node(MIG_PROFILE_NOT_LISTED, note)

    def misplaced(self, pod: Pod, container: str, note: str) -> None:
        """A container does not find its grant: report it to the pod's user."""
        self._recorder.event(about(pod, container), MISPLACED, note, "Warning")

    def class_ignored(self, pod: Pod, note: str) -> None:
        """An annotation of a pod's class or level does not count: report it to the pod's user."""
        self._recorder.event(about(pod), CLASS_IGNORED, note, "Warning")

    def burst_reduced(self, pod: Pod, reason: str, note: str) -> None:
        """A burst does not apply as its pod requests it: report it to the pod's user."""
        self._metrics.bursts_reduced.labels("ignored" if reason == IGNORED else "limited").inc()
        self._recorder.event(about(pod), reason, note, "Warning")

    def arbiter_unreachable(self, trouble: Trouble) -> None:
        """The arbiter did not report which containers are over their limit."""
        self._metrics.arbiter_unreachable.labels(trouble).inc()

    def gpu_changed(self, note: Note) -> None:
        """A GPU came, went, or its health changed: report it to the operator, on the node."""
        self._report_on_node(note.reason, note.text, note.level)

    def gpu_unfit(self, pod: Pod, why: str) -> None:
        """A GPU of the pod is unhealthy or gone: report it to the pod's user."""
        self._recorder.event(about(pod), GPU_UNFIT, why, "Warning")

    def evict_unfit(self, pod: Pod, why: str) -> None:
        """The policy says that the pod leaves such a GPU."""
        if self.evictor.evict(pod, "unhealthy-gpu"):
            self._recorder.event(about(pod), GPU_UNFIT, f"the pod has to leave: {why}", "Warning")

    def _report_on_node(self, reason: str, note: str, level: Literal["Normal", "Warning"] = "Warning") -> None:
        name = self._node_name
        self._recorder.event(ObjectReference(kind="Node", name=name, uid=name), reason, note, level)
