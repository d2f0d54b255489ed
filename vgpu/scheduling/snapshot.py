"""What the extender decides by, as one document: a bug report is a file, and a question about the past has an answer.

    extender --GET /snapshot--> file --snapshot_from_json--> fleet_of --place, explain--> what it would have decided

Inventories and assignments stand in it as they stand in their annotations, each with its own version, and are checked as strictly.
What is free follows from both; the extender's own count of it is written beside, so that a wrong one shows (`drift`). Policies also go by
nodes' free CPU and by what pods requested so far: both are in it since version 2. Pods that were deleted by force and run on are in it since version 3. Of older documents
both are unknown.
What pods require of nodes (labels, tolerations) and MIG instances that they requested are in it since version 4: each constraint by a number,
and of each node the numbers of those that it meets. The bound of limits (`burst.overcommit`) is in it since version 5. Nodes' labels themselves are not in it, nor pods' preferences: it does not show which of two
nodes that are equally good for the GPUs a pod with preferences got.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from vgpu.api.codec import assignment_from_json, assignment_to_json, inventory_from_json, inventory_to_json
from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.api.grant import Assignment
from vgpu.api.inventory import Inventory
from vgpu.api.overcommit import LEAST, MOST
from vgpu.api.quantity import LARGEST_CPU_MILLI, LARGEST_GPU_MIB, MEMORY_UNITS_MIB
from vgpu.api.request import FULL_CORE_PERCENT, MOST_GPUS
from vgpu.scheduling.demand.pools import MOST_CONSTRAINTS
from vgpu.scheduling.demand.request_distribution import Typical
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.nodes.constraints import ANYWHERE, LabelRequirement, NodeConstraints, Term

VERSION: Final = 5
OLDEST: Final = 1
WITHOUT_OVERCOMMIT: Final = 4
"""What is written where limits have no bound: a reader of that version misses nothing."""
WITHOUT_CONSTRAINTS: Final = 3
"""Likewise, where no pod requested MIG instances or for nodes that not every node is."""
WITHOUT_ORPHANS: Final = 2
"""What is written where there is no orphan either: likewise."""

MOST_TIMES: Final = 2**31 - 1
"""That one request was seen. Counts are halved long before (`vgpu.scheduling.demand.request_distribution`)."""

POD_STAGES: Final = ("reserved", "in gang", "binding", "in doubt", "bound", "seen bound", "kept", "planned", "orphaned")
"""How far a pod is; `seen bound` is the only one that the API server has reported. `orphaned` is a pod that the API server has no longer, and
whose node reports that its processes run on. The others are reservations of this extender: `in gang` for a pod of a gang, `kept`
for a pod for which others are being evicted, `planned` for one that was nominated ahead of its scheduling cycle. Its UID then stands after a colon."""


@dataclass(frozen=True, slots=True)
class Free:
    """What is left of one GPU, by the extender's count."""

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
    """Why it takes no pods until a correction; empty when it takes some."""
    free: tuple[Free, ...] = ()
    """Per GPU, where the node takes pods."""
    cpu_free_milli: int | None = None
    """Its free CPU, which may be negative. None: not reported."""
    meets: tuple[int, ...] = ()
    """Numbers of the constraints that it meets (`nth_constraints`)."""


@dataclass(frozen=True, slots=True)
class StartingSize:
    """A size that the kubelet could mistake another pod's container for."""

    resource: str
    quantity: int
    uuids: frozenset[str]


