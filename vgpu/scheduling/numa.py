"""Predict to which NUMA nodes the kubelet's TopologyManager aligns a pod, and so which GPUs of a node the pod can be given.

The kubelet asks each of its managers for hints: sets of NUMA nodes from which a resource can be taken. A hint is preferred if no smaller set
would do on the empty machine. It merges one hint of each resource, and both policies that refuse pods admit one only if all these hints are preferred
and equal. Of several such sets the kubelet takes the smallest, then the lowest. So hints that are not preferred never decide, and this module leaves
them out; tests/unit/vgpu/scheduling/slow_numa.py has the whole merge, written plainly.

What the kubelet counts is not what Tangram counts: for it a device ID is free if no pod has that ID. So a GPU that a pod has whole still has all its
IDs of gpu-mem, and the kubelet may align a pod to a NUMA node where no GPU has room.

Sets of NUMA nodes are bit masks, as the kubelet's: bit 2 is NUMA node 2.

Source: k8s.io/kubernetes v1.36.3, pkg/kubelet/cm: topologymanager/policy.go, devicemanager/topology_hints.go, cpumanager/policy_static.go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import combinations
from typing import Final

from vgpu.api.contract import devices
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Inventory
from vgpu.api.names import Names
from vgpu.api.numa import MOST_PREDICTED_NODES, SINGLE, ContainerNeeds, NumaFacts
from vgpu.api.request import FULL_CORE_PERCENT

CPU: Final = "cpu"


@dataclass(frozen=True, slots=True)
class Supply:
    """A resource of a machine, by NUMA node. Only NUMA nodes that have any of it are named."""

    total: Mapping[int, int]
    """All of it, in whatever state and use."""
    free: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Aligned:
    """What the kubelet will do with a pod."""

    masks: Mapping[str, int] = field(default_factory=dict)
    """Container -> the NUMA nodes to which it is aligned. All of the machine's where nothing of the container has a NUMA node."""
    refused: str = ""
    """Why the kubelet refuses the pod, or why that cannot be known; empty if it admits it."""
    cpus: Mapping[int, int] | None = None
    """NUMA node -> CPUs that the pod will have for itself; None if that is not known."""


def mask_of(nodes: Iterable[int]) -> int:
    """The mask of these NUMA nodes."""
    return reduce(lambda mask, node: mask | 1 << node, nodes, 0)


