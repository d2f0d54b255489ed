"""Which pod has what on which GPU: one allocation a pod, whatever it comes from.

A pod for which capacity is set aside, then reserved, then bound, then shown bound by the watch, has one allocation all along, replaced in
place. So a reservation and the pod that it becomes are never counted twice. The fleet's free memory is what allocations leave; no other code
writes to it.

Allocations outlive their node's inventory: a node that goes, comes back, or changes its GPUs finds them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np
import structlog

from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.inventory import Inventory
from vgpu.api.names import Names
from vgpu.api.numa import ContainerNeeds
from vgpu.api.request import PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.policies.registry import POLICIES

Size: TypeAlias = tuple[str, int]
"""A resource and its quantity, as one container requests it: the kubelet distinguishes pods by nothing else."""

NOTHING: Final[frozenset[str]] = frozenset()

log = structlog.get_logger("extender.accounting")


@dataclass(frozen=True, slots=True)
class AlignedPod:
    """A pod on a node whose kubelet aligns pods or refuses them (`extender.numa`)."""

    needs: tuple[ContainerNeeds, ...]
    cpus: Mapping[int, int] | None
    """NUMA node -> CPUs that it will have for itself; None if that is not known."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a pod has on a node."""

    node: str
    assignment: Assignment
    sizes: Mapping[Size, frozenset[str]] = field(default_factory=dict)
    """While the kubelet may still allocate the pod's devices: size -> UUIDs of the container that requests it."""
    key: str = ""
    """The pod, as `namespace/name`."""
    own: bool = True
    """Is the pod placed there? Else the capacity is set aside for it, and it may be placed elsewhere."""
    aligned: AlignedPod | None = None
    """Until the node counts the pod's CPUs; None where none are to be counted."""

    def has_instances(self, uuids: Set[str]) -> bool:
        """Are MIG instances among these? `NOTHING` stands for those of several containers, so for all of the pod."""
        parts = (gpu for gpus in self.assignment.containers.values() for gpu in gpus)
        return any(gpu.kind == "mig" for gpu in parts if not uuids or gpu.uuid in uuids)


def sizes_of(request: PodRequest, assignment: Assignment, names: Names) -> dict[Size, frozenset[str]]:
    """The sizes by which the kubelet could mistake another pod for this one."""
    sizes: dict[Size, frozenset[str]] = {}
    for part in request.containers:
        uuids = frozenset(assignment.uuids(part.container))
        for size in part.resources(names).items():
            # two containers of one size on different GPUs: no other pod can be distinguished from both of them
            sizes[size] = uuids if sizes.get(size, uuids) == uuids else NOTHING
    return sizes


def _ignore(_uid: str, _node: str) -> None:
    pass


def _never(_uid: str) -> bool:
    return False


