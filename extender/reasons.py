"""Why a node cannot take a pod, beyond what `vgpu.placement` says.

Few and constant: the scheduler counts equal strings and shows the counts to the user ("3 no single GPU has enough ...").
"""

from __future__ import annotations

from typing import Final

from vgpu.placement import SWAP_RISK, UNRESOLVABLE

UNKNOWN_NODE: Final = "node is not known to Tangram's scheduler yet"
UNREADABLE_INVENTORY: Final = "node's GPU inventory cannot be read"
NEWER_INVENTORY: Final = "node's GPU inventory was written by a newer Tangram"
OTHER_UNIT: Final = "node counts GPU memory in another unit than the cluster"
UNREADABLE_ASSIGNMENT: Final = "a pod on the node has a GPU assignment that cannot be read"
BINDING: Final = "the pod is being bound to another node"
BOUND: Final = "the pod is bound to another node"
GANG_PAUSED: Final = "kube-scheduler paused within the pod's gang: the gang is tried again as a whole"

NO_EVICTION_HELPS: Final = UNRESOLVABLE | {
    SWAP_RISK, UNKNOWN_NODE, UNREADABLE_INVENTORY, NEWER_INVENTORY, OTHER_UNIT, UNREADABLE_ASSIGNMENT, BINDING, BOUND,
    GANG_PAUSED,
}  # fmt: skip
"""Waiting or mending helps against these; the scheduler must not kill pods because of them."""
