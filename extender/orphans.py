"""Pods that the API no longer has and whose processes run on: their nodes tell of them, and they keep their room (invariant I1).

A pod has one claim, whoever tells of it. While the API has the pod, its own claim stands; from the moment that the API has lost it,
what the node's inventory says holds the same room, until the inventory no longer names it. A node that goes takes its orphans with
it; one whose inventory cannot be read keeps those that it named last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from extender.accounting import Accounting, Allocation
from vgpu.api.inventory import Orphan


class Orphans:
    """Iterates over the UIDs that hold something because a node says so."""

    def __init__(self, allocations: Accounting) -> None:
        self._allocations = allocations
        self._reported: dict[str, dict[str, Orphan]] = {}
        """Node -> UID -> orphan, as the inventory has them."""
        self._node_of: dict[str, str] = {}
        self._holding: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._holding)

    def __len__(self) -> int:
        return len(self._holding)

    def reported(self, node: str, orphans: Iterable[Orphan]) -> None:
        """The node's inventory names these, and no longer those that it named before."""
        now, before = {orphan.uid: orphan for orphan in orphans}, self._reported.pop(node, {})
        for uid in before.keys() - now.keys():
            if self._node_of.get(uid) == node:
                del self._node_of[uid]
                if uid in self._holding:
                    self._holding.discard(uid)
                    self._allocations.release(uid)
        if now:
            self._reported[node] = now
        for uid, orphan in now.items():
            if self._node_of.setdefault(uid, node) != node:
                continue  # another node has it: a pod is on one
            if self._allocations.get(uid) is None or (uid in self._holding and before.get(uid) != orphan):
                self._hold(node, orphan)

    def hold_again(self, uid: str) -> None:
        """The API has lost the pod: its own claim is released."""
        node = self._node_of.get(uid)
        self._holding.discard(uid)
        if node is not None:
            self._hold(node, self._reported[node][uid])

    def seen(self, uid: str) -> None:
        """The API has the pod: its own claim stands."""
        self._holding.discard(uid)

    def _hold(self, node: str, orphan: Orphan) -> None:
        self._allocations.hold(orphan.uid, Allocation(node, orphan.assignment, {}, orphan.key))
        self._holding.add(orphan.uid)
