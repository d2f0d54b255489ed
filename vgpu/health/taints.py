"""The taints of a node that the device plugin writes: while a GPU is unhealthy, where the operator wants one, and before its GPUs are usable. Pure.

The taint of an unhealthy GPU keeps pods off the whole node, also off its healthy GPUs. The scheduler knows about each GPU by the inventory, so it needs no taint; people who let other schedulers
place pods, or who want a node repaired as a whole, may.

The startup taint is set by who makes the node (a node group, a NodePool), and an autoscaler waits until it is gone. The device plugin only removes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from vgpu.api.inventory import TESTING, Inventory
from vgpu.api.names import Names

Effect = Literal["NoSchedule", "PreferNoSchedule"]
VALUE: Final = "true"


def wanted_effect(inventory: Inventory, effect: Effect | None, *, present: bool) -> Effect | None:
    """The taint's effect as it should be; None = there should be none. `present`: is it there now? Then it stays until a GPU that recovered was tried.
    A cordoned GPU counts no more: somebody takes care of it."""
    if effect is None:
        return None
    unhealthy = any(gpu.state == "unhealthy" and gpu.selected and gpu.cordon in ("", TESTING) for gpu in inventory.gpus)
    tried = present and any(gpu.cordon == TESTING for gpu in inventory.gpus)
    return effect if unhealthy or tried else None


def with_taint(taints: Iterable[Mapping[str, Any]], key: str, effect: Effect | None) -> list[Mapping[str, Any]]:
    """The same taints, and of this key the one with this effect. Those of others stay as they are, in their order."""
    taints = list(taints)
    same = [one for one in taints if one.get("key") == key and one.get("effect") == effect]
    others = [one for one in taints if one.get("key") != key]
    if effect is None:
        return others
    return (
        taints if same and len(others) + 1 == len(taints) else [*others, {"key": key, "value": VALUE, "effect": effect}]
    )


def is_usable(inventory: Inventory, allocatable: Mapping[str, str | int | float], names: Names) -> bool:
    """May pods get a GPU of the node now? `allocatable`: what the kubelet reports on the node. It is not usable while new pods get no GPU of it, or while the kubelet
    reports no device of any of our resources: it would refuse a pod that is bound to the node."""
    reported = any(str(amount) not in ("", "0") for name, amount in allocatable.items() if names.ours(name))
    return reported and any(gpu.offered for gpu in inventory.gpus)