class Accounting:
    """Every allocation, and the fleet that they leave."""

    def __init__(self, overcommit: float | None = None) -> None:
        """`overcommit` as `Fleet`'s."""
        self.fleet = Fleet(overcommit)
        self.on_move: Callable[[str, str], None] = _ignore
        """Called with a pod's UID and the node where it is placed; with an empty string when it is placed nowhere."""
        self.on_started: Callable[[], object] = bool
        """Called whenever a pod stops being one for which the kubelet could mistake another."""
        self.repaired = 0
        """Nodes whose free capacity differed from a count anew."""
        self._allocations: dict[str, Allocation] = {}
        self._by_node: dict[str, dict[str, tuple[AssignedGpu, ...]]] = {}
        """Node -> pod UID -> GPUs."""
        self._starting: dict[Size, dict[str, dict[str, frozenset[str]]]] = {}
        """Size -> node -> pod UID -> UUIDs."""
        self._versions: dict[str, int] = {}
        """Node -> how often an allocation changed there."""
        self._cdi: set[str] = set()
        """Nodes offered where all devices come from Allocate, not MIG instances alone."""

    def __len__(self) -> int:
        return len(self._allocations)

    def __iter__(self) -> Iterator[tuple[str, Allocation]]:
        return iter(self._allocations.items())

    def get(self, uid: str) -> Allocation | None:
        """A pod's allocation."""
        return self._allocations.get(uid)

    def place_of(self, uid: str) -> Allocation | None:
        """The allocation of a pod that is placed; None if capacity is only set aside for it."""
        allocation = self._allocations.get(uid)
        return allocation if allocation is not None and allocation.own else None

    def on(self, node: str) -> Mapping[str, tuple[AssignedGpu, ...]]:
        """Pod UID -> what it has there."""
        return self._by_node.get(node, {})

    def version(self, node: str) -> int:
        """Another number whenever an allocation changes there."""
        return self._versions.get(node, 0)

    def allocate(self, uid: str, allocation: Allocation) -> None:
        """The pod has this, and no longer what it had before."""
        before = self._allocations.get(uid)
        if before == allocation:
            return
        self.release(uid)
        self._allocations[uid] = allocation
        gpus = allocation.assignment.held()
        self._by_node.setdefault(allocation.node, {})[uid] = gpus
        self._versions[allocation.node] = self.version(allocation.node) + 1
        for assigned in gpus:
            self.fleet.debit(allocation.node, assigned)
        for size, uuids in allocation.sizes.items():
            self._starting.setdefault(size, {}).setdefault(allocation.node, {})[uid] = uuids
        self.on_move(uid, allocation.node if allocation.own else "")

    def release(self, uid: str) -> bool:
        """The pod has nothing any more. Returns whether it had something."""
        allocation = self._allocations.pop(uid, None)
        if allocation is None:
            return False
        for assigned in self._by_node[allocation.node].pop(uid):
            self.fleet.credit(allocation.node, assigned)
        self._versions[allocation.node] = self.version(allocation.node) + 1
        if not self._by_node[allocation.node]:
            del self._by_node[allocation.node]
        for size in allocation.sizes:
            nodes = self._starting[size]
            del nodes[allocation.node][uid]
            if not nodes[allocation.node]:
                del nodes[allocation.node]
            if not nodes:
                del self._starting[size]
        if allocation.sizes:
            self.on_started()
        self.on_move(uid, "")
        return True

    def counted(self, uid: str) -> None:
        """The node counts the pod's CPUs."""
        allocation = self._allocations.get(uid)
        if allocation is not None and allocation.aligned is not None:
            self._allocations[uid] = replace(allocation, aligned=None)

    def set_node(self, name: str, inventory: Inventory | None) -> None:
        """Offer a node with these GPUs, or stop offering it. Allocations on it stay either way."""
        self._cdi.discard(name)
        if inventory is None:
            self.fleet.remove_node(name)
            return
        if inventory.access == "cdi":
            self._cdi.add(name)
        held = [assigned for gpus in self._by_node.get(name, {}).values() for assigned in gpus]
        self.fleet.set_node(name, inventory, held)

    def recount(self, node: str) -> bool:
        """Count a node anew from its allocations, and repair the fleet where it differed. Returns whether it was right."""
        if node not in self.fleet:
            return True
        at = self.fleet.column[node]
        before = [array[:, at].copy() for array in self.fleet.snapshot().values()]
        instances = dict(self.fleet.mig_containers[node])
        self.set_node(node, self.fleet.inventory[node])
        after = [array[:, at] for array in self.fleet.snapshot().values()]
        right = all(np.array_equal(b, a) for b, a in zip(before, after, strict=True))
        if right and instances == self.fleet.mig_containers[node]:
            return True
        self.repaired += 1
        log.error("a node's free capacity was wrong and is repaired", node=node)
        return False

    def only(
        self, request: PodRequest, names: Names, starts_later: Callable[[str], bool] = _never
    ) -> dict[str, Set[str]]:
        """Node -> the UUIDs that the pod may be placed on there, because a pod of the same size is starting.

        Only where the devices come from Allocate, which cannot distinguish the two pods: with access mode cdi, and MIG instances with
        each mode. A pod that is to have the
        emptiest GPU is not restricted to another, and no pod is restricted by one of which `starts_later(uid)` is true: bind waits instead
        (`extender.bind.BindOrder`).
        """
        if POLICIES[request.policy].order == "emptiest":
            return {}
        narrowed: dict[str, Set[str]] = {}
        for part in request.containers:
            for size in part.resources(names).items():
                starting = self._starting.get(size, {})
                for node in filter(self.fleet.__contains__ if part.kind == "mig" else self._cdi.__contains__, starting):
                    for uid, uuids in starting[node].items():
                        if starts_later(uid):
                            continue
                        same = uuids if len(uuids) == part.gpus else NOTHING
                        narrowed[node] = narrowed.get(node, same) & same
        return narrowed

    def mistakable(self, uid: str) -> Iterator[str]:
        """UIDs of pods for which the kubelet could mistake this one, to the harm of both: of its size, with other GPUs of its node."""
        allocation = self._allocations.get(uid)
        if allocation is None:
            return
        for size, uuids in allocation.sizes.items():
            if allocation.node not in self._cdi and not allocation.has_instances(uuids):
                continue
            for other, theirs in self._starting[size][allocation.node].items():
                if other != uid and (theirs != uuids or not uuids):
                    yield other
