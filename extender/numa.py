"""Which GPUs of a node a pod can have where the kubelet's TopologyManager refuses pods that it cannot align.

Placement does not know of it. The node that it chooses is judged here: its choice of GPUs is narrowed to those at which the kubelet will arrive, or
the node is refused. A pod is judged as if the kubelet had admitted all pods that have GPUs of the node. So that it has, pods of such a node are bound
one after another (`extender.bind.BindOrder`), and each is judged again before.

Of a pod that was placed, the CPUs that the kubelet will give it count as taken until the node's annotation counts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from typing import Final

import structlog

from extender.accounting import Accounting, AlignedPod, Allocation
from extender.reasons import NUMA_NOT_TRIED, NUMA_UNREADABLE, numa_elsewhere, numa_refuses, numa_several, numa_starting
from vgpu.api.errors import BadDocument
from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.mig_device import slot_of_device
from vgpu.api.names import Names
from vgpu.api.numa import ContainerNeeds, NumaFacts, facts_from_json
from vgpu.api.request import PodRequest
from vgpu.scheduling.numa import Aligned, gpus_of, nodes_of, predict, supplies_of
from vgpu.scheduling.placement import SWAP_RISK, NoFit, Placement

TRIES: Final = 32
"""Nodes that are judged for one pod: each costs a placement, 1 to 2 ms at 10,000 nodes. Guessed."""
COUNTED_S: Final = 60.0
"""A started pod's CPUs are counted by then, or the kubelet gave it none for itself. Guessed: the annotation follows within 2 s."""

log = structlog.get_logger("extender.numa")

NOBODY: Final[frozenset[str]] = frozenset()
Placing = Callable[[Mapping[str, Set[str]]], Placement | NoFit]


@dataclass(frozen=True, slots=True)
class Judgement:
    """`gpus`: container -> UUIDs that it can have; `reason`: why others cannot be had."""

    gpus: Mapping[str, frozenset[str]]
    reason: str

    @property
    def any_of(self) -> frozenset[str]:
        """Of all containers."""
        return frozenset().union(*self.gpus.values())

    def allows(self, assignment: Assignment) -> bool:
        """Has each container only GPUs that it can have?"""
        return all(
            self.gpus.get(name, NOBODY).issuperset(map(_carrier, assignment.uuids(name)))
            for name in assignment.containers
        )


