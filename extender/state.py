"""What is free on each GPU, and for which pods the rest is allocated or reserved.

Every change of free capacity passes through here. `watch_intake` applies what the API reports, filter and bind reserve, and `snapshot` copies
one moment. `State.end_reservation` ends a reservation. It is called when the reservation is

    bound or gone     by `WatchIntake.pod_changed`, when the watch shows it
    refused           by bind, when no write can still happen, and by filter before a pod is placed again
    lapsed            by `State.expire` and the callers of `State.lapsed`: the table `vgpu.scheduling.reservations.STAGES` says when

Runs in one event loop and never awaits, so each change is complete before the next call reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Final

import structlog

from extender.accounting import Accounting, Allocation, sizes_of
from extender.inventories import Inventories
from extender.node_resources import NodeResources
from extender.numa import NumaNodes
from extender.orphans import OrphanAllocations
from extender.request_cache import RequestCache
from extender.spread_index import SpreadIndex
from kube.objects import Pod
from vgpu.api.burst import Burst, bursts_of
from vgpu.api.codec import assignment_from_json
from vgpu.api.errors import BadDocument, BadRequest
from vgpu.api.grant import Assignment
from vgpu.api.names import Names
from vgpu.api.request import PodRequest
from vgpu.scheduling.bursts import place_with_room, with_limits_guaranteed
from vgpu.scheduling.fleet import UNKNOWN_CPU, Fleet
from vgpu.scheduling.placement import NO_INVENTORY, NoFit, Placement
from vgpu.scheduling.preferences import Preferences
from vgpu.scheduling.reservations import STAGES, Event, Kind, Reservation, Reservations, Stage, WatchProgress

UNFINISHED: Final = "status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of the pods that may use a GPU. A pod that finishes leaves the watch as if it were deleted."""

NO_BURSTS: Final[Mapping[str, Burst]] = {}

log = structlog.get_logger("extender.state")


