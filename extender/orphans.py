"""Orphans: pods that the API has lost and whose processes still run. They stay allocated (invariant I1).

A node reports its orphans in its inventory. A pod has one allocation, whatever its source. While the API has the pod, the allocation comes
from its assignment; once the API has lost it, from the inventory, until that no longer names it. If a node goes, its orphans end with it. If
an inventory cannot be read, the orphans that it named last stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from extender.accounting import Accounting, Allocation
from vgpu.api.inventory import Orphan


class OrphanAllocations:
    """Iterates over the UIDs that are allocated because a node reports them."""

    def __init__(self, allocations: Accounting) -> None:
        self._allocations = allocations
        self._reported: dict[str, dict[str, Orphan]] = {}
        """Node -> UID -> orphan, as the inventory has them."""
        self._node_of: dict[str, str] = {}
        self._allocated: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._allocated)

    def __contains__(self, uid: object) -> bool:
        return uid in self._allocated

    def __len__(self) -> int:
        return len(self._allocated)

    def reported(self, node: str, orphans: Iterable[Orphan]) -> None:
        """The node's inventory names these, and no longer those that it named before."""
        now, before = {orphan.uid: orphan for orphan in orphans}, self._reported.pop(node, {})
        for uid in before.keys() - now.keys():
            if self._node_of.get(uid) == node:
                del self._node_of[uid]
                if uid in self._allocated:
                    self._allocated.discard(uid)
                    self._allocations.release(uid)
        if now:
            self._reported[node] = now
        for uid, orphan in now.items():
            if self._node_of.setdefault(uid, node) != node:
                continue  # another node has it: a pod is on one
            if self._allocations.get(uid) is None or (uid in self._allocated and before.get(uid) != orphan):
                self._allocate(node, orphan)

    def allocate_again(self, uid: str) -> None:
        """The API has lost the pod, and its own allocation is released."""
        node = self._node_of.get(uid)
        self._allocated.discard(uid)
        if node is not None:
            self._allocate(node, self._reported[node][uid])

    def seen(self, uid: str) -> None:
        """The API has the pod: its own allocation stands."""
        self._allocated.discard(uid)

    def _allocate(self, node: str, orphan: Orphan) -> None:
        self._allocations.allocate(orphan.uid, Allocation(node, orphan.assignment, {}, orphan.key))
        self._allocated.add(orphan.uid)
