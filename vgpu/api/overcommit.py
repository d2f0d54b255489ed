"""How far the memory limits of a GPU's containers may add up: `burst.overcommit` times its memory.

The limit of a container is what it may have in all: its guarantee and a possible burst. It is settled when its pod is placed, and stands in the
assignment (`AssignedGpu.limit_mib`). So the extender and the node count the same, also after a restart. An edit of the pod's annotations can lower
a limit, and raise it again up to the one that was settled. When another container ends, no limit is raised: what it had is for the next pods.

Without a value nothing here is used: no limit is settled, and limits have no bound together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from vgpu.api.burst import Burst
from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.quantity import LARGEST_GPU_MIB

LEAST: Final = 1.0
"""Guarantees alone may add up to the GPU's memory."""
MOST: Final = 100.0
"""Guessed: far beyond what takes turns at all."""

_FAR: Final = 2**40
"""MiB, more than all limits of a GPU together."""


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """What others leave of a GPU to a pod."""

    guaranteed_mib: int
    """Memory without the guarantees of others. No single limit exceeds it."""
    limits_mib: int
    """What the limits of the pod's containers may add up to."""


def bound_mib(total_mib: int, overcommit: float) -> int:
    """MiB that the limits on a GPU may add up to, rounded down."""
    return int(total_mib * overcommit)


def limit_of(gpu: AssignedGpu) -> int:
    """MiB that a container may have in all of a GPU, or a pod at its peak."""
    return gpu.limit_mib or gpu.mib


def withheld_mib(total_mib: int, free_mib: int, excess_mib: int, overcommit: float) -> int:
    """MiB of what guarantees leave free (`free_mib`) that no pod gets, because limits have reached the bound. 0 where guarantees are the narrower ones.

    `excess_mib`: by how much the limits on the GPU exceed the guarantees, in all.
    """
    return min(max(free_mib, 0), max(0, excess_mib - (bound_mib(total_mib, overcommit) - total_mib)))


def settle(assignment: Assignment, bursts: Mapping[str, Burst], room: Mapping[str, GpuRoom]) -> Assignment:
    """The assignment with a limit for each of its containers that may burst: what it requests, as far as there is room.

    `room`: by UUID. Numbers come before `max`, and among those the order is the assignment's.
    """
    held = {gpu.uuid: gpu.mib for gpu in assignment.held()}
    named = [name for name in assignment.containers if name in bursts]
    for name in sorted(named, key=lambda name: bursts[name].mib == LARGEST_GPU_MIB):
        most = {
            gpu.uuid: min(bursts[name].mib, room[gpu.uuid].guaranteed_mib - held[gpu.uuid] + gpu.mib)
            for gpu in assignment.containers[name]
        }
        within = {uuid: one.limits_mib for uuid, one in room.items()}
        assignment = _raised(assignment, name, most, within)
    return assignment


def enforced(
    in_order: Sequence[Assignment], total_mib: Mapping[str, int], overcommit: float
) -> list[Mapping[str, Mapping[str, int]]]:
    """For each of a node's pods, container -> UUID -> the most that it may have in all, in MiB.

    That is what was settled, as long as those fit the bound. Where they do not, as after the value was lowered, limits of later pods are lowered,
    and no guarantee is.
    """
    left = {uuid: bound_mib(mib, overcommit) for uuid, mib in total_mib.items()}
    for one in in_order:
        _take(left, ((gpu.uuid, gpu.mib) for gpu in one.held()), 1)
    found: list[Mapping[str, Mapping[str, int]]] = []
    for one in in_order:
        _take(left, ((gpu.uuid, gpu.mib) for gpu in one.held()), -1)
        now = _plain(one)
        for name, gpus in one.containers.items():
            if not any(gpu.limit_mib for gpu in gpus):
                continue
            now = _raised(now, name, {gpu.uuid: gpu.limit_mib for gpu in gpus}, left)
        _take(left, ((gpu.uuid, limit_of(gpu)) for gpu in now.held()), 1)
        found.append({name: {gpu.uuid: limit_of(gpu) for gpu in gpus} for name, gpus in now.containers.items()})
    return found


def _raised(assignment: Assignment, name: str, most: Mapping[str, int], within: Mapping[str, int]) -> Assignment:
    """One container's limits raised to `most`, or as far as the pod's limits stay `within`. Above the guarantee on all of its GPUs or on none."""
    gpus = assignment.containers[name]
    limits = [
        max(gpu.mib, min(most[gpu.uuid], within.get(gpu.uuid, 0) - _beside(assignment, name, gpu))) for gpu in gpus
    ]
    if any(limit == gpu.mib for limit, gpu in zip(limits, gpus, strict=True)):
        return assignment
    raised = tuple(replace(gpu, limit_mib=limit) for limit, gpu in zip(limits, gpus, strict=True))
    return replace(assignment, containers={**assignment.containers, name: raised})


def _beside(assignment: Assignment, name: str, gpu: AssignedGpu) -> int:
    """MiB of the limits of the pod's other containers that run beside this one, at most."""
    far = tuple(replace(one, limit_mib=_FAR) if one.uuid == gpu.uuid else one for one in assignment.containers[name])
    held = replace(assignment, containers={**assignment.containers, name: far}).held()
    return next(limit_of(one) for one in held if one.uuid == gpu.uuid) - _FAR


def _plain(assignment: Assignment) -> Assignment:
    """Without limits."""
    containers = {
        name: tuple(replace(gpu, limit_mib=0) for gpu in gpus) for name, gpus in assignment.containers.items()
    }
    return replace(assignment, containers=containers)


def _take(left: dict[str, int], amounts: Iterable[tuple[str, int]], sign: int) -> None:
    for uuid, mib in amounts:
        if uuid in left:
            left[uuid] -= sign * mib
