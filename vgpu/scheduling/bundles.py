"""Which containers of a pod are given the same GPUs, and which of the pod's GPUs each container is given.

An init container hands its GPUs on to the containers that start after it: so the kubelet counts, and so do these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vgpu.api.grant import AssignedGpu
from vgpu.api.quantity import LARGEST_GPU_MIB
from vgpu.api.request import GpuRequest, peak
from vgpu.scheduling.packing import GpuSet


@dataclass(frozen=True, slots=True)
class Bundle:
    """Containers that are given the same GPUs, and what they need of them at their peak."""

    requests: tuple[GpuRequest, ...]
    need: GpuSet


def bundles_of(shares: Sequence[GpuRequest]) -> list[Bundle]:
    """Which containers share their GPUs, largest first. A need beyond any GPU is kept within the arrays' numbers."""
    groups = [tuple(shares)] if any(request.init for request in shares) else [(request,) for request in shares]
    bundles = [
        Bundle(
            group,
            GpuSet(
                max(request.gpus for request in group),
                min(peak(group, lambda request: request.mib), LARGEST_GPU_MIB + 1),
                peak(group, lambda request: request.core_percent),
            ),
        )
        for group in groups
    ]
    return sorted(bundles, key=lambda bundle: (-bundle.need.mib, -bundle.need.percent))


def deal(assigned: Sequence[AssignedGpu], requests: Sequence[GpuRequest]) -> dict[str, tuple[AssignedGpu, ...]]:
    """GPUs per container: each after those of the containers that keep running, so that an init container's are reused."""
    dealt: dict[str, tuple[AssignedGpu, ...]] = {}
    first = 0
    for request in requests:
        dealt[request.container] = tuple(assigned[first : first + request.gpus])
        first += 0 if request.init else request.gpus
    return dealt
