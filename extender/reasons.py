"""Reasons why a node cannot take a pod, beyond those of `vgpu.scheduling.placement`.

Few and constant: the scheduler counts equal strings and shows the counts to the user ("3 no single GPU has enough ...").
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from vgpu.scheduling.placement import SWAP_RISK, UNRESOLVABLE

UNKNOWN_NODE: Final = "node is not known to Tangram's scheduler yet"
UNREADABLE_INVENTORY: Final = "node's GPU inventory cannot be read"
NEWER_INVENTORY: Final = "node's GPU inventory was written by a newer Tangram"
UNREADABLE_CORDONS: Final = "node's list of cordoned GPUs cannot be read"
OTHER_UNIT: Final = "node counts GPU memory in another unit than the cluster"
UNREADABLE_ASSIGNMENT: Final = "a pod on the node has a GPU assignment that cannot be read"
BINDING: Final = "the pod is being bound to another node"
BOUND: Final = "the pod is bound to another node"
GANG_PAUSED: Final = "kube-scheduler paused within the pod's gang"
GANG_YIELDS: Final = (
    "the pod's gang had reservations and was not scheduled: pods that wait for that capacity are tried first"
)

PLACEHOLDER: Final = "a placeholder for an autoscaler is bound to no node"

NUMA: Final = "the kubelet's TopologyManager does not allow it"
NUMA_UNREADABLE: Final = "node's NUMA facts cannot be read"
NUMA_NOT_TRIED: Final = "other nodes were tried first against the kubelet's TopologyManager"

NO_EVICTION_HELPS: Final = UNRESOLVABLE | {
    SWAP_RISK, UNKNOWN_NODE, UNREADABLE_INVENTORY, NEWER_INVENTORY, UNREADABLE_CORDONS, OTHER_UNIT, UNREADABLE_ASSIGNMENT,
    BINDING, BOUND, GANG_PAUSED, GANG_YIELDS, PLACEHOLDER, NUMA, NUMA_UNREADABLE, NUMA_NOT_TRIED,
}  # fmt: skip
"""Time or a correction helps against these; kube-scheduler must not evict pods because of them."""


def eviction_may_help(reason: str) -> bool:
    """May kube-scheduler evict pods because of it?"""
    return reason not in NO_EVICTION_HELPS and not reason.startswith(NUMA)


def numa_refuses(policy: str, why: str) -> str:
    """It would not admit the pod, or that cannot be known."""
    return f"{NUMA} ({policy}): it would refuse the pod, since {why}"


def numa_elsewhere(policy: str, nodes: Sequence[int]) -> str:
    """It aligns the pod to these NUMA nodes."""
    which = f"NUMA node {nodes[0]}" if len(nodes) == 1 else f"NUMA nodes {', '.join(map(str, nodes))}"
    return f"{NUMA} ({policy}): it would align the pod to {which}, where no GPU has room for it"


def numa_several(policy: str) -> str:
    """No assignment that fits was found."""
    return f"{NUMA} ({policy}): it would align the pod's containers to different NUMA nodes"


def numa_starting(key: str) -> str:
    """Pods of such a node start one after another."""
    return f"{NUMA} yet: it aligns one pod after another, and pod {key} is starting on the node"


def gang_paused(paused_s: float, longest_s: float, refusal: int) -> str:
    """The reason of pods whose gang has lost reservations in a pause of `paused_s` seconds; with pauses of more than `longest_s` it is never bound.

    `refusal` makes the text another one each time: kube-scheduler does not write a condition with the same text again, and the condition shows
    that the cycle is over.
    """
    if paused_s > longest_s:
        what = f"GPUs are reserved for {longest_s:.0f} s at most, so the gang cannot be bound before its pauses are shorter"
    else:
        what = "the gang is tried again as a whole"
    return f"{GANG_PAUSED} for {paused_s:.1f} s: {what} (refusal {refusal})"


def said_of_a_pause(message: str) -> str:
    """The part of a kube-scheduler message that is this reason; empty if there is none."""
    found = _PAUSED.search(message)
    return found[0] if found is not None else ""


_PAUSED: Final = re.compile(re.escape(GANG_PAUSED) + r" for [0-9.]+ s: [^()]*\(refusal [0-9]+\)")
