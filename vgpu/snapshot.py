"""What the extender decides by, as one document: a bug report is a file, and a question about the past has an answer.

    extender --GET /snapshot--> file --snapshot_from_json--> fleet_of --place, explain--> what it would have decided

Inventories and assignments stand in it as they stand in their annotations, each with its own version, and are checked as strictly.
What is free follows from both; the extender's own count of it is written beside, so that a wrong one shows (`drift`). Policies also go by
what nodes' processors have left and by what pods asked for so far: both are in it since version 2. Pods that were deleted by force and run on are in it since version 3. Older documents read as if nobody had told.
What pods require of nodes (labels, tolerations) and MIG instances that they asked for are in it since version 4: each constraint by a number,
and of each node the numbers of those that it meets. Nodes' labels themselves are not in it, nor pods' preferences: which of two nodes that are
equally good for the GPUs a pod with preferences got, it does not say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from vgpu.codec import assignment_from_json, assignment_to_json, inventory_from_json, inventory_to_json
from vgpu.constraints import ANYWHERE, Condition, NodeConstraints, Term
from vgpu.errors import BadDocument, NewerVersion
from vgpu.fleet import Fleet
from vgpu.grant import Assignment
from vgpu.inventory import Inventory
from vgpu.mix import Typical
from vgpu.pools import MOST_CONSTRAINTS
from vgpu.quantity import LARGEST_CARD_MIB, LARGEST_CPU_MILLI, MEMORY_UNITS_MIB
from vgpu.request import FULL_CORE_PERCENT, MOST_CARDS

VERSION: Final = 4
OLDEST: Final = 1
WITHOUT_CONSTRAINTS: Final = 3
"""What is written where no pod asked for MIG instances or for nodes that not every node is: a reader of that version misses nothing."""
WITHOUT_ORPHANS: Final = 2
"""What is written where there is no orphan either: likewise."""

MOST_TIMES: Final = 2**31 - 1
"""That one ask was seen. Counts are halved long before (`vgpu.mix`)."""

STAGES: Final = ("reserved", "in gang", "binding", "in doubt", "bound", "seen bound", "kept", "planned", "orphaned")
"""How far a pod is; `seen bound` is the only one that the API server has told of. `orphaned` is a pod that the API server has no longer, and
whose node says that its processes run on. The others are this extender's promises: `in gang` is a place for a pod of a gang, `kept` is room
for a pod for which others are being evicted, `planned` for one that was nominated ahead of its turn. Its UID then stands after a colon."""


@dataclass(frozen=True, slots=True)
class Free:
    """What is left of one card, by the extender's count."""

    uuid: str
    mib: int
    core_percent: int


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node as the extender knows it."""

    name: str
    inventory: Inventory | None
    """None: it publishes none, or one that cannot be read."""
    excluded: str = ""
    """Why it takes no pods until something is mended; empty when it takes some."""
    free: tuple[Free, ...] = ()
    """Per card, where the node takes pods."""
    cpu_free_milli: int | None = None
    """What its processors have left, less than nothing included. None: nobody told."""
    meets: tuple[int, ...] = ()
    """Numbers of the constraints that it meets (`nth_constraints`)."""


@dataclass(frozen=True, slots=True)
class Starting:
    """A size that the kubelet could mistake another pod's container for."""

    resource: str
    quantity: int
    uuids: frozenset[str]


