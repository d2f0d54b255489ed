"""Orphans: pods that the API has lost and whose processes still run. They stay allocated (invariant I1).

A node reports its orphans in its inventory. While the API has the pod on that node, the allocation comes from its assignment; once the API has lost it, from the
inventory, until that no longer names it. If a node goes, its orphans end with it. If an inventory cannot be read, the orphans that it named last stay.

What a node reports counts on that node alone, under a name of its own: it is never the allocation of the pod itself. Else a node could name a pod that waits,
and nobody would place it; or a pod of another node, whose own report would then not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from extender.accounting import Accounting, Allocation
from vgpu.api.inventory import Orphan


def name_of(uid: str, node: str) -> str:
    """Under which the orphan is allocated. No pod has it as its UID, nor another node's orphan: a node's name has no `@`."""
    return f"{uid}@{node}"


class OrphanAllocations:
    """Iterates over the names that are allocated because a node reports them."""

    def __init__(self, allocations: Accounting) -> None:
        self._allocations = allocations
        self._reported: dict[str, dict[str, Orphan]] = {}
        """Node -> UID -> orphan, as the inventory has them."""
        self._nodes_of: dict[str, set[str]] = {}
        """UID -> nodes that report it: one, unless a node lies."""
        self._allocated: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._allocated)

    def __contains__(self, name: object) -> bool:
        return name in self._allocated

    def __len__(self) -> int:
        return len(self._allocated)

    def reported(self, node: str, orphans: Iterable[Orphan]) -> None:
        """The node's inventory names these, and no longer those that it named before."""
        now, before = {orphan.uid: orphan for orphan in orphans}, self._reported.pop(node, {})
        for uid in before.keys() - now.keys():
            self._nodes_of[uid].discard(node)
            if not self._nodes_of[uid]:
                del self._nodes_of[uid]
            self._release(uid, node)
        if now:
            self._reported[node] = now
        for uid, orphan in now.items():
            self._nodes_of.setdefault(uid, set()).add(node)
            if before.get(uid) != orphan:
                self._release(uid, node)
            self._allocate(node, orphan)

    def allocate_again(self, uid: str) -> None:
        """The API has lost the pod, and its own allocation is released."""
        for node in self._nodes_of.get(uid, ()):
            self._allocate(node, self._reported[node][uid])

    def seen(self, uid: str, node: str) -> None:
        """The API has the pod on this node: its own allocation stands."""
        self._release(uid, node)

    def _allocate(self, node: str, orphan: Orphan) -> None:
        """Unless it is, or the pod's own allocation on the node stands for it."""
        pod, name = self._allocations.get(orphan.uid), name_of(orphan.uid, node)
        if name in self._allocated or (pod is not None and pod.node == node):
            return
        self._allocations.allocate(name, Allocation(node, orphan.assignment, {}, orphan.key))
        self._allocated.add(name)

    def _release(self, uid: str, node: str) -> None:
        name = name_of(uid, node)
        if name in self._allocated:
            self._allocated.discard(name)
            self._allocations.release(name)
