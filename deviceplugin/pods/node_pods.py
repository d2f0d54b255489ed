"""The pods of this node, as the ledger and PreStart need them: requests, assignments, which ones wait.

Reads the watch of kube/. Decides nothing but what is readable: a pod whose assignment cannot be read, or contradicts what the pod
requests, is no container, and the reason is kept for the pod's user.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from deviceplugin.allocation import DeviceRequest, NodePod, contradiction
from deviceplugin.grants.earlier_mounts import containers_with_earlier_preload
from deviceplugin.pods.service_class import EVERY, service_class_of
from kube import paths
from kube.client import Client
from kube.errors import ApiError
from kube.objects import Pod
from vgpu.api.burst import Burst, BurstBound, bursts_of
from vgpu.api.codec import assignment_from_json
from vgpu.api.errors import BadDocument, BadRequest
from vgpu.api.names import DEFAULT_POLICY, Names
from vgpu.api.request import PodRequest, pod_request


@dataclass(frozen=True, slots=True)
class UnreadablePod:
    """A pod that requests our resources and cannot be served."""

    pod: Pod
    wants: tuple[DeviceRequest, ...]
    why: str


def requests_of(pod: Pod, names: Names, unit_mib: int) -> PodRequest:
    """What a pod requests. Its placement policy is the extender's business, class and level those of `found`: any will do here.

    Raises BadRequest.
    """
    policy = pod.metadata.annotation(names.placement) or DEFAULT_POLICY
    plain, skipped = pod.plain(), (names.service_class, names.level)
    annotations = pod.metadata.annotations or {}
    plain["metadata"]["annotations"] = {key: text for key, text in annotations.items() if key not in skipped}
    return pod_request(plain, names=names, unit_mib=unit_mib, policies=(policy,))


def read(
    pod: Pod,
    order: tuple[int, str],
    names: Names,
    unit_mib: int,
    urgent: Collection[str] = (EVERY,),
    burst_max: Mapping[str, str] | None = None,
) -> NodePod | UnreadablePod | None:
    """The pod as a container, or why it is none; None when it requests nothing of ours or is finished.

    `urgent`: namespaces that may have latency-critical work. `burst_max`: the largest burst limit of each (`BurstBound.of`); None = there are
    no bursts on this node.
    """
    if pod.finished:
        return None
    try:
        request = requests_of(pod, names, unit_mib)
    except BadRequest as error:
        return UnreadablePod(pod, _raw_requests(pod, names), f"pod {pod.key}: {error}")
    requests = request.containers
    if not requests:
        return None
    wants = tuple(DeviceRequest(r, n) for request in requests for r, n in request.resources(names).items())
    text = pod.metadata.annotation(names.assignment)
    if text is None:
        scheduler = pod.spec.scheduler_name or "no scheduler"
        why = f"pod {pod.key} requests GPUs and has no assignment: it was placed by {scheduler}, not by Tangram's scheduler"
        return UnreadablePod(pod, wants, why)
    try:
        assignment = assignment_from_json(text)
    except BadDocument as error:
        return UnreadablePod(pod, wants, f"pod {pod.key}: annotation {names.assignment}: {error}")
    wrong = contradiction(requests, assignment)
    if wrong:
        return UnreadablePod(pod, wants, f"pod {pod.key}: annotation {names.assignment}: {wrong}")
    meta = pod.metadata
    waiting, leaving = pod.status.start_time is None, meta.deletion_timestamp is not None
    found = service_class_of(meta.annotations or {}, assignment, meta.namespace, names, urgent)
    assignment = replace(assignment, service_class=found.service_class, level=found.level)
    bursts, burst_ignored = _bursts(pod, request, names, unit_mib, burst_max)
    return NodePod(
        meta.uid, meta.namespace, meta.name, order, requests, assignment, waiting, leaving, request.over_limit_action, found.ignored,
        containers_with_earlier_preload(pod), pod.status.start_time or "", bursts, burst_ignored,
    )  # fmt: skip


def _bursts(
    pod: Pod, request: PodRequest, names: Names, unit_mib: int, burst_max: Mapping[str, str] | None
) -> tuple[Mapping[str, Burst], str]:
    """What the annotations request above the guarantees, and why they do not count."""
    if burst_max is None:
        return {}, ""
    annotations, bound = pod.metadata.annotations or {}, BurstBound.of(pod.metadata.namespace, burst_max)
    try:
        return bursts_of(annotations, request, names=names, unit_mib=unit_mib, bound=bound), ""
    except BadRequest as error:
        return {}, f"{error}; the pod runs at its guarantee"


def _raw_requests(pod: Pod, names: Names) -> tuple[DeviceRequest, ...]:
    limits = [c.resources.limits or {} for c in (*pod.spec.init_containers, *pod.spec.containers)]
    return tuple(
        DeviceRequest(r, int(n)) for part in limits for r, n in part.items() if names.ours(r) and str(n).isdigit()
    )


class NodePods:
    """All pods of this node that request our resources. Fed by a watch through `on_change`."""

    def __init__(
        self,
        names: Names,
        unit_mib: int,
        urgent: Collection[str] = (EVERY,),
        burst_max: Mapping[str, str] | None = None,
    ) -> None:
        self._names, self._unit_mib, self._urgent, self._burst_max = names, unit_mib, urgent, burst_max
        self._known: dict[str, NodePod | UnreadablePod] = {}
        self._pods: dict[str, Pod] = {}
        self._orders: dict[str, tuple[int, str]] = {}
        self._node_pods: tuple[NodePod, ...] | None = None
        self._counter = 0
        self._changed: Callable[[], Awaitable[None]] | None = None
        self._synced: Callable[[], bool] = lambda: True

    def attach(self, changed: Callable[[], Awaitable[None]], synced: Callable[[], bool]) -> None:
        """The watch that feeds this: how to wait for its next change, and whether it has listed everything once."""
        self._changed, self._synced = changed, synced

    @property
    def synced(self) -> bool:
        """Is every pod of the node known?"""
        return self._synced()

    def on_change(self, old: Pod | None, new: Pod | None) -> None:
        """A pod of this node was added, changed or removed."""
        self._node_pods = None
        if old is not None and (new is None or new.uid != old.uid):
            for record in (self._known, self._pods, self._orders):
                record.pop(old.uid, None)
        if new is None:
            return
        order = self._orders.setdefault(new.uid, self._order(new))
        known = self.read(new, order)
        self._pods[new.uid] = new
        if known is None:
            self._known.pop(new.uid, None)
        else:
            self._known[new.uid] = known

    def read(self, pod: Pod, order: tuple[int, str] = (0, "")) -> NodePod | UnreadablePod | None:
        """As the module's `read`, for this node."""
        return read(pod, order, self._names, self._unit_mib, self._urgent, self._burst_max)

    def node_pods(self) -> Sequence[NodePod]:
        """Every pod of this node with a readable assignment that is not finished."""
        if self._node_pods is None:
            self._node_pods = tuple(known for known in self._known.values() if isinstance(known, NodePod))
        return self._node_pods

    def unreadable(self) -> Sequence[UnreadablePod]:
        """Every unfinished pod of this node that requests our resources and cannot be served."""
        return [known for known in self._known.values() if isinstance(known, UnreadablePod)]

    def other_scheduler(self, request: DeviceRequest) -> str | None:
        """Why the pod that the request may be for cannot be served, when one is known."""
        found = self.other_schedulers_pod(request)
        return found.why if found else None

    def other_schedulers_pod(self, request: DeviceRequest) -> UnreadablePod | None:
        """The first waiting pod with such a request that cannot be served."""
        fits = (u for u in self.unreadable() if u.pod.status.start_time is None and request in u.wants)
        return min(fits, key=lambda u: self._orders[u.pod.uid], default=None)

    def pod(self, uid: str) -> Pod | None:
        """The pod with this UID."""
        return self._pods.get(uid)

    def node_pod(self, uid: str) -> NodePod | None:
        """The pod with this UID as a container; None when it is none."""
        known = self._known.get(uid)
        return known if isinstance(known, NodePod) else None

    def find(self, namespace: str, name: str) -> Pod | None:
        """The pod under this name that is not finished, the newest when several are known."""
        named = (p for p in self._pods.values() if p.metadata.name == name and p.metadata.namespace == namespace)
        found = [p for p in named if not p.finished]
        return max(found, key=lambda p: p.metadata.creation_timestamp or "", default=None)

    def pods(self) -> Mapping[str, Pod]:
        """UID -> every pod of this node."""
        return self._pods

    async def changed(self) -> None:
        """Return after the next change of any pod."""
        if self._changed is not None:
            await self._changed()

    def _order(self, pod: Pod) -> tuple[int, str]:
        """Pods that a watch brings come in the kubelet's own order; those that a first list brings, by age."""
        if not self.synced:
            return (0, pod.metadata.creation_timestamp or "")
        self._counter += 1
        return (1, f"{self._counter:016d}")


def initialized(pod: Pod) -> bool:
    """Have all init containers that run to completion succeeded, by the pod's conditions?"""
    return any(c.type == "Initialized" and c.status == "True" for c in pod.status.conditions)


async def fetch_pod(client: Client, namespace: str, name: str) -> Pod | None:
    """The pod, from the API server; None when it has none of that name. Raises ApiError when it does not answer."""
    try:
        return msgspec.json.decode(await client.get(paths.pod(namespace, name)), type=Pod)
    except ApiError as error:
        if error.not_found:
            return None
        raise
    except msgspec.MsgspecError as error:
        raise ApiError(0, "Undecodable", str(error), verb="GET", path=paths.pod(namespace, name)) from None