def nodes_of(mask: int) -> tuple[int, ...]:
    """The NUMA nodes of a mask, ascending."""
    return tuple(bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def preferred(supply: Supply, wanted: int, reused: Mapping[int, int]) -> frozenset[int]:
    """Masks of the preferred hints of one resource. `reused`: what an earlier container of the pod leaves to this one, by NUMA node."""
    nodes = sorted(node for node, count in supply.total.items() if count)
    kept = mask_of(node for node, count in reused.items() if count)
    for size in range(1, len(nodes) + 1):
        these = [*combinations(nodes, size)]
        if size < len(nodes) and not any(sum(supply.total[node] for node in some) >= wanted for some in these):
            continue
        masks = ((mask_of(some), sum(supply.free.get(node, 0) for node in some)) for some in these)
        have = sum(reused.values())
        return frozenset(mask for mask, free in masks if mask & kept == kept and have + free >= wanted)
    return frozenset()


def merged(masks: Sequence[Set[int]], everywhere: int, *, single: bool, distance: Callable[[int], float]) -> int | None:
    """The mask at which the kubelet arrives by the preferred masks of each resource that has hints; None if it refuses.

    `everywhere`: all NUMA nodes of the machine. `distance` of the NUMA nodes of a mask to each other decides between masks of one size.
    """
    if not masks:
        return everywhere
    common = [mask for mask in frozenset.intersection(*map(frozenset, masks)) if not single or mask.bit_count() == 1]
    return min(common, key=lambda mask: (mask.bit_count(), distance(mask), mask), default=None)


def predict(facts: NumaFacts, supplies: Mapping[str, Supply], needs: Sequence[ContainerNeeds]) -> Aligned:
    """What the kubelet does with a pod that comes now. `supplies`: of each resource that has NUMA nodes, CPUs for one container included."""
    if facts.unpredictable:
        return Aligned(refused=facts.unpredictable)
    if len(facts.nodes) > MOST_PREDICTED_NODES:
        return Aligned(refused=f"the machine has more than {MOST_PREDICTED_NODES} NUMA nodes")
    if facts.scope == "pod":
        whole = as_one(needs)
        answer = _Machine(facts, supplies).align([whole])
        return Aligned(
            {one.container: answer.masks.get(whole.container, 0) for one in needs}, answer.refused, answer.cpus
        )
    return _Machine(facts, supplies).align(needs)


def as_one(needs: Sequence[ContainerNeeds]) -> ContainerNeeds:
    """A pod as the kubelet counts it in scope `pod`: what its containers use at most at once."""
    running, most = Counter[str](), Counter[str]()
    for one in needs:
        amounts = Counter(_amounts(one))
        together = running + amounts
        most |= together
        if not one.init:
            running = together
    cpus = most.pop(CPU, 0)
    return ContainerNeeds("", cpus, dict(most))


def _amounts(one: ContainerNeeds) -> dict[str, int]:
    return {CPU: one.cpus, **one.devices} if one.cpus else dict(one.devices)


class _Machine:
    """A machine while the containers of one pod are admitted, one after another."""

    def __init__(self, facts: NumaFacts, supplies: Mapping[str, Supply]) -> None:
        self._facts, self._supplies = facts, supplies
        self._free = {resource: dict(supply.free) for resource, supply in supplies.items()}
        self._reused: dict[str, dict[int, int]] = {}
        self._uncertain: set[str] = set()
        """Resources of which it is not known any more from which NUMA nodes they were taken."""

    def align(self, needs: Sequence[ContainerNeeds]) -> Aligned:
        everywhere = mask_of(node.id for node in self._facts.nodes)
        masks: dict[str, int] = {}
        before = dict(self._free.get(CPU, {}))
        for one in needs:
            wanted = {name: amount for name, amount in _amounts(one).items() if name in self._supplies}
            if unclear := sorted(self._uncertain & wanted.keys()):
                return Aligned(masks, f"which {unclear[0]} earlier containers of the pod leave cannot be predicted")
            if spread := [name for name in wanted if not self._supplies[name].total]:
                return Aligned(masks, f"devices of {spread[0]} belong to several NUMA nodes")
            hints = [self._hints(resource, amount) for resource, amount in wanted.items()]
            mask = merged(hints, everywhere, single=self._facts.policy == SINGLE, distance=self._distance)
            if mask is None:
                return Aligned(masks, self._no_mask(wanted, hints))
            masks[one.container] = mask
            for resource, amount in wanted.items():
                self._take(resource, amount, mask, init=one.init)
        left = self._free.get(CPU, {})
        taken = {node: before[node] - left[node] for node in before if before[node] > left[node]}
        return Aligned(masks, cpus=None if CPU in self._uncertain else taken)

    def _hints(self, resource: str, amount: int) -> frozenset[int]:
        supply = Supply(self._supplies[resource].total, self._free[resource])
        return preferred(supply, amount, self._reused.get(resource, {}))

    def _take(self, resource: str, amount: int, mask: int, *, init: bool) -> None:
        reused = self._reused.setdefault(resource, {})
        nodes = nodes_of(mask)
        if len(nodes) > 1 or (resource == CPU and any(reused.values())):
            self._uncertain.add(resource)  # the CPU manager does not take first what may be reused
            return
        (node,) = nodes
        again = min(amount, reused.get(node, 0))
        self._free[resource][node] = self._free[resource].get(node, 0) - (amount - again)
        reused[node] = max(amount, reused.get(node, 0)) if init else reused.get(node, 0) - again

    def _distance(self, mask: int) -> float:
        if not self._facts.prefer_closest:
            return 0.0
        rows = {node.id: node.distances for node in self._facts.nodes}
        nodes = nodes_of(mask)
        pairs = [(one, other) for one in nodes for other in nodes]
        return sum(rows[one][other] if other < len(rows[one]) else 0 for one, other in pairs) / len(pairs)

    def _no_mask(self, wanted: Mapping[str, int], hints: Sequence[Set[int]]) -> str:
        for (resource, amount), masks in zip(wanted.items(), hints, strict=True):
            if not masks:
                return f"it finds no NUMA nodes with {amount} {resource} free, of the fewest that could have as many"
        what = " and ".join(sorted(wanted))
        if self._facts.policy == SINGLE:
            return f"it finds no NUMA node that has its {what}"
        return f"it finds no NUMA nodes that suit its {what} equally"


def supplies_of(
    facts: NumaFacts, inventory: Inventory, names: Names, held: Iterable[AssignedGpu], cpus_taken: Mapping[int, int]
) -> dict[str, Supply]:
    """What the kubelet counts as there and free on a node. `held`: of pods that the kubelet has or will have before, orphans left out. `cpus_taken`: by NUMA node, CPUs of
    pods that `facts` do not count yet."""
    found: dict[str, Supply] = {}
    if facts.exclusive_cpus:
        total = {node.id: node.cpus for node in facts.nodes if node.cpus}
        free = {node.id: max(0, node.free - cpus_taken.get(node.id, 0)) for node in facts.nodes if node.cpus}
        found[CPU] = Supply(total, free)
    for resource, counts in facts.others.items():
        found[resource] = Supply({one.numa: one.total for one in counts}, {one.numa: one.free for one in counts})
    known = {node.id for node in facts.nodes}
    used = _used(inventory, names, held)
    orphaned = _used(inventory, names, (one for orphan in inventory.orphans for one in orphan.held))
    offered = replace(inventory, gpus=tuple(gpu for gpu in inventory.gpus if not gpu.withdrawn))
    for resource, ids in devices(offered, names).items():
        total_ids = Counter(one.numa for one in ids if one.numa in known)
        free_ids = Counter(one.numa for one in ids if one.numa in known and one.healthy)
        for uuid, count in used.get(resource, {}).items():
            gpu = inventory.gpu(uuid)
            if gpu is not None and gpu.numa in known:
                # of a withdrawn GPU the kubelet has the IDs that are in use, and no others
                (total_ids if gpu.withdrawn else free_ids)[gpu.numa] += count if gpu.withdrawn else -count * gpu.healthy
        for uuid, count in orphaned.get(resource, {}).items():
            gpu = inventory.gpu(uuid)
            if (
                gpu is not None and gpu.numa in known and gpu.withdrawn
            ):  # listed as in use, and free: it has no such pod
                total_ids[gpu.numa] += count
                free_ids[gpu.numa] += count * gpu.healthy
        if total_ids:
            found[resource] = Supply(total_ids, {node: max(0, free_ids[node]) for node in total_ids})
    return found


def gpus_of(facts: NumaFacts, inventory: Inventory, mask: int) -> frozenset[str]:
    """UUIDs of the GPUs, and of the MIG instances, that a container aligned to this mask can be given."""
    known = {node.id for node in facts.nodes}
    anywhere = mask == mask_of(known) and facts.policy == SINGLE  # the kubelet then keeps no mask
    if anywhere or not any(gpu.numa in known and not gpu.on_demand for gpu in inventory.gpus):
        near = inventory.gpus
    else:
        # slots on demand name no NUMA node: the kubelet takes any
        near = tuple(gpu for gpu in inventory.gpus if gpu.on_demand or (gpu.numa >= 0 and mask >> gpu.numa & 1))
    return frozenset(uuid for gpu in near for uuid in (gpu.uuid, *(one.uuid for one in gpu.instances)))


def _used(inventory: Inventory, names: Names, held: Iterable[AssignedGpu]) -> dict[str, Counter[str]]:
    """Resource -> UUID of a GPU -> IDs that pods have there."""
    used: dict[str, Counter[str]] = {}
    for one in held:
        gpu = inventory.gpu(one.uuid)
        if gpu is None or gpu.on_demand:
            continue
        for resource, count in _ids(one, names, inventory.unit_mib).items():
            used.setdefault(resource, Counter())[gpu.uuid] += count
    return used


def _ids(one: AssignedGpu, names: Names, unit_mib: int) -> dict[str, int]:
    match one.kind:
        case "whole":
            return {names.gpu: 1}
        case "mig":
            return {names.mig(one.profile): 1}
        case "share":
            core = {names.gpu_core: min(one.core_percent, FULL_CORE_PERCENT)} if one.core_percent else {}
            return {names.gpu_mem: one.mib // unit_mib} | core
