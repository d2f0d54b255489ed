"""What a node says of bursts, for a person who reads `kubectl describe node`: whether its host pool is ready, and how the limits compare with each GPU.

It is written as an annotation of the node. Nothing decides by it: the scheduler counts from assignments, and metrics have the same numbers sooner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from vgpu.api.burst import BurstLimits
from vgpu.api.grant import Assignment
from vgpu.api.inventory import Inventory
from vgpu.api.overcommit import limit_of

VERSION: Final = 1
WHY_LIMIT: Final = 300
"""Characters of a reason: it is one line of a description. Guessed."""


class GpuSums(msgspec.Struct, frozen=True):
    """What containers may have of one GPU, as quantities."""

    uuid: str
    memory: str
    guaranteed: str
    """Sum of the guarantees of its containers, at most `memory`."""
    limits: str
    """Sum of their limits, guarantees included. More than `memory`: they may have to take turns."""


class BurstSummary(msgspec.Struct, frozen=True, rename="camel"):
    """The annotation. A reader of an earlier version passes over further fields."""

    v: int
    host_pool: str
    """Size that is set, as a quantity."""
    ready: bool
    """While it is false, limits do not apply: each container has its guarantee."""
    why: str
    """Why it is not ready."""
    gpus: tuple[GpuSums, ...]
    """Those that are not in MIG mode, in the order of the inventory."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """The host pool of a node. `size`: as it is set, a quantity. `missing`: why there is none; empty = it is ready."""

    size: str
    missing: str


def summary_of(
    inventory: Inventory, pods: Iterable[tuple[Assignment, Mapping[str, BurstLimits]]], pool: PoolState
) -> BurstSummary:
    """`pods`: of each pod its assignment and its containers' limits, of those that may use more than their guarantee."""
    guaranteed_mib: dict[str, int] = {}
    limits_mib: dict[str, int] = {}
    for assignment, limits in pods:
        for gpu in _with_limits(assignment, limits).held():
            guaranteed_mib[gpu.uuid] = guaranteed_mib.get(gpu.uuid, 0) + gpu.mib
            limits_mib[gpu.uuid] = limits_mib.get(gpu.uuid, 0) + max(gpu.mib, limit_of(gpu))
    return BurstSummary(
        v=VERSION,
        host_pool=pool.size,
        ready=not pool.missing,
        why=pool.missing[:WHY_LIMIT],
        gpus=tuple(
            GpuSums(
                gpu.uuid,
                quantity(gpu.mib),
                quantity(guaranteed_mib.get(gpu.uuid, 0)),
                quantity(limits_mib.get(gpu.uuid, 0)),
            )
            for gpu in inventory.gpus
            if not gpu.mig and not gpu.whole_only
        ),
    )


def text_of(summary: BurstSummary) -> str:
    """The annotation's value."""
    return msgspec.json.encode(summary).decode()


def quantity(mib: int) -> str:
    """`8Gi`; `8200Mi` where it is no whole number of GiB; `0`."""
    if not mib:
        return "0"
    return f"{mib}Mi" if mib % 1024 else f"{mib // 1024}Gi"


def _with_limits(assignment: Assignment, limits: Mapping[str, BurstLimits]) -> Assignment:
    """With the limits that apply in the place of those that were settled."""
    containers = {}
    for name, gpus in assignment.containers.items():
        most = {gpu.uuid: gpu.mib for gpu in limits[name].gpus} if name in limits else {}
        containers[name] = tuple(replace(gpu, limit_mib=most.get(gpu.uuid, 0)) for gpu in gpus)
    return replace(assignment, containers=containers)
