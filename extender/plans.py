"""Room that is planned for pods that the scheduler has not come to yet. It is held like any other, and given up like no other.

A plan ends when the scheduler comes to its pod, which is then placed as every pod is; when the pod is bound or gone; or when time is up.
It is no promise: for a pod that finds no room on some nodes all plans there for pods of lower priority are put aside, and of those of the
same priority the last `EQUALS` made, whose pods come last; those are taken up again that still fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from extender.state import State
from vgpu.placement import Placement
from vgpu.request import PodAsk

PREFIX: Final = "plan:"
"""Of the UID under which a plan has its claim: no UID of the API has a colon."""

EQUALS: Final = 128
"""Each takes 10 us to put aside and take up again (measured), and in a full cluster that is done for every pod that finds no room."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a pod is to go."""

    key: str
    priority: int
    ask: PodAsk
    placement: Placement
    until_s: float


class Plans:
    """By UID of the pod."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._by_uid: dict[str, Plan] = {}

    def __len__(self) -> int:
        return len(self._by_uid)

    def __contains__(self, uid: str) -> bool:
        return uid in self._by_uid

    def put(self, uid: str, plan: Plan) -> None:
        """Hold the room from now on."""
        self._by_uid[uid] = plan
        self._hold(uid, plan)

    def drop(self, uid: str) -> bool:
        """Hold nothing for it any more. Answers whether something was."""
        if self._by_uid.pop(uid, None) is None:
            return False
        self._state.give_back(PREFIX + uid)
        return True

    def lapsed(self, now_s: float) -> list[str]:
        """UIDs whose time is up. They stay until they are dropped."""
        return [uid for uid, plan in self._by_uid.items() if plan.until_s <= now_s]

    @contextmanager
    def aside(self, priority: int, nodes: Sequence[str]) -> Iterator[bool]:
        """Plans on these nodes that yield to a pod of this priority are out of the way meanwhile. Answers whether there are any.

        Do not await inside.
        """
        some = self._on(nodes, self._yielding(priority))
        lifted = self._state.lift(PREFIX + uid for uid in some)
        try:
            yield bool(some)
        finally:
            self._state.put_back(lifted)
            for node in self._overbooked({self._by_uid[uid].placement.node for uid in some}):
                self._take_up_anew([uid for uid in some if self._by_uid[uid].placement.node == node])

    def making_way(self, priority: int) -> dict[str, set[str]]:
        """Node -> UIDs of the claims there of plans that yield to a pod of this priority."""
        found: dict[str, set[str]] = {}
        for uid in self._yielding(priority):
            found.setdefault(self._by_uid[uid].placement.node, set()).add(PREFIX + uid)
        return found

    def _yielding(self, priority: int) -> list[str]:
        equals = [uid for uid, plan in self._by_uid.items() if plan.priority == priority][-EQUALS:]
        return [*equals, *(uid for uid, plan in self._by_uid.items() if plan.priority < priority)]

    def _on(self, nodes: Sequence[str], uids: Sequence[str]) -> Sequence[str]:
        """Those of these plans on the nodes named, and those whose node is gone."""
        if not uids:
            return uids
        fleet = self._state.fleet
        named = np.zeros(fleet.free_mib.shape[1], np.bool_)
        named[fleet.look_up(nodes).columns] = True
        at = ((uid, fleet.column.get(self._by_uid[uid].placement.node)) for uid in uids)
        return [uid for uid, column in at if column is None or named[column]]

    def _take_up_anew(self, uids: Sequence[str]) -> None:
        """Of the plans on one node those that fit, the first first."""
        for uid in uids:
            self._state.give_back(PREFIX + uid)
        for uid in uids:
            plan = self._by_uid[uid]
            self._hold(uid, plan)
            if self._overbooked([plan.placement.node]):
                self.drop(uid)

    def _hold(self, uid: str, plan: Plan) -> None:
        self._state.keep(PREFIX + uid, plan.key, plan.ask, plan.placement)

    def _overbooked(self, nodes: Collection[str]) -> list[str]:
        """On which of them is more given away than there is? Also those that are gone."""
        fleet = self._state.fleet
        found = [node for node in nodes if node not in fleet]
        there = [node for node in nodes if node in fleet]
        columns = [fleet.column[node] for node in there]
        least = np.minimum(fleet.free_mib[:, columns], fleet.free_percent[:, columns]).min(axis=0)
        for node, left in zip(there, least.tolist(), strict=True):
            if left < 0 or any(tenants > 1 for tenants in fleet.mig_tenants[node].values()):
                found.append(node)
        return found
