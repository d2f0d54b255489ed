"""Pods and nodes as the watch tells of them, turned into claims. The one writer: all that changes what is free passes here.

Every pod that is bound, has an assignment and has not ended counts, also while it terminates: its containers may still hold memory.
An assignment that cannot be read takes its node out until the pod is gone; it frees nothing. An inventory that changes under
running pods keeps their claims.

Runs in one event loop and never awaits, so that each change is whole before the next call reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import structlog

from extender.accounting import Accounting, Allocation, sizes_of
from extender.node_constraints import taints_of
from extender.node_resources import NodeResources, allocatable_of
from extender.orphans import Orphans
from extender.reasons import NEWER_INVENTORY, OTHER_UNIT, UNKNOWN_NODE, UNREADABLE_ASSIGNMENT, UNREADABLE_INVENTORY
from extender.request_cache import RequestCache
from extender.snapshot import moment
from extender.spread_index import SpreadIndex
from kube.objects import Node, Pod
from kube.pod_requests import requests_of
from vgpu.api.codec import assignment_from_json, inventory_from_json
from vgpu.api.errors import BadDocument, BadRequest, NewerVersion
from vgpu.api.grant import Assignment
from vgpu.api.inventory import Inventory
from vgpu.api.names import Names
from vgpu.api.request import PodRequest
from vgpu.scheduling.fleet import UNKNOWN_CPU, Fleet
from vgpu.scheduling.nodes.constraints import ANYWHERE
from vgpu.scheduling.placement import NO_INVENTORY, NoRoom, Placement, place
from vgpu.scheduling.preferences import Preferences
from vgpu.scheduling.reservations import STAGES, Event, Kind, Reservations, Shown
from vgpu.scheduling.snapshot import Records

UNFINISHED: Final = "status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of the pods that may hold something. A pod that ends leaves the watch as if deleted."""

SAMPLE: Final = 8
"""Of the pods that had started before they were first seen, each how many-th is learnt from. Guessed: 50,000 take half a second."""

log = structlog.get_logger("extender.state")


