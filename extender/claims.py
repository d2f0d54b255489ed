"""Who holds what on which card: one claim a pod, whatever it comes from.

A pod that room is set aside for, that is reserved, then bound, then seen bound by the watch has one claim all along, replaced in place: that is
what keeps a reservation and the pod it becomes from being counted twice. The fleet's free memory is what claims leave; nothing else writes to it.

Claims outlive their node's inventory: a node that goes, comes back, or changes its cards finds them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from vgpu.fleet import Fleet
from vgpu.grant import Assignment, Slice
from vgpu.inventory import Inventory
from vgpu.names import Names
from vgpu.policy import POLICIES
from vgpu.request import PodAsk

Size: TypeAlias = tuple[str, int]
"""A resource and its quantity, as one container asks for it: all that the kubelet tells pods apart by."""

NOTHING: Final[frozenset[str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Claim:
    """What a pod holds on a node."""

    node: str
    assignment: Assignment
    sizes: Mapping[Size, frozenset[str]] = field(default_factory=dict)
    """While the pod may still be given its devices: size -> UUIDs of the container that asks for it."""
    key: str = ""
    """The pod, as `namespace/name`."""
    own: bool = True
    """Is it the pod's place? Else it is room that is set aside for it, and it may be placed elsewhere."""


def sizes_of(ask: PodAsk, assignment: Assignment, names: Names) -> dict[Size, frozenset[str]]:
    """The sizes by which the kubelet could mistake another pod for this one."""
    sizes: dict[Size, frozenset[str]] = {}
    for part in ask.containers:
        uuids = frozenset(assignment.uuids(part.container))
        for size in part.resources(names).items():
            # two containers of one size on different cards: no other pod can be told from both of them
            sizes[size] = uuids if sizes.get(size, uuids) == uuids else NOTHING
    return sizes


def _nobody_asks(_uid: str, _node: str) -> None:
    pass


class Claims:
    """Every claim, and the fleet that they leave."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.on_move: Callable[[str, str], None] = _nobody_asks
        """Told of the UID and the node of who comes to hold something there; of no node when it is given up."""
        self.on_started: Callable[[], object] = bool
        """Told whenever a pod no longer is one that the kubelet could mistake another for."""
        self._claims: dict[str, Claim] = {}
        self._held: dict[str, dict[str, tuple[Slice, ...]]] = {}
        """Node -> pod UID -> slices."""
        self._starting: dict[Size, dict[str, dict[str, frozenset[str]]]] = {}
        """Size -> node -> pod UID -> UUIDs."""
        self._versions: dict[str, int] = {}
        """Node -> how often it changed who holds what there."""
        self._cdi: set[str] = set()
        """Nodes offered whose devices come from Allocate."""

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[tuple[str, Claim]]:
        return iter(self._claims.items())

    def get(self, uid: str) -> Claim | None:
        """A pod's claim."""
        return self._claims.get(uid)

    def place_of(self, uid: str) -> Claim | None:
        """The claim of a pod that has a place. Room that is set aside for it is none."""
        claim = self._claims.get(uid)
        return claim if claim is not None and claim.own else None

    def on(self, node: str) -> Mapping[str, tuple[Slice, ...]]:
        """Pod UID -> what it holds there."""
        return self._held.get(node, {})

    def version(self, node: str) -> int:
        """Another number whenever somebody came to hold something there, or gave it up."""
        return self._versions.get(node, 0)

    def hold(self, uid: str, claim: Claim) -> None:
        """The pod holds this, and no longer what it held before."""
        before = self._claims.get(uid)
        if before == claim:
            return
        self.release(uid)
        self._claims[uid] = claim
        slices = claim.assignment.held()
        self._held.setdefault(claim.node, {})[uid] = slices
        self._versions[claim.node] = self.version(claim.node) + 1
        for piece in slices:
            self.fleet.debit(claim.node, piece)
        for size, uuids in claim.sizes.items():
            self._starting.setdefault(size, {}).setdefault(claim.node, {})[uid] = uuids
        self.on_move(uid, claim.node if claim.own else "")

    def release(self, uid: str) -> bool:
        """The pod holds nothing. Answers whether it held something."""
        claim = self._claims.pop(uid, None)
        if claim is None:
            return False
        for piece in self._held[claim.node].pop(uid):
            self.fleet.credit(claim.node, piece)
        self._versions[claim.node] = self.version(claim.node) + 1
        if not self._held[claim.node]:
            del self._held[claim.node]
        for size in claim.sizes:
            nodes = self._starting[size]
            del nodes[claim.node][uid]
            if not nodes[claim.node]:
                del nodes[claim.node]
            if not nodes:
                del self._starting[size]
        if claim.sizes:
            self.on_started()
        self.on_move(uid, "")
        return True

    def set_node(self, name: str, inventory: Inventory | None) -> None:
        """Offer a node with these cards, or stop offering it. Claims on it stay either way."""
        self._cdi.discard(name)
        if inventory is None:
            self.fleet.remove_node(name)
            return
        if inventory.access == "cdi":
            self._cdi.add(name)
        held = [piece for slices in self._held.get(name, {}).values() for piece in slices]
        self.fleet.set_node(name, inventory, held)

    def only(self, ask: PodAsk, names: Names) -> dict[str, Set[str]]:
        """Node -> the UUIDs that the pod may be placed on there, because a pod of the same size is starting (contract.md section 3).

        Only with access mode cdi: there the devices come from Allocate, which cannot tell the two pods apart. A pod that is to have the
        roomiest GPU is not held to another: it waits for its turn instead, when it is bound (`turns`).
        """
        if POLICIES[ask.policy].order == "roomiest":
            return {}
        narrowed: dict[str, Set[str]] = {}
        for part in ask.containers:
            for size in part.resources(names).items():
                starting = self._starting.get(size, {})
                for node in self._cdi & starting.keys():
                    for uuids in starting[node].values():
                        same = uuids if len(uuids) == part.cards else NOTHING
                        narrowed[node] = narrowed.get(node, same) & same
        return narrowed

    def mistakable(self, uid: str) -> Iterator[str]:
        """The UIDs of those whom the kubelet could mistake this pod for, to the harm of both: of its size, with other GPUs of its node."""
        claim = self._claims.get(uid)
        if claim is None or claim.node not in self._cdi:
            return
        for size, uuids in claim.sizes.items():
            for other, theirs in self._starting[size][claim.node].items():
                if other != uid and (theirs != uuids or not uuids):
                    yield other
