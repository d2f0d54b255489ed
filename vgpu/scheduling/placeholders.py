"""Which placeholder pods there should be: an autoscaler adds a node for each, where it sees no reason to for the pod that waits. Pure.

Autoscalers simulate without extenders, by the totals of nodes. A pod that fits the sum of a node's GPUs and no single GPU fits for them, so they add nothing.
A placeholder requests all GPUs of one node of a type, so it fits none of the nodes that are in use. At most one stands for each waiting pod, and `most` in all.

The caller says which pods wait, which of them are stranded (only a sum of GPUs is enough for them now), and which placeholders exist. Nothing is remembered here.

Units: seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from vgpu.api.inventory import Inventory
from vgpu.api.request import PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import Placement, place

MOST_RECORDS: Final = 2000
"""Waiting pods whose first placeholder is remembered; beyond that none is made for others. Guessed: 200 KB of a ConfigMap, which takes 1 MiB."""

Reason = Literal["pod gone", "placed", "timed out", "not needed", "over the maximum"]
"""Why a placeholder is removed. not needed: its pod fits no sum of GPUs now, so an autoscaler sees itself that a node is missing, or no node type places it."""


@dataclass(frozen=True, slots=True)
class NodeType:
    """Nodes that are alike, by the label of their instance type."""

    name: str
    inventory: Inventory
    """Of the node of this type that has most, without anything allocated."""

    @property
    def size(self) -> tuple[int, int, str]:
        """Orders types: MiB of all its GPUs, their number, the name."""
        gpus = self.inventory.gpus
        return sum(gpu.mib for gpu in gpus if gpu.offered), len(gpus), self.name


@dataclass(frozen=True, slots=True)
class StrandedPod:
    """A pod that is not bound."""

    uid: str
    priority: int = 0
    since_s: float = 0.0
    """When it was first found stranded; orders pods of one priority."""
    stranded: bool | None = None
    """Is a sum of GPUs enough for it and no single GPU? False also while it has a reservation. None: not known, so its placeholder stays, and none is made."""
    placed: bool = False
    """Has it a reservation, of whichever kind?"""
    node_type: str = ""
    """The smallest that places it; empty: none does."""


@dataclass(frozen=True, slots=True)
class PlaceholderPod:
    """A placeholder that exists."""

    name: str
    pod_uid: str
    """UID of the pod that it stands for."""
    created_s: float
    leaving: bool = False
    """It is deleted, and still there."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an operator allows."""

    most: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now."""

    create: tuple[StrandedPod, ...] = ()
    remove: tuple[tuple[PlaceholderPod, Reason], ...] = ()
    forget: tuple[str, ...] = ()
    """UIDs of pods that do not wait any more: their first placeholder need not be remembered."""


def decide(
    waiting: Mapping[str, StrandedPod],
    placeholders: Iterable[PlaceholderPod],
    first_s: Mapping[str, float],
    limits: Limits,
    now_s: float,
) -> Plan:
    """`waiting`: by UID, every pod that has a placeholder or a record, or that was found stranded, if it still waits. `first_s`: UID -> when the pod's first
    placeholder was made. Pods of higher priority come first, then those that were stranded earlier."""
    present = sorted(placeholders, key=lambda one: (one.created_s, one.name))
    since_s = dict(first_s)
    for one in present:
        since_s[one.pod_uid] = min(one.created_s, since_s.get(one.pod_uid, one.created_s))
    kept, remove = 0, []
    for one in present:
        reason = _reason(waiting.get(one.pod_uid), since_s[one.pod_uid], limits, now_s)
        if one.leaving or (reason is None and kept < limits.most):
            kept += 1
        else:
            remove.append((one, reason or "over the maximum"))
    standing = {one.pod_uid for one in present}
    candidates = [
        pod
        for pod in waiting.values()
        if pod.uid not in standing and pod.stranded and not pod.placed and pod.node_type
        and (pod.uid not in since_s or now_s < since_s[pod.uid] + limits.timeout_s)
    ]  # fmt: skip
    candidates.sort(key=lambda pod: (-pod.priority, pod.since_s, pod.uid))
    create, records = [], len(since_s)
    for pod in candidates[: max(0, limits.most - kept - len(remove))]:
        if pod.uid not in since_s and records >= MOST_RECORDS:
            continue
        records += pod.uid not in since_s
        create.append(pod)
    return Plan(tuple(create), tuple(remove), tuple(uid for uid in first_s if uid not in waiting))


def _reason(pod: StrandedPod | None, first_s: float, limits: Limits, now_s: float) -> Reason | None:
    """Why the placeholder of this pod is removed; None: it stays."""
    if pod is None:
        return "pod gone"
    if pod.placed:
        return "placed"
    if now_s >= first_s + limits.timeout_s:
        return "timed out"
    return "not needed" if pod.stranded is False or (pod.stranded and not pod.node_type) else None


def node_types(nodes: Iterable[tuple[str, Inventory]]) -> dict[str, NodeType]:
    """The types of these nodes, by name: each node is the name of its type and its inventory. Nodes without a type are left out."""
    found: dict[str, NodeType] = {}
    for name, inventory in nodes:
        if name:
            one = NodeType(name, inventory)
            if name not in found or one.size > found[name].size:
                found[name] = one
    return found


def smallest(types: Iterable[NodeType], request: PodRequest) -> str:
    """Name of the smallest type of which an empty node would place the pod; empty if there is none.

    A new node has other GPUs: none with a UUID that the pod names, and none that is withdrawn or in bad health.
    """
    for one in sorted(types, key=lambda one: one.size):
        fleet = Fleet()
        fleet.set_node(one.name, _as_new(one.inventory))
        if isinstance(place(fleet, request, [one.name]), Placement):
            return one.name
    return ""


def _as_new(inventory: Inventory) -> Inventory:
    new = {gpu.uuid: f"new-{gpu.index}" for gpu in inventory.gpus}
    gpus = tuple(
        replace(
            gpu, uuid=new[gpu.uuid], nvlinks={new[peer]: links for peer, links in gpu.nvlinks.items() if peer in new}
        )
        for gpu in inventory.gpus
    )
    return replace(inventory, gpus=gpus, orphans=())


def amounts(inventory: Inventory) -> tuple[int, int, int]:
    """(gpu-mem in units, gpu-core in percent, GPUs) that a node with this inventory has for pods in all, as its kubelet counts them."""
    shared: Sequence[int] = [gpu.mib // inventory.unit_mib for gpu in inventory.gpus if not gpu.mig and gpu.offered]
    return sum(shared), 100 * len(shared), len(shared)
