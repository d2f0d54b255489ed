"""The taint of a node that has an unhealthy GPU, where the operator wants one. Pure.

It keeps pods off the whole node, also off its healthy GPUs. The scheduler knows about each GPU by the inventory, so it needs no taint; people who let other schedulers
place pods, or who want a node repaired as a whole, may.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from vgpu.api.inventory import TESTING, Inventory

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