class State:
    """What is free, and for whom the rest is held. `clock` is monotonic, in seconds; `shown` says what the watch of pods has shown."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        names: Names,
        unit_mib: int = 1024,
        reservation_life_s: float = STAGES["reserved"].life_s,
        hold_s: float = STAGES["kept"].life_s,
        shown: Callable[[], Shown] = Shown,
    ) -> None:
        self.names, self.unit_mib = names, unit_mib
        self.allocations = Accounting()
        in_gang_s = max(STAGES["in gang"].life_s, reservation_life_s)
        self.reservations = Reservations({"reserved": reservation_life_s, "in gang": in_gang_s, "kept": hold_s})
        self.expired = self.repaired = 0
        """Reservations that nobody bound; nodes whose records had to be mended."""
        self.unassigned: set[str] = set()
        """UIDs of bound pods that request ours and came past us: the device plugin refuses them."""
        self.clock, self._shown = clock, shown
        self.on_lapse: Callable[[str], object] = str
        """Told of the node of each reservation that lapses."""
        self._nodes: dict[str, Inventory | None] = {}
        """Every node of the cluster, and its GPUs as last understood."""
        self._excluded: dict[str, str] = {}
        """Node -> what is wrong with its inventory."""
        self._blocked: dict[str, set[str]] = {}
        """Node -> UIDs of its pods whose assignment cannot be read."""
        self.orphans = Orphans(self.allocations)
        self._resources = NodeResources()
        self.spread_index = SpreadIndex(self.allocations)
        self._seen_started = 0
        self._requests = RequestCache(names, unit_mib)

    @property
    def fleet(self) -> Fleet:
        """What is free on the nodes that can take pods."""
        return self.allocations.fleet

    @property
    def excluded_nodes(self) -> set[str]:
        """Nodes that take no pods until something is mended."""
        return set(self._excluded) | set(self._blocked)

    # --- what the watch tells ---

    def node_changed(self, old: Node | None, new: Node | None) -> None:
        """A node came, changed or went. Only its inventory, resources, labels and taints matter."""
        if new is None:
            if old is not None:
                self._forget_node(old.metadata.name)
            return
        name, text = new.metadata.name, new.metadata.annotation(self.names.inventory)
        self._resources.set_node(name, allocatable_of(new.status))
        self._report_cpu({name})
        self.fleet.say(name, new.metadata.labels, taints_of(new.spec))
        if old is not None and name in self._nodes and old.metadata.annotation(self.names.inventory) == text:
            return
        inventory = self._inventory(name, text)
        self._nodes[name] = inventory
        if inventory is not None or text is None:  # one that cannot be read frees nothing
            self.orphans.reported(name, inventory.orphans if inventory is not None else ())
        self._offer(name)

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """A pod came, changed or went."""
        if new is None or new.finished:
            for pod in (old, new):
                if pod is not None:
                    self._forget_pod(pod.uid)
            return
        if old is None or old.uid != new.uid:
            self._learn(new)
        self.spread_index.see(new)
        if new.spec.node_name:
            self._end_set_aside(new.uid)
            self._report_cpu(self._resources.hold(new.uid, new.spec.node_name, requests_of(new)))
            self._bound(new)

    def _learn(self, pod: Pod) -> None:
        """Let policies know what pods request. Of those that ran before we looked, some are enough: reading an ask takes 0.1 ms."""
        if pod.status.start_time:
            self._seen_started += 1
            if self._seen_started % SAMPLE != 1:
                return
        try:
            request = self.request_of(pod)
        except BadRequest:  # the user is told when the pod is filtered
            return
        if request:
            self.fleet.saw(request, pod.spec.constraints or ANYWHERE)

    def _report_cpu(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            if node in self.fleet:
                free = self._resources.free_cpu_milli(node)
                self.fleet.set_cpu(node, int(UNKNOWN_CPU) if free is None else free)

    def _bound(self, pod: Pod) -> None:
        text, node = pod.metadata.annotation(self.names.assignment), pod.spec.node_name
        if text is None:
            self._unassigned(pod)
            return
        try:
            assignment = assignment_from_json(text)
        except BadDocument as error:
            log.error("an assignment cannot be read; its node takes no pods", pod=pod.key, node=node, error=str(error))
            self._blocked.setdefault(node, set()).add(pod.uid)
            self.reservations.drop_all(pod.uid)  # the claim, if there was one, stands
            self._offer(node)
            return
        self.reservations.drop_all(pod.uid)
        self.orphans.seen(pod.uid)
        self.allocations.hold(pod.uid, self._allocation(pod, assignment))
        self._unblock(pod.uid)

    def _allocation(self, pod: Pod, assignment: Assignment) -> Allocation:
        sizes = {} if pod.status.start_time else sizes_of(self._request_or_nothing(pod), assignment, self.names)
        return Allocation(pod.spec.node_name, assignment, sizes, pod.key)

    def _unassigned(self, pod: Pod) -> None:
        if self._request_or_nothing(pod) and pod.uid not in self.unassigned:
            log.warning("a pod was bound past Tangram", pod=pod.key, node=pod.spec.node_name)
            self.unassigned.add(pod.uid)
        if self.reservations.drop(pod.uid):
            self.allocations.release(pod.uid)

    def _forget_pod(self, uid: str) -> None:
        self._report_cpu(self._resources.release(uid))
        self.reservations.drop_all(uid)
        self.allocations.release(uid)
        self.spread_index.forget(uid)
        self.orphans.hold_again(uid)
        self.unassigned.discard(uid)
        self._unblock(uid)

    def _unblock(self, uid: str) -> None:
        for node in [node for node, uids in self._blocked.items() if uid in uids]:
            self._blocked[node].discard(uid)
            if not self._blocked[node]:
                del self._blocked[node]
            self._offer(node)

    def _forget_node(self, name: str) -> None:
        self._nodes.pop(name, None)
        self._excluded.pop(name, None)
        self.orphans.reported(name, ())
        self._resources.set_node(name, {})
        self.fleet.say(name, None)
        self.allocations.set_node(name, None)

    def _inventory(self, name: str, text: str | None) -> Inventory | None:
        self._excluded.pop(name, None)
        if text is None:
            return None
        try:
            inventory = inventory_from_json(text)
        except BadDocument as error:
            self._excluded[name] = NEWER_INVENTORY if isinstance(error, NewerVersion) else UNREADABLE_INVENTORY
            log.error("an inventory cannot be read; the node takes no pods", node=name, error=str(error))
            return None
        if inventory.unit_mib != self.unit_mib:
            self._excluded[name] = OTHER_UNIT
            log.error(OTHER_UNIT, node=name, node_unit_mib=inventory.unit_mib, cluster_unit_mib=self.unit_mib)
            return None
        return inventory

    def _offer(self, name: str) -> None:
        self.allocations.set_node(name, None if name in self._blocked else self._nodes.get(name))
        self._report_cpu({name})

    # --- what filter and bind need ---

    def request_of(self, pod: Pod) -> PodRequest:
        """What the pod requests. Raises BadAsk."""
        return self._requests.of(pod)

    def _request_or_nothing(self, pod: Pod) -> PodRequest:
        try:
            return self.request_of(pod)
        except BadRequest as error:
            log.warning("a bound pod's ask cannot be read", pod=pod.key, error=str(error))
            return PodRequest(())

    def place(
        self, request: PodRequest, candidates: Iterable[str], preferences: Preferences | None = None
    ) -> Placement | NoRoom:
        """The best of the candidates, or why each cannot take the pod."""
        answer = place(self.fleet, request, candidates, self.allocations.only(request, self.names), preferences)
        if isinstance(answer, NoRoom):
            for node in answer.nodes.pop(NO_INVENTORY, ()):
                answer.nodes.setdefault(self._reason(node), []).append(node)
        return answer

    def _reason(self, node: str) -> str:
        """Why a node without an inventory that counts takes no pods."""
        if node in self._blocked:
            return UNREADABLE_ASSIGNMENT
        return self._excluded.get(node, NO_INVENTORY if node in self._nodes else UNKNOWN_NODE)

    def unplaced(self, known: Pod | None, uid: str) -> Pod | None:
        """What is known under a pod's name, if it is the pod with this UID and has no place yet."""
        if known is None or known.uid != uid or known.spec.node_name or self.allocations.place_of(uid) is not None:
            return None
        return known

    def lacking(self, node: str, request: PodRequest, before: Sequence[Mapping[str, int]] = ()) -> dict[str, int]:
        """By resource that is not a GPU, what the node has too little for the pod; nothing of what the node does not name. `before`: what pods request
        that come before it."""
        return self._resources.lacking(node, request.requests, before)

    def reserve(self, uid: str, key: str, request: PodRequest, placement: Placement) -> None:
        """Hold a place for a pod until it is bound, or time is up."""
        self.reservations.put("scheduling", uid, key, placement.node, self.clock())
        self.keep(uid, key, request, placement)

    def keep(self, uid: str, key: str, request: PodRequest, placement: Placement, *, own: bool = True) -> None:
        """Hold a place until it is given back; not the pod's own where it is only set aside for it."""
        sizes = sizes_of(request, placement.assignment, self.names)
        self.allocations.hold(uid, Allocation(placement.node, placement.assignment, sizes, key, own))
        self._report_cpu(self._resources.hold(uid, placement.node, request.requests))

    def give_back(self, uid: str) -> None:
        """The reverse of `keep`."""
        self.allocations.release(uid)
        self._report_cpu(self._resources.release(uid))

    def _end_set_aside(self, uid: str) -> None:
        """The pod is bound: what was set aside for it ends before its own place counts."""
        for kind in ("preemption", "nomination"):
            self.reservations.drop(uid, kind)
        allocation = self.allocations.get(uid)
        if allocation is not None and not allocation.own:
            self.give_back(uid)

    def lift(self, uids: Iterable[str]) -> Mapping[str, tuple[Allocation, Mapping[str, int]]]:
        """Give much of what is set aside back for a moment: `put_back` takes what is answered."""
        lifted = {
            uid: (allocation, self._resources.held(uid))
            for uid in uids
            if (allocation := self.allocations.get(uid)) is not None and not allocation.own
        }
        for uid in lifted:
            self.allocations.release(uid)
        self._report_cpu(set().union(*map(self._resources.release, lifted)))
        return lifted

    def put_back(self, lifted: Mapping[str, tuple[Allocation, Mapping[str, int]]]) -> None:
        """The reverse of `lift`."""
        for uid, (allocation, _) in lifted.items():
            self.allocations.hold(uid, allocation)
        self._report_cpu(set().union(*(self._resources.hold(uid, one.node, had) for uid, (one, had) in lifted.items())))

    def assume(self, pod: Pod) -> None:
        """The API says that this pod is bound; the watch will say so too, or has already. Until then the place is held.

        Not as the watch's own word: should it have told of the pod's deletion meanwhile, nobody would ever end the claim.
        """
        if pod.finished:
            self.cancel(pod.uid)
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
        self.allocations.hold(uid, self._allocation(pod, assignment))
        self.on("bind", uid)
        self.on("accepted", uid)

    def on(self, event: Event, uid: str) -> None:
        """Something happened to a pod's Binding: its reservation goes on to its next stage."""
        self.reservations.on(event, uid, self.clock())

    def cancel(self, uid: str) -> None:
        """Give a reserved place back. A claim that the watch has confirmed stands."""
        if self.reservations.drop(uid):
            self.give_back(uid)
            self.orphans.hold_again(uid)  # it was bound, and deleted by force, before the watch showed it

    def expire(self) -> None:
        """Give back what was reserved and never bound."""
        for uid in self.lapsed("scheduling"):
            self.expired += 1
            self.cancel(uid)

    def lapsed(self, kind: Kind) -> list[str]:
        """UIDs whose reservation of a kind is over. They are to be dropped now: who waits for room is told."""
        uids = self.reservations.lapsed(kind, self.clock(), self._shown())
        for one in map(self.reservations.of(kind).__getitem__, uids):
            self.on_lapse(one.node)
        return uids

    # --- housekeeping ---

    def mend(self, node: str) -> bool:
        """Compare a node's records with a count from scratch and mend them. Answers whether they were right."""
        if node not in self.fleet:
            return True
        at = self.fleet.column[node]
        before = [array[:, at].copy() for array in self.fleet.snapshot().values()]
        instances = dict(self.fleet.mig_containers[node])
        self.allocations.set_node(node, self.fleet.inventory[node])
        after = [array[:, at] for array in self.fleet.snapshot().values()]
        right = all(np.array_equal(b, a) for b, a in zip(before, after, strict=True))
        if right and instances == self.fleet.mig_containers[node]:
            return True
        self.repaired += 1
        log.error("a node's records were wrong and are mended", node=node)
        return False

    def snapshot(self) -> Records:
        """This moment, however late its records are read."""
        excluded = self._excluded | dict.fromkeys(self._blocked, UNREADABLE_ASSIGNMENT)
        stages = {one.uid: one.stage for one in reversed(list(self.reservations))}  # the first of a pod's has the room
        return moment(
            self.names.domain,
            self.unit_mib,
            dict(self._nodes),
            excluded,
            self.allocations,
            stages,
            frozenset(self.orphans),
        )
