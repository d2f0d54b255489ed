"""Where a pod goes that may use more than its guarantee: first to a GPU on which the guarantees leave room for its burst limits.

There its excess is not reclaimed for the guarantees of others, as long as no more of those are placed there. Placement tries the pod as if its
limits were its guarantees, by its own policy; if it fits nowhere so, or its limit is `max`, the pod is placed by its guarantees, as every other
pod. Bursts of other pods are not counted: on a GPU with several the excess of all together may not fit. What is assigned, and
counted from then on, is the guarantee.

With `burst.overcommit` the limits on a GPU have a bound together. Then a GPU takes a pod only if the pod's limits keep to it: those that are
numbers as they are requested, or as much as guarantees leave, if that is less; `max` as its guarantee. What each container may have in all is settled with the placement
(`vgpu.api.overcommit`). Of a pod with several containers, a GPU where guarantees leave less than a number counts as if it got all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from vgpu.api.burst import Burst
from vgpu.api.grant import Assignment
from vgpu.api.overcommit import GpuRoom, bound_mib, settle
from vgpu.api.quantity import LARGEST_GPU_MIB
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling import placement
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
    if not bursts:
        return place(fleet, request, candidates, only, preferences)
    roomy = with_limits_guaranteed(request, bursts)
    found: Placement | NoFit = NoFit()
    if roomy.containers != request.containers:
        found = place(fleet, roomy, candidates, only, preferences)
        if isinstance(found, Placement):
            found = _guaranteed(found, request)
    if isinstance(found, NoFit):
        found = place(fleet, limited(fleet, request, bursts), candidates, only, preferences)
    if isinstance(found, Placement) and fleet.limits.overcommit is not None:
        return replace(found, assignment=_settled(fleet, found.node, found.assignment, bursts))
    return found


def fitting_with_limits(
    fleet: Fleet,
    request: PodRequest,
    bursts: Mapping[str, Burst],
    candidates: Sequence[str],
    only: Mapping[str, Set[str]] | None = None,
) -> list[str]:
    """Every candidate on which `place_with_room` finds GPUs."""
    fit = placement.fitting(fleet, limited(fleet, request, bursts), candidates, only)
    roomy = with_limits_guaranteed(request, bursts)
    if fleet.limits.overcommit is None or roomy.containers == request.containers:
        return fit
    both = {*fit, *placement.fitting(fleet, roomy, candidates, only)}
    return [name for name in candidates if name in both]


def explain_with_limits(
    fleet: Fleet, request: PodRequest, bursts: Mapping[str, Burst], candidates: Sequence[str]
) -> dict[str, str]:
    """Per candidate that `place_with_room` finds no GPUs on, the reason, with figures where it is the bound of limits."""
    fit = set(fitting_with_limits(fleet, request, bursts, candidates))
    reasons = placement.explain(fleet, limited(fleet, request, bursts), candidates)
    return {
        node: (limits_reason(fleet, request, bursts, node) if reason == placement.LIMITS else "") or reason
        for node, reason in reasons.items()
        if node not in fit
    }


def limited(fleet: Fleet, request: PodRequest, bursts: Mapping[str, Burst]) -> PodRequest:
    """The request for which only GPUs count on which its limits keep to the bound; the same where limits have none."""
    if fleet.limits.overcommit is None or with_limits_guaranteed(request, bursts).containers == request.containers:
        return request
    shares = [part for part in request.containers if part.kind == "share"]
    return replace(request, limits_mib=tuple(_roomy(part, bursts.get(part.container)).mib for part in shares))


def with_limits_guaranteed(request: PodRequest, bursts: Mapping[str, Burst]) -> PodRequest:
    """The request as if its memory limits were guaranteed, of those that are numbers."""
    return replace(request, containers=tuple(_roomy(part, bursts.get(part.container)) for part in request.containers))


def limits_reason(fleet: Fleet, request: PodRequest, bursts: Mapping[str, Burst], node: str) -> str:
    """Why the pod's limits do not fit a node whose guarantees leave room for it: of the GPU that comes nearest. Empty if there is no such GPU."""
    at, overcommit = fleet.column[node], fleet.limits.overcommit
    if overcommit is None:
        return ""
    shares = [part for part in request.containers if part.kind == "share"]
    most = max((_roomy(part, bursts.get(part.container)).mib for part in shares), default=0)
    least = max((part.mib for part in shares), default=0)
    found: list[tuple[int, str]] = []
    for row, gpu in enumerate(fleet.inventory[node].gpus):
        free_mib = int(fleet.free_mib[row, at] + fleet.limits.withheld_mib[row, at])
        if free_mib < least or not gpu.offers_shares or not request.allows(gpu.model, {gpu.uuid}):
            continue
        bound = bound_mib(gpu.mib, overcommit)
        there = gpu.mib - free_mib + int(fleet.limits.excess_mib[row, at]) + min(most, free_mib)
        text = f"the memory limits of GPU {gpu.uuid} add up to {there} MiB with this pod: {bound} MiB at most (burst.overcommit {overcommit:g})"
        found.append((there - bound, text))
    return min(found, default=(0, ""))[1]


def _settled(fleet: Fleet, node: str, assignment: Assignment, bursts: Mapping[str, Burst]) -> Assignment:
    """With the limits of its containers."""
    at, overcommit = fleet.column[node], fleet.limits.overcommit
    rows = {gpu.uuid: (row, gpu.mib) for row, gpu in enumerate(fleet.inventory[node].gpus)}
    room: dict[str, GpuRoom] = {}
    for gpu in assignment.held():
        if gpu.kind != "share" or overcommit is None:
            continue
        row, total_mib = rows[gpu.uuid]
        free_mib = int(fleet.free_mib[row, at] + fleet.limits.withheld_mib[row, at])
        used_mib = total_mib - free_mib + int(fleet.limits.excess_mib[row, at])
        room[gpu.uuid] = GpuRoom(free_mib, bound_mib(total_mib, overcommit) - used_mib)
    return settle(assignment, bursts, room)


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