class State:
    """`clock` is monotonic, in seconds; `shown`: what the watch of pods has shown; the lives are those of reservations, in seconds."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        names: Names,
        unit_mib: int = 1024,
        reservation_life_s: float = STAGES["reserved"].life_s,
        preemption_life_s: float = STAGES["kept"].life_s,
        shown: Callable[[], WatchProgress] = WatchProgress,
        bursts: bool = False,
        overcommit: float | None = None,
    ) -> None:
        """`bursts`: pods may use more than their guarantees on this cluster. `overcommit`: what limits may then add up to, times a GPU's memory."""
        self.names, self.unit_mib, self._bursts = names, unit_mib, bursts
        self.allocations = Accounting(overcommit if bursts else None)
        self.inventories = Inventories(self.allocations, unit_mib)
        self.orphans = OrphanAllocations(self.allocations)
        self.numa = NumaNodes(self.allocations, self.orphans, names, clock)
        self.resources = NodeResources()
        self.spread_index = SpreadIndex(self.allocations)
        in_gang_s = max(STAGES["in gang"].life_s, reservation_life_s)
        lives_s: dict[Stage, float] = {"reserved": reservation_life_s, "in gang": in_gang_s, "kept": preemption_life_s}
        self.reservations = Reservations(lives_s)
        self.expired = 0
        """Scheduling reservations that lapsed before the pod was bound."""
        self.unassigned: set[str] = set()
        """UIDs of bound pods that request GPUs and have no assignment: the device plugin refuses them."""
        self.on_lapse: Callable[[str], object] = str
        """Called with the node of each reservation that lapses."""
        self.clock, self._shown = clock, shown
        self._requests = RequestCache(names, unit_mib)

    @property
    def fleet(self) -> Fleet:
        """What is free on the nodes that can take pods."""
        return self.allocations.fleet

    # --- what the watch intake applies ---

    def forget_node(self, name: str) -> None:
        """A node is gone."""
        self.orphans.reported(name, ())
        self.resources.set_node(name, {})
        self.numa.set_node(name, None)
        self.fleet.set_labels(name, None)
        self.inventories.forget(name)

    def offer(self, name: str) -> None:
        """The node's inventory changed, or whether its pods' assignments can be read."""
        self.inventories.offer(name)
        self.report_cpu({name})

    def unblock(self, uid: str) -> None:
        """This pod's assignment keeps no node out any more."""
        for node in self.inventories.unblock(uid):
            self.offer(node)

    def forget_pod(self, uid: str) -> None:
        """A pod is gone, or has finished. Its reservations and its allocation end."""
        self.report_cpu(self.resources.release(uid))
        self.reservations.end_all(uid)
        self.allocations.release(uid)
        self.spread_index.forget(uid)
        self.numa.forget_pod(uid)
        self.orphans.allocate_again(uid)
        self.unassigned.discard(uid)
        self.unblock(uid)

    def end_set_aside(self, uid: str) -> None:
        """The pod is bound: its preemption and nomination reservations end before its own allocation counts."""
        self.end_reservation(uid, "preemption")
        self.end_reservation(uid, "nomination")

    def bound_unassigned(self, pod: Pod) -> None:
        """The pod is bound without an assignment: another scheduler bound it, or it requests no GPU."""
        if self._request_or_nothing(pod) and pod.uid not in self.unassigned:
            log.warning(
                "a pod with a GPU request was bound without an assignment", pod=pod.key, node=pod.spec.node_name
            )
            self.unassigned.add(pod.uid)
        if self.reservations.end(pod.uid):
            self.allocations.release(pod.uid)

    def allocation_of(self, pod: Pod, assignment: Assignment) -> Allocation:
        """What a bound pod has by its assignment."""
        node, before = pod.spec.node_name, self.allocations.get(pod.uid)
        aligned = before.aligned if before is not None and before.node == node else None
        if pod.status.start_time:
            return Allocation(node, assignment, {}, pod.key, aligned=aligned)
        request = self._request_or_nothing(pod)
        if aligned is None:
            aligned = self.numa.alignment(node, pod.uid, request)
        return Allocation(node, assignment, sizes_of(request, assignment, self.names), pod.key, aligned=aligned)

    def report_cpu(self, nodes: Iterable[str]) -> None:
        """Report the free CPU of these nodes to the fleet."""
        for node in nodes:
            if node in self.fleet:
                free = self.resources.free_cpu_milli(node)
                self.fleet.set_cpu(node, int(UNKNOWN_CPU) if free is None else free)

    # --- availability: what filter and bind need ---

    def request_of(self, pod: Pod) -> PodRequest:
        """What the pod requests. Raises BadRequest."""
        return self._requests.of(pod)

    def request_to_set_aside(self, pod: Pod) -> PodRequest:
        """As `request_of`, for capacity that is set aside, or freed by evictions, before the pod is placed. Where limits have a bound together, the pod's
        own counts as its guarantee: else pods would be evicted for one that then does not fit. Raises BadRequest."""
        request = self.request_of(pod)
        return (
            request
            if self.fleet.limits.overcommit is None
            else with_limits_guaranteed(request, self.bursts_of(pod, request))
        )

    def _request_or_nothing(self, pod: Pod) -> PodRequest:
        try:
            return self.request_of(pod)
        except BadRequest as error:
            log.warning("a bound pod's request cannot be read", pod=pod.key, error=str(error))
            return PodRequest(())

    def bursts_of(self, pod: Pod, request: PodRequest) -> Mapping[str, Burst]:
        """Container -> its limits above its guarantee. Annotations that cannot be read have none: the node reports them."""
        annotations = pod.metadata.annotations or {}
        if not self._bursts or not any(map(self.names.burst_annotation, annotations)):
            return {}
        try:
            return bursts_of(annotations, request, names=self.names, unit_mib=self.unit_mib)
        except BadRequest:
            return {}

    def place(
        self,
        request: PodRequest,
        candidates: Sequence[str],
        preferences: Preferences | None = None,
        bursts: Mapping[str, Burst] = NO_BURSTS,
    ) -> Placement | NoFit:
        """The best of the candidates, or why each cannot take the pod."""

        def placing(only: Mapping[str, Set[str]]) -> Placement | NoFit:
            return place_with_room(self.fleet, request, bursts, candidates, only, preferences)

        only = self.only(request)
        answer = self.numa.place(request, only, placing) if self.numa else placing(only)
        if isinstance(answer, NoFit):
            without: dict[str, list[str]] = {}
            for node in answer.nodes.pop(NO_INVENTORY, ()):
                without.setdefault(self.inventories.reason(node), []).append(node)
            for reason, nodes in without.items():
                answer.nodes[reason] = [*answer.nodes.get(reason, ()), *nodes]
        return answer

    def only(self, request: PodRequest) -> Mapping[str, Set[str]]:
        """Node -> the UUIDs that the pod may be placed on there, because a pod of the same size is starting (`Accounting.only`)."""
        return self.allocations.only(request, self.names, self._waits_for_its_gang)

    def _waits_for_its_gang(self, uid: str) -> bool:
        """Is the pod not to be bound before all of its gang are placed? They are placed on other GPUs of the node, too."""
        reservation = self.reservations.get(uid)
        return reservation is not None and reservation.stage == "in gang"

    def not_offered(self, uid: str) -> str:
        """Why a GPU that is reserved for a pod is offered no more; empty where all are, or that is not known. The kubelet would fail a pod that is bound to one."""
        allocation = self.allocations.place_of(uid)
        inventory = self.fleet.inventory.get(allocation.node) if allocation is not None else None
        if allocation is None or inventory is None:
            return ""
        for part in allocation.assignment.held():
            gpu = inventory.gpu(part.uuid)
            if gpu is None:
                return f"{part.uuid} is no longer in the node"
            if not gpu.offered:
                why = "; ".join(map(str, gpu.withdrawn)) or gpu.state
                return f"GPU {gpu.index} ({gpu.uuid}) is not offered any more: {why}"
        return ""

    def unplaced(self, known: Pod | None, uid: str) -> Pod | None:
        """The pod that is known under this name, if it has this UID and is not placed yet."""
        if known is None or known.uid != uid or known.spec.node_name or self.allocations.place_of(uid) is not None:
            return None
        return known

    def lacking(self, node: str, request: PodRequest, before: Sequence[Mapping[str, int]] = ()) -> dict[str, int]:
        """By resource that is not a GPU, how much the node lacks for the pod; nothing of what the node does not name. `before`: requests of pods that
        come first."""
        return self.resources.lacking(node, request.requests, before)

    def reserve(self, uid: str, key: str, request: PodRequest, placement: Placement) -> None:
        """Make a scheduling reservation: until the pod is bound, or it lapses."""
        self.reservations.put("scheduling", uid, key, placement.node, self.clock())
        self.allocate(uid, key, request, placement)

    def allocate(self, uid: str, key: str, request: PodRequest, placement: Placement, *, own: bool = True) -> None:
        """Count a placement until `release`; `own` is false while it is set aside for a pod that may be placed elsewhere."""
        sizes = sizes_of(request, placement.assignment, self.names)
        aligned = self.numa.alignment(placement.node, uid, request) if own else None
        self.allocations.allocate(uid, Allocation(placement.node, placement.assignment, sizes, key, own, aligned))
        self.report_cpu(self.resources.allocate(uid, placement.node, request.requests))

    def release(self, uid: str) -> None:
        """The reverse of `allocate`."""
        self.allocations.release(uid)
        self.report_cpu(self.resources.release(uid))

    def lift(self, uids: Iterable[str]) -> Mapping[str, tuple[Allocation, Mapping[str, int]]]:
        """Release many set-aside allocations for a moment: pass the result to `put_back`."""
        lifted = {
            uid: (allocation, self.resources.of(uid))
            for uid in uids
            if (allocation := self.allocations.get(uid)) is not None and not allocation.own
        }
        for uid in lifted:
            self.allocations.release(uid)
        self.report_cpu(set().union(*map(self.resources.release, lifted)))
        return lifted

    def put_back(self, lifted: Mapping[str, tuple[Allocation, Mapping[str, int]]]) -> None:
        """The reverse of `lift`."""
        for uid, (allocation, _) in lifted.items():
            self.allocations.allocate(uid, allocation)
        self.report_cpu(
            set().union(*(self.resources.allocate(uid, one.node, had) for uid, (one, had) in lifted.items()))
        )

    def assume(self, pod: Pod) -> None:
        """The API server has bound this pod. Reserve until the watch shows it, too.

        It is not recorded as seen bound: if the watch has already shown the pod's deletion, no event would ever end the allocation.
        """
        if pod.finished:
            self.end_reservation(pod.uid)
            return
        uid = pod.uid
        if self.allocations.place_of(uid) is not None and self.reservations.get(uid) is None:
            return
        text = pod.metadata.annotation(self.names.assignment)
        try:
            assignment = assignment_from_json(text) if text is not None else None
        except BadDocument as error:
            log.error("an assignment cannot be read", pod=pod.key, node=pod.spec.node_name, error=str(error))
            return
        if assignment is None:
            return
        self.reservations.put("scheduling", uid, pod.key, pod.spec.node_name, self.clock())
        self.allocations.allocate(uid, self.allocation_of(pod, assignment))
        self.on("bind", uid)
        self.on("accepted", uid)

    def on(self, event: Event, uid: str) -> None:
        """Something happened to a pod's Binding: its reservation enters its next stage."""
        self.reservations.on(event, uid, self.clock())

    def end_reservation(self, uid: str, kind: Kind = "scheduling") -> Reservation | None:
        """End a reservation and release its capacity. Returns it, None if there was none. What the pod has by another reservation, or because the watch has
        shown it bound, stays allocated."""
        ended = self.reservations.end(uid, kind)
        if ended is None:
            return None
        if kind == "scheduling":
            self.release(uid)
            self.orphans.allocate_again(uid)  # it was bound, and deleted by force, before the watch showed it
        elif self.allocations.place_of(uid) is None:
            self.release(uid)
        return ended

    def expire(self) -> None:
        """End the scheduling reservations that have lapsed."""
        for uid in self.lapsed("scheduling"):
            self.expired += 1
            self.end_reservation(uid)

    def lapsed(self, kind: Kind) -> list[str]:
        """UIDs whose reservation of a kind has lapsed. The caller ends them now: pods that wait for capacity are tried again."""
        uids = self.reservations.lapsed(kind, self.clock(), self._shown())
        for one in map(self.reservations.of(kind).__getitem__, uids):
            self.on_lapse(one.node)
        return uids
