"""What happens to pods whose GPU is unhealthy or no longer there. Pure.

A degraded GPU works, and of an unmonitored one nothing is known: neither is a reason to end a pod. Times are seconds since 1970.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from vgpu.api.inventory import Inventory

_EVICT_AFTER: Final = re.compile(r"evict-after: ?([1-9][0-9]{0,5})(s|m|h)\Z")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class PodPolicy:
    """`evict_after_s`: how long a pod may stay on a GPU that is unhealthy; None = for ever."""

    evict_after_s: int | None = None


def policy_from_text(text: str) -> PodPolicy:
    """`leave`, `evict` or `evict-after: 5m`. Raises ValueError."""
    if text == "leave":
        return PodPolicy()
    if text == "evict":
        return PodPolicy(0)
    if found := _EVICT_AFTER.match(text):
        return PodPolicy(int(found[1]) * _SECONDS[found[2]])
    raise ValueError(
        f"the policy is {text!r}: must be leave, evict or evict-after: N with a unit of s, m or h, such as evict-after: 5m"
    )


@dataclass(frozen=True, slots=True)
class UnfitGpu:
    """A GPU that pods should not be on."""

    since_s: int
    why: str


def unfit_gpus(inventory: Inventory, gone: Mapping[str, int]) -> dict[str, UnfitGpu]:
    """By UUID, of GPUs and MIG instances. `gone`: UUIDs that are no longer in the node, and since when."""
    found = {uuid: UnfitGpu(since_s, f"{uuid} is no longer in the node") for uuid, since_s in gone.items()}
    for gpu in inventory.gpus:
        unhealthy = [one for one in gpu.conditions if one.state == "unhealthy"]
        if not unhealthy:
            continue
        since_s = min(one.since_s for one in unhealthy)
        why = f"GPU {gpu.uuid} is unhealthy: {'; '.join(f'{one.reason}: {one.message}' for one in unhealthy)}"
        found |= {uuid: UnfitGpu(since_s, why) for uuid in (gpu.uuid, *(one.uuid for one in gpu.instances))}
    return found


def affected(unfit: Mapping[str, UnfitGpu], pods: Iterable[tuple[str, Collection[str]]]) -> dict[str, UnfitGpu]:
    """Pod UID -> the GPU of its that is unfit for longest. `pods`: UID, and UUIDs of the pod's GPUs and MIG instances."""
    found = {}
    for uid, gpus in pods:
        theirs = [unfit[gpu] for gpu in gpus if gpu in unfit]
        if theirs:
            found[uid] = min(theirs, key=lambda one: one.since_s)
    return found


def due(policy: PodPolicy, pods: Mapping[str, UnfitGpu], now_s: float) -> dict[str, str]:
    """Pod UID -> why, of those that are to be evicted now."""
    if policy.evict_after_s is None:
        return {}
    return {uid: gpu.why for uid, gpu in pods.items() if now_s - gpu.since_s >= policy.evict_after_s}
