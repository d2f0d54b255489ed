"""Room that is planned for pods that the scheduler has not come to yet. It is held like any other, and given up like no other.

A plan ends when the scheduler comes to its pod, which is then placed as every pod is; when the pod is bound or gone; or when time is up.
It is no promise: for a pod that finds no room on some nodes all plans there for pods of lower priority are put aside, and of those of the
same priority the last made, whose pods come last; those are taken up again that still fit.

The reservations of kind `nomination` (`vgpu.scheduling.reservations`), and how they take and yield their room.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from extender.state import State
from vgpu.api.request import PodRequest
from vgpu.scheduling.placement import Placement
from vgpu.scheduling.reservations import Reservation


class Plans:
    """By UID of the pod."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __len__(self) -> int:
        return len(self._state.reservations.of("nomination"))

    def __contains__(self, uid: str) -> bool:
        return self._state.reservations.get(uid, "nomination") is not None

    def put(self, uid: str, key: str, priority: int, request: PodRequest, placement: Placement) -> None:
        """Hold the room from now on. Nothing for a pod that others are evicted for: its room is kept already."""
        if self._state.reservations.get(uid, "preemption") or self._state.allocations.place_of(uid):
            return
        now_s, node, assignment = self._state.clock(), placement.node, placement.assignment
        plan = self._state.reservations.put(
            "nomination", uid, key, node, now_s, priority=priority, request=request, assignment=assignment
        )
        self._hold(plan)

    def drop(self, uid: str) -> bool:
        """Hold nothing for it any more. Answers whether something was."""
        if self._state.reservations.drop(uid, "nomination") is None:
            return False
        if self._state.allocations.place_of(uid) is None:
            self._state.give_back(uid)
        return True

    def lapsed(self) -> list[str]:
        """UIDs whose time is up. They are to be dropped now."""
        return self._state.lapsed("nomination")

    @contextmanager
    def aside(self, priority: int, nodes: Sequence[str]) -> Iterator[bool]:
        """Plans on these nodes that yield to a pod of this priority are out of the way meanwhile. Answers whether there are any.

        Do not await inside.
        """
        some = self._on(nodes, self._state.reservations.yielding(priority))
        lifted = self._state.lift(one.uid for one in some)
        try:
            yield bool(some)
        finally:
            left = [one for one in some if one.uid in self]
            self._state.put_back({one.uid: lifted[one.uid] for one in left if one.uid in lifted})
            for node in self._overbooked({one.node for one in left}):
                self._take_up_anew([one for one in left if one.node == node])

    def making_way(self, priority: int) -> dict[str, set[str]]:
        """Node -> UIDs of the claims there of plans that yield to a pod of this priority."""
        found: dict[str, set[str]] = {}
        for uid in self._state.reservations.yielding(priority):
            allocation = self._state.allocations.get(uid)
            if allocation is not None and not allocation.own:
                found.setdefault(allocation.node, set()).add(uid)
        return found

    def _on(self, nodes: Sequence[str], uids: Sequence[str]) -> Sequence[Reservation]:
        """Those of these plans on the nodes named, and those whose node is gone."""
        if not uids:
            return ()
        fleet, planned = self._state.fleet, self._state.reservations.of("nomination")
        named = np.zeros(fleet.free_mib.shape[1], np.bool_)
        named[fleet.look_up(nodes).columns] = True
        at = ((planned[uid], fleet.column.get(planned[uid].node)) for uid in uids)
        return [one for one, column in at if column is None or named[column]]

    def _take_up_anew(self, plans: Sequence[Reservation]) -> None:
        """Of the plans on one node those that fit, the first first."""
        for plan in plans:
            self._state.give_back(plan.uid)
        for plan in plans:
            self._hold(plan)
            if self._overbooked([plan.node]):
                self.drop(plan.uid)

    def _hold(self, plan: Reservation) -> None:
        if plan.request is not None and plan.assignment is not None:
            self._state.keep(plan.uid, plan.key, plan.request, Placement(plan.node, plan.assignment), own=False)

    def _overbooked(self, nodes: Collection[str]) -> list[str]:
        """On which of them is more given away than there is? Also those that are gone."""
        fleet = self._state.fleet
        found = [node for node in nodes if node not in fleet]
        there = [node for node in nodes if node in fleet]
        columns = [fleet.column[node] for node in there]
        least = np.minimum(fleet.free_mib[:, columns], fleet.free_percent[:, columns]).min(axis=0)
        for node, left in zip(there, least.tolist(), strict=True):
            if left < 0 or any(pods > 1 for pods in fleet.mig_containers[node].values()):
                found.append(node)
        return found