@dataclass(frozen=True, slots=True)
class PodRecord:
    """A pod that holds something."""

    uid: str
    key: str
    """`namespace/name`."""
    node: str
    stage: str
    """One of `STAGES`."""
    assignment: Assignment
    starting: tuple[Starting, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of the extender."""

    domain: str
    unit_mib: int
    nodes: tuple[NodeRecord, ...]
    pods: tuple[PodRecord, ...]
    mix: tuple[tuple[Typical, int], ...] = ()
    """What pods asked for so far, and how many times, the most frequent first."""


@dataclass(frozen=True, slots=True)
class Records:
    """A snapshot whose records are made one at a time, when they are read. Once."""

    domain: str
    unit_mib: int
    nodes: Iterable[NodeRecord]
    pods: Iterable[PodRecord]
    mix: tuple[tuple[Typical, int], ...]
    orphans: bool
    """Is any pod `orphaned`?"""

    def whole(self) -> Snapshot:
        """All of them."""
        return Snapshot(self.domain, self.unit_mib, tuple(self.nodes), tuple(self.pods), self.mix)


class _Node(msgspec.Struct, omit_defaults=True):
    name: str
    inventory: msgspec.Raw = msgspec.Raw(b"null")
    excluded: str = ""
    free: tuple[Free, ...] = ()
    cpu_free_milli: int | None = None
    meets: tuple[int, ...] = ()


class _Asked(msgspec.Struct, omit_defaults=True):
    times: int
    cards: int = 0
    mib: int = 0
    percent: int = 0
    cpu_milli: int = 0
    models: tuple[str, ...] = ()
    instances: tuple[tuple[str, int], ...] = ()
    constraints: int | None = None


class _Pod(msgspec.Struct, omit_defaults=True):
    uid: str
    key: str
    node: str
    stage: str
    assignment: msgspec.Raw
    starting: tuple[Starting, ...] = ()


class _Document(msgspec.Struct):
    v: int
    domain: str
    unit_mib: int
    nodes: list[_Node]
    pods: list[_Pod]
    mix: list[_Asked] = []


class _Version(msgspec.Struct):
    v: int


def nth_constraints(number: int) -> NodeConstraints:
    """Constraints of pods, by number in place of what they say."""
    return NodeConstraints(((Term((Condition(_key(number), "Exists"),)),),), ANYWHERE.tolerations)


def _key(number: int) -> str:
    """As a label of the nodes that meet them."""
    return f"constraints-{number:02}"


_NUMBERS: Final = {nth_constraints(number): number for number in range(MOST_CONSTRAINTS)}


def snapshot_to_json(snapshot: Snapshot) -> bytes:
    """The document. Takes half a second for 10,000 nodes with 8 cards (measured): not for an event loop, which has `snapshot_pieces`."""
    orphans = any(one.stage == "orphaned" for one in snapshot.pods)
    return b"".join(
        snapshot_pieces(
            Records(snapshot.domain, snapshot.unit_mib, snapshot.nodes, snapshot.pods, snapshot.mix, orphans)
        )
    )


def snapshot_pieces(of: Records) -> Iterator[bytes]:
    """The document, a node or a pod at a time: each takes some 0.1 ms."""
    mix = [
        _Asked(
            times, one.cards, one.mib, one.percent, one.cpu_milli, one.models, one.instances, _NUMBERS.get(one.constraints),
        )
        for one, times in of.mix
    ]  # fmt: skip
    version = VERSION
    if not any(one.instances or one.constraints is not None for one in mix):
        version = WITHOUT_CONSTRAINTS if of.orphans else WITHOUT_ORPHANS
    encode = msgspec.json.Encoder().encode
    yield b'{"v":%d,"domain":%b,"unit_mib":%d,"nodes":[' % (version, encode(of.domain), of.unit_mib)
    between = b""
    for node in of.nodes:
        yield between + encode(_written_node(node))
        between = b","
    yield b'],"pods":['
    between = b""
    for pod in of.pods:
        yield between + encode(_written_pod(pod))
        between = b","
    yield b'],"mix":%b}' % encode(mix)


def _written_node(one: NodeRecord) -> _Node:
    inventory = msgspec.Raw(inventory_to_json(one.inventory).encode() if one.inventory else b"null")
    return _Node(one.name, inventory, one.excluded, one.free, one.cpu_free_milli, one.meets)


def _written_pod(one: PodRecord) -> _Pod:
    assignment = msgspec.Raw(assignment_to_json(one.assignment).encode())
    return _Pod(one.uid, one.key, one.node, one.stage, assignment, one.starting)


def snapshot_from_json(body: bytes) -> Snapshot:
    """Raises BadDocument that names the node or pod; NewerVersion when a newer extender wrote it."""
    version = _decode(body, _Version).v
    if not OLDEST <= version <= VERSION:
        raise (NewerVersion if version > VERSION else BadDocument)(
            f"snapshot is of version {version}: this Tangram reads versions {OLDEST} to {VERSION}"
        )
    document: _Document = _decode(body, _Document)
    if document.unit_mib not in MEMORY_UNITS_MIB.values():
        known = ", ".join(map(str, MEMORY_UNITS_MIB.values()))
        raise BadDocument(f"snapshot: unit_mib is {document.unit_mib}: it must be one of {known}")
    mix = tuple(map(_asked, document.mix))
    if len(dict(mix)) < len(mix):
        raise BadDocument(f"snapshot: mix: only {len(dict(mix))} of {len(mix)} asks differ: each must stand in it once")
    return Snapshot(
        document.domain,
        document.unit_mib,
        tuple(_node(one) for one in document.nodes),
        tuple(_pod(one) for one in document.pods),
        mix,
    )


def fleet_of(snapshot: Snapshot) -> Fleet:
    """The fleet that inventories and assignments make, to place pods on."""
    fleet = Fleet()
    for one in snapshot.nodes:
        if one.inventory is not None and not one.excluded:
            fleet.set_node(one.name, one.inventory)
            if one.cpu_free_milli is not None:
                fleet.set_cpu(one.name, one.cpu_free_milli)
        if one.meets:
            fleet.say(one.name, {_key(number): "" for number in one.meets})
    fleet.mix.restore(dict(snapshot.mix), fleet.models)
    for pod in snapshot.pods:
        for piece in pod.assignment.held():
            fleet.debit(pod.node, piece)
    return fleet


def drift(snapshot: Snapshot) -> Iterator[tuple[str, Free, Free]]:
    """(node, the extender's count, the right one) of every card where they differ."""
    fleet = fleet_of(snapshot)
    for one in snapshot.nodes:
        for row, said in enumerate(one.free):
            at = fleet.column[one.name]
            right = Free(said.uuid, int(fleet.free_mib[row, at]), int(fleet.free_percent[row, at]))
            if right != said:
                yield one.name, said, right


def _node(one: _Node) -> NodeRecord:
    try:
        inventory = None if bytes(one.inventory) == b"null" else inventory_from_json(bytes(one.inventory).decode())
    except BadDocument as error:
        raise BadDocument(f"snapshot: node {one.name[:80]}: {error}") from None
    cards = inventory.cards if inventory and not one.excluded else ()
    if one.free and [free.uuid for free in one.free] != [card.uuid for card in cards]:
        raise BadDocument(
            f"snapshot: node {one.name[:80]}: free names {len(one.free)} cards: they must be the {len(cards)} that may be given, in the inventory's order"
        )
    if one.cpu_free_milli is not None:
        where = f"snapshot: node {one.name[:80]}"
        _within(where, "cpu_free_milli", one.cpu_free_milli, -LARGEST_CPU_MILLI, LARGEST_CPU_MILLI)
    for number in one.meets:
        _within(f"snapshot: node {one.name[:80]}", "meets", number, 0, MOST_CONSTRAINTS - 1)
    return NodeRecord(one.name, inventory, one.excluded, one.free, one.cpu_free_milli, one.meets)


def _asked(one: _Asked) -> tuple[Typical, int]:
    for what, value, least, most in (
        ("times", one.times, 1, MOST_TIMES),
        ("cards", one.cards, 0, MOST_CARDS),
        ("mib", one.mib, -1, LARGEST_CARD_MIB),
        ("percent", one.percent, 0, FULL_CORE_PERCENT),
        ("cpu_milli", one.cpu_milli, 0, LARGEST_CPU_MILLI),
        ("constraints", one.constraints or 0, 0, MOST_CONSTRAINTS - 1),
        *((f"instances of {profile[:80]}", wanted, 1, MOST_CARDS**2) for profile, wanted in one.instances),
    ):
        _within("snapshot: mix", what, value, least, most)
    constraints = ANYWHERE if one.constraints is None else nth_constraints(one.constraints)
    typical = Typical(one.cards, one.mib, one.percent, one.cpu_milli, one.models, one.instances, constraints)
    return typical, one.times


def _pod(one: _Pod) -> PodRecord:
    if one.stage not in STAGES:
        raise BadDocument(
            f"snapshot: pod {one.key[:80]}: stage is {one.stage[:80]!r}: it must be one of {', '.join(STAGES)}"
        )
    try:
        assignment = assignment_from_json(bytes(one.assignment).decode())
    except BadDocument as error:
        raise BadDocument(f"snapshot: pod {one.key[:80]}: {error}") from None
    return PodRecord(one.uid, one.key, one.node, one.stage, assignment, one.starting)


def _within(where: str, what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadDocument(f"{where}: {what} is {value}: it must be {least} to {most}")


def _decode(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadDocument(f"snapshot cannot be read: {str(error)[:300]}") from None
