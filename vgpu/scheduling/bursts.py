"""Where a pod goes that may use more than its guarantee: first to a GPU on which the guarantees leave room for its burst limits.

There its excess is not reclaimed for the guarantees of others, as long as no more of those are placed there. Placement tries the pod as if its
limits were its guarantees, by its own policy; if it fits nowhere so, or its limit is `max`, the pod is placed by its guarantees, as every other
pod. Bursts of other pods are not counted: on a GPU with several the excess of all together may not fit. What is assigned, and
counted from then on, is the guarantee.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from vgpu.api.burst import Burst
from vgpu.api.quantity import LARGEST_GPU_MIB
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import NoFit, Placement, place
from vgpu.scheduling.preferences import Preferences


def place_with_room(
    fleet: Fleet,
    request: PodRequest,
    bursts: Mapping[str, Burst],
    candidates: Sequence[str],
    only: Mapping[str, Set[str]] | None = None,
    preferences: Preferences | None = None,
) -> Placement | NoFit:
    """As `placement.place`. `bursts`: container -> its limits, of those that may burst; without any the answer is that of `place`."""
    roomy = tuple(_roomy(part, bursts.get(part.container)) for part in request.containers)
    if roomy != request.containers:
        found = place(fleet, replace(request, containers=roomy), candidates, only, preferences)
        if isinstance(found, Placement):
            return _guaranteed(found, request)
    return place(fleet, request, candidates, only, preferences)


def _roomy(part: GpuRequest, burst: Burst | None) -> GpuRequest:
    """The container as if its memory limit were its guarantee."""
    return part if burst is None or burst.mib == LARGEST_GPU_MIB else replace(part, mib=burst.mib)


def _guaranteed(found: Placement, request: PodRequest) -> Placement:
    """The same GPUs with what each container is guaranteed of them."""
    containers = dict(found.assignment.containers)
    for part in request.containers:
        if part.kind == "share":
            containers[part.container] = tuple(replace(gpu, mib=part.mib) for gpu in containers[part.container])
    return replace(found, assignment=replace(found.assignment, containers=containers))