class NumaNodes:
    """The nodes whose kubelet aligns pods or refuses them. `orphans`: names of allocations of pods that the kubelet has no more."""

    def __init__(
        self, allocations: Accounting, orphans: Collection[str], names: Names, clock: Callable[[], float]
    ) -> None:
        self._allocations, self._orphans, self._names, self._clock = allocations, orphans, names, clock
        self._facts: dict[str, NumaFacts] = {}
        self._texts: dict[str, str] = {}
        self._unreadable: set[str] = set()
        self._since_s: dict[str, float] = {}
        """UID -> when a started pod was first seen whose CPUs are not counted."""

    def __contains__(self, node: str) -> bool:
        return node in self._facts or node in self._unreadable

    def __len__(self) -> int:
        return len(self._facts) + len(self._unreadable)

    def set_node(self, name: str, text: str | None) -> None:
        """A node's annotation, None if it has none or the node is gone."""
        if text == self._texts.get(name):
            return
        self._facts.pop(name, None)
        self._unreadable.discard(name)
        self._texts.pop(name, None)
        if text is not None:
            self._texts[name] = text
            self._read(name, text)
        self._allocations.on_started()

    def _read(self, name: str, text: str) -> None:
        try:
            facts = facts_from_json(text, self._names)
        except BadDocument as error:
            self._unreadable.add(name)
            log.error("a node's NUMA facts cannot be read; it takes no pods", node=name, error=str(error))
            return
        self._facts[name] = facts
        for uid in facts.counted:
            allocation = self._allocations.get(uid)
            if allocation is not None and allocation.node == name:  # no word of another node's pods counts
                self._since_s.pop(uid, None)
                self._allocations.counted(uid)

    def forget_pod(self, uid: str) -> None:
        """It is gone."""
        self._since_s.pop(uid, None)

    def alignment(self, node: str, uid: str, request: PodRequest) -> AlignedPod | None:
        """Of a pod that is being placed there."""
        if node not in self._facts:
            return None
        return AlignedPod(request.needs, self._aligned(node, request.needs, but=uid).cpus)

    def place(self, request: PodRequest, only: Mapping[str, Set[str]], placing: Placing) -> Placement | NoFit:
        """What `placing` answers, told which GPUs the pod may have, once the kubelet will arrive at those that it chooses."""
        narrowed, reasons = dict(only), dict[str, str]()
        for _ in range(TRIES):
            answer = placing(narrowed)
            if isinstance(answer, NoFit) or answer.node not in self:
                return _explained(answer, reasons)
            node, judgement = answer.node, self._judge(answer.node, request)
            if judgement.allows(answer.assignment):
                return answer
            again = node in reasons
            reasons[node] = numa_several(self._facts[node].policy) if again else judgement.reason
            narrowed[node] = NOBODY if again else judgement.any_of & only.get(node, judgement.any_of)
        for node in (*self._facts, *self._unreadable):
            if node not in reasons:
                reasons[node], narrowed[node] = NUMA_NOT_TRIED, NOBODY
        answer = placing(narrowed)
        if (
            isinstance(answer, Placement)
            and answer.node in self
            and not self._judge(answer.node, request).allows(answer.assignment)
        ):
            return NoFit({reasons[answer.node]: [answer.node]})
        return _explained(answer, reasons)

    def waits(self, uid: str, starting: Callable[[str], bool]) -> str:
        """Why a pod that was placed may not be bound yet; empty if it may. `starting`: is a pod bound, or perhaps about to be?"""
        allocation = self._allocations.place_of(uid)
        if allocation is None or allocation.aligned is None or allocation.node not in self._facts:
            return ""
        node = allocation.node
        for other in self._allocations.on(node):
            theirs = self._allocations.place_of(other)
            if other == uid or theirs is None or other in self._orphans or not starting(other):
                continue
            if theirs.sizes or self._pending(other, theirs):
                return numa_starting(theirs.key)
        judgement = self._judgement(node, self._aligned(node, allocation.aligned.needs, but=uid, counts=starting))
        return "" if judgement.allows(allocation.assignment) else judgement.reason

    def _judge(self, node: str, request: PodRequest) -> Judgement:
        if node not in self._facts:
            return Judgement({}, NUMA_UNREADABLE)
        return self._judgement(node, self._aligned(node, request.needs))

    def _judgement(self, node: str, aligned: Aligned) -> Judgement:
        facts = self._facts[node]
        if aligned.refused:  # also of a node that is not in the fleet
            return Judgement({}, numa_refuses(facts.policy, aligned.refused))
        inventory = self._allocations.fleet.inventory[node]
        gpus = {name: gpus_of(facts, inventory, mask) for name, mask in aligned.masks.items()}
        masks = {nodes for mask in aligned.masks.values() for nodes in nodes_of(mask)}
        return Judgement(gpus, numa_elsewhere(facts.policy, sorted(masks)))

    def _aligned(
        self,
        node: str,
        needs: tuple[ContainerNeeds, ...],
        but: str = "",
        counts: Callable[[str], bool] = lambda _: True,
    ) -> Aligned:
        """What the kubelet does with a pod that comes after all others on the node but `but`, of those that count."""
        facts, inventory = self._facts[node], self._allocations.fleet.inventory.get(node)
        if inventory is None:
            return Aligned(refused="its GPUs are not known")
        held: list[AssignedGpu] = []
        taken = Counter[int]()
        for uid, gpus in self._allocations.on(node).items():
            allocation = self._allocations.place_of(uid)
            if uid == but or allocation is None or uid in self._orphans or not counts(uid):
                continue
            held += gpus
            if pending := self._pending(uid, allocation):
                if pending.cpus is None and any(one.cpus for one in needs):
                    return Aligned(
                        refused=f"the CPUs that pod {allocation.key} will have are not known before it has started"
                    )
                taken.update(pending.cpus or {})
        return predict(facts, supplies_of(facts, inventory, self._names, held, taken), needs)

    def _pending(self, uid: str, allocation: Allocation) -> AlignedPod | None:
        """What a pod will have, if that includes CPUs that the node's annotation does not count yet."""
        aligned = allocation.aligned
        if aligned is None or aligned.cpus == {}:
            return None
        if allocation.sizes:  # it has not started
            return aligned
        since_s = self._since_s.setdefault(uid, self._clock())
        if self._clock() - since_s < COUNTED_S:
            return aligned
        del self._since_s[uid]
        self._allocations.counted(uid)
        return None


def _carrier(uuid: str) -> str:
    """Of a MIG slot on demand its GPU; others are known by their own UUID."""
    slot = slot_of_device(uuid)
    return slot[0] if slot else uuid


def _explained(answer: Placement | NoFit, reasons: Mapping[str, str]) -> Placement | NoFit:
    """With the reason of each node that was judged."""
    if isinstance(answer, Placement) or not reasons:
        return answer
    nodes: dict[str, list[str]] = {}
    for reason, those in answer.nodes.items():
        for node in those:
            nodes.setdefault(reasons.get(node, reason) if reason == SWAP_RISK else reason, []).append(node)
    return NoFit(dict(nodes))