@dataclass(frozen=True, slots=True)
class PodRecord:
    """A pod that has something."""

    uid: str
    key: str
    """`namespace/name`."""
    node: str
    stage: str
    """One of `POD_STAGES`."""
    assignment: Assignment
    starting: tuple[StartingSize, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of the extender."""

    domain: str
    unit_mib: int
    nodes: tuple[NodeRecord, ...]
    pods: tuple[PodRecord, ...]
    distribution: tuple[tuple[Typical, int], ...] = ()
    """What pods requested so far, and how many times, the most frequent first."""
    overcommit: float | None = None
    """What the limits on a GPU may add up to, times its memory; None = no bound."""


@dataclass(frozen=True, slots=True)
class SnapshotRecords:
    """A snapshot whose records are made one at a time, when they are read. Once."""

    domain: str
    unit_mib: int
    nodes: Iterable[NodeRecord]
    pods: Iterable[PodRecord]
    distribution: tuple[tuple[Typical, int], ...]
    orphans: bool
    """Is any pod `orphaned`?"""
    overcommit: float | None = None

    def whole(self) -> Snapshot:
        """All of them."""
        return Snapshot(
            self.domain, self.unit_mib, tuple(self.nodes), tuple(self.pods), self.distribution, self.overcommit
        )


class _Node(msgspec.Struct, omit_defaults=True):
    name: str
    inventory: msgspec.Raw = msgspec.Raw(b"null")
    excluded: str = ""
    free: tuple[Free, ...] = ()
    cpu_free_milli: int | None = None
    meets: tuple[int, ...] = ()


class _Requested(msgspec.Struct, omit_defaults=True, rename={"gpus": "cards"}):
    times: int
    gpus: int = 0
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
    starting: tuple[StartingSize, ...] = ()


class _Document(msgspec.Struct, rename={"distribution": "mix"}):
    v: int
    domain: str
    unit_mib: int
    nodes: list[_Node]
    pods: list[_Pod]
    distribution: list[_Requested] = []
    overcommit: float | msgspec.UnsetType = msgspec.UNSET


class _Version(msgspec.Struct):
    v: int


def nth_constraints(number: int) -> NodeConstraints:
    """Constraints of pods, by number in place of their content."""
    return NodeConstraints(((Term((LabelRequirement(_key(number), "Exists"),)),),), ANYWHERE.tolerations)


def _key(number: int) -> str:
    """As a label of the nodes that meet them."""
    return f"constraints-{number:02}"


_NUMBERS: Final = {nth_constraints(number): number for number in range(MOST_CONSTRAINTS)}


def snapshot_to_json(snapshot: Snapshot) -> bytes:
    """The document. Takes half a second for 10,000 nodes with 8 GPUs (measured): not for an event loop, which has `snapshot_chunks`."""
    orphans = any(one.stage == "orphaned" for one in snapshot.pods)
    return b"".join(
        snapshot_chunks(
            SnapshotRecords(
                snapshot.domain,
                snapshot.unit_mib,
                snapshot.nodes,
                snapshot.pods,
                snapshot.distribution,
                orphans,
                snapshot.overcommit,
            )
        )
    )


def snapshot_chunks(of: SnapshotRecords) -> Iterator[bytes]:
    """The document, a node or a pod at a time: each takes some 0.1 ms."""
    distribution = [
        _Requested(
            times, one.gpus, one.mib, one.percent, one.cpu_milli, one.models, one.instances, _NUMBERS.get(one.constraints),
        )
        for one, times in of.distribution
    ]  # fmt: skip
    version = WITHOUT_OVERCOMMIT if of.overcommit is None else VERSION
    if of.overcommit is None and not any(one.instances or one.constraints is not None for one in distribution):
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
    yield b'],"mix":%b' % encode(distribution)
    yield b"}" if of.overcommit is None else b',"overcommit":%b}' % encode(of.overcommit)


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
    overcommit = None if document.overcommit is msgspec.UNSET else document.overcommit
    if overcommit is not None and not LEAST <= overcommit <= MOST:
        raise BadDocument(f"snapshot: overcommit is {overcommit}: it must be {LEAST:g} to {MOST:g}")
    distribution = tuple(map(_requested, document.distribution))
    if len(dict(distribution)) < len(distribution):
        raise BadDocument(
            f"snapshot: mix: only {len(dict(distribution))} of {len(distribution)} requests differ: each must stand in it once"
        )
    return Snapshot(
        document.domain,
        document.unit_mib,
        tuple(_node(one) for one in document.nodes),
        tuple(_pod(one) for one in document.pods),
        distribution,
        overcommit,
    )


def fleet_of(snapshot: Snapshot) -> Fleet:
    """The fleet that inventories and assignments make, to place pods on."""
    fleet = Fleet(snapshot.overcommit)
    for one in snapshot.nodes:
        if one.inventory is not None and not one.excluded:
            fleet.set_node(one.name, one.inventory)
            if one.cpu_free_milli is not None:
                fleet.set_cpu(one.name, one.cpu_free_milli)
        if one.meets:
            fleet.set_labels(one.name, {_key(number): "" for number in one.meets})
    fleet.distribution.restore(dict(snapshot.distribution), fleet.models)
    for pod in snapshot.pods:
        for assigned in pod.assignment.held():
            fleet.debit(pod.node, assigned)
    return fleet


def drift(snapshot: Snapshot) -> Iterator[tuple[str, Free, Free]]:
    """(node, the extender's count, the right one) of every GPU where they differ."""
    fleet = fleet_of(snapshot)
    for one in snapshot.nodes:
        for row, reported in enumerate(one.free):
            at = fleet.column[one.name]
            right = Free(reported.uuid, int(fleet.free_mib[row, at]), int(fleet.free_percent[row, at]))
            if right != reported:
                yield one.name, reported, right


def _node(one: _Node) -> NodeRecord:
    try:
        inventory = None if bytes(one.inventory) == b"null" else inventory_from_json(bytes(one.inventory).decode())
    except BadDocument as error:
        raise BadDocument(f"snapshot: node {one.name[:80]}: {error}") from None
    gpus = inventory.gpus if inventory and not one.excluded else ()
    if one.free and [free.uuid for free in one.free] != [gpu.uuid for gpu in gpus]:
        raise BadDocument(
            f"snapshot: node {one.name[:80]}: free names {len(one.free)} GPUs: they must be the {len(gpus)} that may be given, in the inventory's order"
        )
    if one.cpu_free_milli is not None:
        where = f"snapshot: node {one.name[:80]}"
        _within(where, "cpu_free_milli", one.cpu_free_milli, -LARGEST_CPU_MILLI, LARGEST_CPU_MILLI)
    for number in one.meets:
        _within(f"snapshot: node {one.name[:80]}", "meets", number, 0, MOST_CONSTRAINTS - 1)
    return NodeRecord(one.name, inventory, one.excluded, one.free, one.cpu_free_milli, one.meets)


def _requested(one: _Requested) -> tuple[Typical, int]:
    for what, value, least, most in (
        ("times", one.times, 1, MOST_TIMES),
        ("cards", one.gpus, 0, MOST_GPUS),
        ("mib", one.mib, -1, LARGEST_GPU_MIB),
        ("percent", one.percent, 0, FULL_CORE_PERCENT),
        ("cpu_milli", one.cpu_milli, 0, LARGEST_CPU_MILLI),
        ("constraints", one.constraints or 0, 0, MOST_CONSTRAINTS - 1),
        *((f"instances of {profile[:80]}", wanted, 1, MOST_GPUS**2) for profile, wanted in one.instances),
    ):
        _within("snapshot: mix", what, value, least, most)
    constraints = ANYWHERE if one.constraints is None else nth_constraints(one.constraints)
    typical = Typical(one.gpus, one.mib, one.percent, one.cpu_milli, one.models, one.instances, constraints)
    return typical, one.times


def _pod(one: _Pod) -> PodRecord:
    if one.stage not in POD_STAGES:
        raise BadDocument(
            f"snapshot: pod {one.key[:80]}: stage is {one.stage[:80]!r}: it must be one of {', '.join(POD_STAGES)}"
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
