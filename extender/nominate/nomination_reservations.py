"""Nomination reservations: GPU capacity for pods that are nominated ahead of their scheduling cycle.

A nomination reservation ends when kube-scheduler tries its pod, which is then placed like every pod; when the pod is bound or gone; or
when it lapses. It yields: if a pod fits none of the given nodes, all nomination reservations there of pods with a lower priority are set
aside, and the latest of those with the same priority, whose pods come last. Those that still fit afterwards are made again.

`vgpu.scheduling.reservations` defines when one ends and to which pods it yields; this module reserves and releases its capacity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from extender.state import State
from vgpu.api.request import PodRequest
from vgpu.scheduling.placement import Placement
from vgpu.scheduling.reservations import Reservation


class NominationReservations:
    """By UID of the pod."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __len__(self) -> int:
        return len(self._state.reservations.of("nomination"))

    def __contains__(self, uid: str) -> bool:
        return self._state.reservations.get(uid, "nomination") is not None

    def put(self, uid: str, key: str, priority: int, request: PodRequest, placement: Placement) -> None:
        """Reserve from now on. Nothing for a placed pod, nor for a preemptor, which has a reservation already."""
        if self._state.reservations.get(uid, "preemption") or self._state.allocations.place_of(uid):
            return
        now_s, node, assignment = self._state.clock(), placement.node, placement.assignment
        reservation = self._state.reservations.put(
            "nomination", uid, key, node, now_s, priority=priority, request=request, assignment=assignment
        )
        self._allocate(reservation)

    def end(self, uid: str) -> bool:
        """End the reservation of this pod. Returns whether there was one."""
        return self._state.end_reservation(uid, "nomination") is not None

    def lapsed(self) -> list[str]:
        """UIDs whose reservation has lapsed. The caller ends them now."""
        return self._state.lapsed("nomination")

    @contextmanager
    def aside(self, priority: int, nodes: Sequence[str]) -> Iterator[bool]:
        """Reservations on these nodes that yield to a pod of this priority do not block it meanwhile. Returns whether there are any.

        Do not await inside.
        """
        some = self._on(nodes, self._state.reservations.yielding(priority))
        lifted = self._state.lift(one.uid for one in some)
        try:
            yield bool(some)
        finally:
            left = [one for one in some if one.uid in self]
            self._state.put_back({one.uid: lifted[one.uid] for one in left if one.uid in lifted})
            for node in self._overcommitted({one.node for one in left}):
                self._make_again([one for one in left if one.node == node])

    def yielding(self, priority: int) -> dict[str, set[str]]:
        """Node -> UIDs of the pods with a reservation there that yields to a pod of this priority."""
        found: dict[str, set[str]] = {}
        for uid in self._state.reservations.yielding(priority):
            allocation = self._state.allocations.get(uid)
            if allocation is not None and not allocation.own:
                found.setdefault(allocation.node, set()).add(uid)
        return found

    def _on(self, nodes: Sequence[str], uids: Sequence[str]) -> Sequence[Reservation]:
        """Nomination reservations of these pods on the given nodes, or on nodes that no longer exist."""
        if not uids:
            return ()
        fleet, planned = self._state.fleet, self._state.reservations.of("nomination")
        named = np.zeros(fleet.free_mib.shape[1], np.bool_)
        named[fleet.look_up(nodes).columns] = True
        at = ((planned[uid], fleet.column.get(planned[uid].node)) for uid in uids)
        return [one for one, column in at if column is None or named[column]]

    def _make_again(self, reservations: Sequence[Reservation]) -> None:
        """Of the reservations on one node, make those again that fit, in their order; end the others."""
        for one in reservations:
            self._state.release(one.uid)
        for one in reservations:
            self._allocate(one)
            if self._overcommitted([one.node]):
                self.end(one.uid)

    def _allocate(self, one: Reservation) -> None:
        if one.request is not None and one.assignment is not None:
            self._state.allocate(one.uid, one.key, one.request, Placement(one.node, one.assignment), own=False)

    def _overcommitted(self, nodes: Collection[str]) -> list[str]:
        """The nodes of these that have more assigned than they have, and those that no longer exist."""
        fleet = self._state.fleet
        found = [node for node in nodes if node not in fleet]
        there = [node for node in nodes if node in fleet]
        columns = [fleet.column[node] for node in there]
        least = np.minimum(fleet.free_mib[:, columns], fleet.free_percent[:, columns]).min(axis=0)
        for node, left in zip(there, least.tolist(), strict=True):
            shared = any(pods > 1 for pods in fleet.mig_containers[node].values())
            if left < 0 or shared or fleet.stock.overlaps(fleet.column[node]):
                found.append(node)
        return found
