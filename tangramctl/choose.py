"""Which GPU a run is given: the cluster's own placement, over a fleet of one node. Pure.

What is free of a GPU is its memory less what runs were granted, whether they use it or not, less what processes of no run
use now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from tangramctl.errors import BadOption, NoCapacity
from vgpu.api.coherent import why_whole_only
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.request import PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import IN_MIG_MODE, TOO_LARGE, WHOLE_ONLY, Placement, place

HERE: Final = "this machine"


@dataclass(frozen=True, slots=True)
class RunAllocation:
    """What a run was granted."""

    assigned: AssignedGpu
    by: str
    """For a person: `pid 4711, python train.py`."""


def choose(
    request: PodRequest,
    inventory: Inventory,
    holdings: Iterable[RunAllocation],
    foreign_mib: Mapping[str, int],
    hint: str = "",
) -> AssignedGpu:
    """The share to grant. Raises BadOption, with `hint` at its end, when no GPU is large enough even when empty, and NoCapacity when one
    would be."""
    held = list(holdings)
    rows = {gpu.uuid: gpu.index for gpu in inventory.gpus}
    foreign = [AssignedGpu(uuid, rows[uuid], mib) for uuid, mib in foreign_mib.items() if mib > 0 and uuid in rows]
    fleet = Fleet()
    fleet.set_node(HERE, inventory, [*(holding.assigned for holding in held), *foreign])
    answer = place(fleet, request, [HERE])
    if isinstance(answer, Placement):
        (assigned,) = answer.assignment.containers["run"]
        return assigned
    (wanted,) = request.containers
    allowed = [gpu for gpu in inventory.gpus if not request.uuids or gpu.uuid in request.uuids]
    if answer.reasons[HERE] in (IN_MIG_MODE, WHOLE_ONLY, TOO_LARGE):
        raise BadOption(_too_large(wanted.mib, allowed, hint))
    free = {gpu.uuid: _free(fleet, row) for row, gpu in enumerate(inventory.gpus)}
    cap = f" and {wanted.core_percent} % of its time" if wanted.core_percent else ""
    lines = [f"no GPU has {wanted.mib} MiB{cap} free:"]
    for gpu in allowed:
        lines += _gpu_lines(gpu, free[gpu.uuid], foreign_mib.get(gpu.uuid, 0), held)
    raise NoCapacity("\n".join(lines))


def _free(fleet: Fleet, row: int) -> tuple[int, int]:
    column = fleet.column[HERE]
    return max(0, int(fleet.free_mib[row, column])), max(0, int(fleet.free_percent[row, column]))


def _too_large(mib: int, allowed: list[Gpu], hint: str) -> str:
    shared = [gpu for gpu in allowed if gpu.offers_shares]
    if not shared:
        return f"--gpu-mem is {mib} MiB: none of the {len(allowed)} GPUs may be shared (unhealthy, in MIG mode, or with coherent memory)"
    largest = max(shared, key=lambda gpu: gpu.mib)
    return (
        f"--gpu-mem is {mib} MiB: it must be 1 to {largest.mib} MiB, "
        f"what GPU {largest.index} ({largest.model}, the largest here) has{hint}"
    )


def _why_not_shared(gpu: Gpu) -> str:
    if gpu.mig:
        return "MIG mode"
    return why_whole_only(gpu.coherent) if gpu.whole_only else "unhealthy"


def _gpu_lines(gpu: Gpu, free: tuple[int, int], foreign_mib: int, held: list[RunAllocation]) -> list[str]:
    name = f"  GPU {gpu.index} ({gpu.model}, {gpu.uuid})"
    if not gpu.offers_shares:
        return [f"{name}: may not be shared ({_why_not_shared(gpu)})"]
    lines = [f"{name}: {free[0]} of {gpu.mib} MiB and {free[1]} % free"]
    for holding in sorted(held, key=lambda holding: -holding.assigned.mib):
        if holding.assigned.uuid == gpu.uuid:
            core = f", {holding.assigned.core_percent} %" if holding.assigned.core_percent else ""
            lines.append(f"    {holding.assigned.mib} MiB{core} granted to {holding.by}")
    if foreign_mib:
        lines.append(f"    {foreign_mib} MiB used by processes outside tangramctl")
    return lines
