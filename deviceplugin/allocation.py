"""Choose which pod a request of the kubelet is for, and which device IDs it gets.

The kubelet names no pod. It admits one pod at a time: container by container in order (init first), and for each container
resource by resource in *random* order. So the pod that a call is for follows from the pods that wait, their requests, and what was allocated since.
This module draws that conclusion and is pure: it uses no gRPC, no clock and no Kubernetes.

Two pods of the same size on different GPUs cannot be distinguished at the first request. Then one is guessed; the pod in flight is
kept until a request does not fit it; a request that shows the guess to be wrong moves what was given to the pod that explains all
of it. What the kubelet may mix up so are pods of equal counts: per GPU, its records stay right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Final

from vgpu.api.burst import Burst
from vgpu.api.coherent import why_whole_only
from vgpu.api.contract import uuid_of
from vgpu.api.errors import Refused
from vgpu.api.grant import Assignment
from vgpu.api.inventory import Inventory, Orphan
from vgpu.api.names import DEFAULT_OVER_LIMIT_ACTION, Names, OverLimitAction
from vgpu.api.request import FULL_CORE_PERCENT, GpuRequest

MOST_SLOTS: Final = 8192
"""Of one GPU: 2 TiB in units of 256 MiB, the smallest there are. Guessed; the kubelet takes 4 MiB of IDs, some 90,000 for all GPUs."""


@dataclass(frozen=True, slots=True)
class NodePod:
    """A pod of this node that has an assignment and is not finished."""

    uid: str
    namespace: str
    name: str
    order: tuple[int, str]
    """Pods come to the kubelet in this order, as far as we can know."""
    requests: tuple[GpuRequest, ...]
    """In the order in which the kubelet serves containers."""
    assignment: Assignment
    waiting: bool = True
    """The kubelet has not admitted it yet (no status.startTime)."""
    leaving: bool = False
    """It is being deleted."""
    over_limit_action: OverLimitAction = DEFAULT_OVER_LIMIT_ACTION
    """What its user wants done when it uses more memory than it was granted."""
    ignored: tuple[str, ...] = ()
    """Why annotations of class and level do not count, in sentences; the assignment has what does."""
    earlier: frozenset[str] = frozenset()
    """Its containers in which the library must also be where the release before mounted it."""
    started: str = ""
    """When the kubelet admitted it (status.startTime); empty = not yet."""
    bursts: Mapping[str, Burst] = field(default_factory=dict)
    """Container -> limits above its guarantee, as its annotations request them now."""
    burst_ignored: str = ""
    """Why its annotations of bursts do not count, in a sentence."""

    def __str__(self) -> str:
        return f"pod {self.namespace}/{self.name}"


Given = Mapping[tuple[str, str], Collection[str]]
"""(container, resource) -> device IDs that the kubelet gave."""

Done = Mapping[str, Given]
"""Pod UID -> what it was given."""


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """The kubelet wants this many devices of a resource for one container."""

    resource: str
    quantity: int


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that was served."""

    request: DeviceRequest
    ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class PodInFlight:
    """The pod that the kubelet is admitting, and all that it was given since its admission began."""

    uid: str = ""
    calls: tuple[ServedRequest, ...] = ()
    taken_over: int = 0
    """The first so many calls were taken for another pod's, until this one explained them too."""

    def own(self) -> PodInFlight:
        """Without those."""
        return PodInFlight(self.uid, self.calls[self.taken_over :])


@dataclass(frozen=True, slots=True)
class Choice:
    """A container that a request may be for."""

    node_pod: NodePod
    container: str
    gpus: Mapping[str, int]
    """UUID -> devices of the resource that the assignment means there."""
    place: int = -1
    """Of the container among the pod's requests."""
    moves: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    """What the flight was given and is this container's by this choice, per (container, resource); the pod guessed before loses it."""
    anew: bool = False
    """The kubelet admits this pod again: its entry in the ledger was another pod's, or was released."""
    swapped: bool = False
    """The kubelet's devices lie on other GPUs: it took a pod of the same size for this one."""


def assigned_devices(node_pod: NodePod, request: GpuRequest, resource: str, names: Names) -> dict[str, int]:
    """UUID -> devices of `resource` that the container's assignment means. Empty when it does not match the request."""
    gpus = node_pod.assignment.containers.get(request.container, ())
    quantity = request.resources(names).get(resource, 0)
    if len(gpus) != request.gpus or quantity % max(1, len(gpus)):
        return {}
    return {gpu.uuid: quantity // len(gpus) for gpu in gpus}


def contradiction(requests: Iterable[GpuRequest], assignment: Assignment) -> str | None:
    """Why an assignment cannot be what Tangram decided for these requests, or None."""
    for request in requests:
        gpus = assignment.containers.get(request.container)
        if gpus is None or len(gpus) != request.gpus:
            found = 0 if gpus is None else len(gpus)
            return f"container {request.container} is assigned {found} GPUs and requests {request.gpus}"
        for gpu in gpus:
            if gpu.kind != request.kind or gpu.profile != request.profile:
                return f"container {request.container} is assigned a {gpu.kind} {gpu.profile} and requests a {request.kind} {request.profile}"
            if request.kind == "share" and (gpu.mib, gpu.core_percent) != (request.mib, request.core_percent):
                return (
                    f"container {request.container} is assigned {gpu.mib} MiB and {gpu.core_percent} percent of {gpu.uuid}"
                    f" and requests {request.mib} MiB and {request.core_percent} percent"
                )
    return None


def candidates(
    node_pods: Sequence[NodePod], done: Done, flight: PodInFlight, request: DeviceRequest, names: Names
) -> Iterator[Choice]:
    """Containers that the request may be for, the likeliest first."""
    in_flight = next((t for t in node_pods if t.uid == flight.uid), None)
    if in_flight and (choice := _next(in_flight, done.get(flight.uid, {}), request, names)):
        yield choice
    # the pod before this one came and went: its devices are not this one's, though it requested as many
    if in_flight and flight.taken_over and (choice := _instead(in_flight, flight.own(), request, names)):
        yield choice

    def likelihood(node_pod: NodePod) -> tuple[bool, bool, tuple[int, str]]:
        return node_pod.leaving, bool(done.get(node_pod.uid)), node_pod.order

    waiting = sorted((node_pod for node_pod in node_pods if node_pod.waiting), key=likelihood)
    others = [node_pod for node_pod in waiting if node_pod.uid != flight.uid]
    if flight.calls and (in_flight is None or in_flight.waiting):
        untouched = (node_pod for node_pod in others if not done.get(node_pod.uid))
        yield from filter(None, (_instead(node_pod, flight, request, names) for node_pod in untouched))
    yield from filter(None, (_next(node_pod, done.get(node_pod.uid, {}), request, names) for node_pod in others))
    # A waiting pod has devices already, and requests such again: then they were taken by a twin of it. If the twin is among the
    # admitted that we gave nothing, what is its own is left over for this one; else the twin is gone and has left everything.
    taken_for = [node_pod for node_pod in waiting if done.get(node_pod.uid)]
    again = [choice for node_pod in taken_for if (choice := _next(node_pod, {}, request, names))]
    if again:
        admitted = (node_pod for node_pod in node_pods if not node_pod.waiting)
        twins = sorted((node_pod for node_pod in admitted if not done.get(node_pod.uid)), key=likelihood)
        yield from filter(None, (_next(node_pod, {}, request, names) for node_pod in twins))
    yield from (replace(choice, anew=True) for choice in again)


def _next(node_pod: NodePod, given: Given, request: DeviceRequest, names: Names) -> Choice | None:
    """The request, if it is one that the kubelet would make next for this pod."""
    for place, wanted in enumerate(node_pod.requests):
        left = {r: n for r, n in wanted.resources(names).items() if (wanted.container, r) not in given}
        if left:
            fits = left.get(request.resource) == request.quantity
            gpus = assigned_devices(node_pod, wanted, request.resource, names) if fits else {}
            return Choice(node_pod, wanted.container, gpus, place) if gpus else None
    return None


def _instead(node_pod: NodePod, flight: PodInFlight, request: DeviceRequest, names: Names) -> Choice | None:
    """This pod, if everything since the flight began and the request too can have been for it."""
    moves: dict[tuple[str, str], frozenset[str]] = {}
    for call in flight.calls:
        step = _next(node_pod, moves, call.request, names)
        if step is None:
            return None
        moves[step.container, call.request.resource] = call.ids
    last = _next(node_pod, moves, request, names)
    return replace(last, moves=moves) if last else None


def prefer(choice: Choice, available: Iterable[str], must_include: Collection[str], quantity: int) -> list[str] | None:
    """Device IDs on the choice's GPUs, `must_include` among them. None when too few are free there."""
    picked = list(must_include)
    wanted = Counter(choice.gpus)
    wanted.subtract(Counter(uuid_of(one) for one in picked))
    free = frozenset(available) - frozenset(picked) if picked else frozenset(available)
    for uuid in choice.gpus:
        missing = min(wanted[uuid], quantity - len(picked))
        picked += islice(_free_on(uuid, free), max(0, missing))
    return picked if len(picked) == quantity else None


def _free_on(uuid: str, free: Collection[str]) -> Iterator[str]:
    """Those that lie on this GPU, the lowest slots first. A few of a thousand are taken: looking up names beats sorting them."""
    if uuid in free:
        yield uuid  # a whole GPU or a MIG instance
    for slot in range(MOST_SLOTS):
        if (one := f"{uuid}-{slot}") in free:
            yield one


def prefer_anywhere(
    available: Iterable[str], must_include: Collection[str], near: Collection[str], quantity: int
) -> list[str]:
    """As many IDs on as few GPUs as can be: GPUs in `near` first, then those with most free. For pods that were swapped."""
    picked = list(must_include)
    taken, free = set(picked), dict[str, list[str]]()
    for one in available:
        if one not in taken:
            free.setdefault(uuid_of(one), []).append(one)
    for uuid in sorted(free, key=lambda u: (u not in near or len(free[u]) < quantity, -len(free[u]), u)):
        picked += sorted(free[uuid], key=_slot)[: quantity - len(picked)]
    return picked


def choose_container(
    choices: Iterable[Choice], ids: Collection[str], request: DeviceRequest, *, must_match: bool
) -> Choice:
    """The pod of these devices.

    First a container whose GPUs they lie on in the counts assigned; then one whose pod was assigned these GPUs (an app container
    reuses any of an init container's devices). Where devices follow the environment and not these IDs (`must_match` is False) a
    pod of the same size will do.

    Raises Refused.
    """
    found = Counter(uuid_of(one) for one in ids)
    listed: list[Choice] = []
    for choice in choices:
        if found == Counter(choice.gpus):
            return choice
        listed.append(choice)
    if not listed:
        raise Refused(
            f"no pod that waits on this node was assigned {request.quantity} {request.resource}: pods that request GPUs have to be placed by Tangram's scheduler"
        )
    for choice in listed:
        if found.keys() <= _gpus_of_pod(choice.node_pod):
            return choice
    first = listed[0]
    if must_match:
        raise Refused(
            f"the kubelet chose devices on {', '.join(sorted(found))} for {first.node_pod}, which was assigned {', '.join(first.gpus)}"
        )
    return replace(first, swapped=True)


def check_capacity(
    node_pods: Iterable[NodePod], gpus: Collection[str], inventory: Inventory, orphans: Collection[Orphan] = ()
) -> None:
    """Invariant I1 on these GPUs: what pods were assigned is at most what the GPU has. `orphans` are pods that the API lacks
    and whose processes may run on. Raises Refused."""
    mib, percent, whole, instances = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    held = [node_pod.assignment.held() for node_pod in node_pods if _uses_any(node_pod, gpus)]
    for assigned in chain(*held, *(orphan.held for orphan in orphans)):
        if assigned.uuid in gpus:
            mib[assigned.uuid] += assigned.mib if assigned.kind == "share" else 0
            percent[assigned.uuid] += assigned.core_percent if assigned.kind == "share" else 0
            whole[assigned.uuid] += assigned.kind == "whole"
            instances[assigned.uuid] += assigned.kind == "mig"
    for uuid in gpus:
        gpu = inventory.gpu(uuid)
        if gpu is None:
            raise Refused(f"{uuid} is no GPU of this node")
        if gpu.withdrawn:
            why = "; ".join(map(str, gpu.withdrawn))
            raise Refused(
                f"GPU {gpu.index} ({gpu.uuid}) is withdrawn from new pods ({why}): a pod that was placed there before has to be made again"
            )
        if gpu.whole_only and (mib[uuid] or percent[uuid]):
            raise Refused(
                f"GPU {gpu.index} ({gpu.uuid}) is given whole only, since {why_whole_only(gpu.coherent)} and no memory limit is enforced on it: pods of this node were assigned shares of it"
            )
        if mib[uuid] > gpu.mib or percent[uuid] > FULL_CORE_PERCENT:
            raise Refused(
                f"GPU {uuid} has {gpu.mib} MiB and {FULL_CORE_PERCENT} percent of compute time: pods of this node were assigned {mib[uuid]} MiB and {percent[uuid]} percent of it{_gone(orphans, uuid)}"
            )
        if whole[uuid] + instances[uuid] > 1 or (whole[uuid] and (mib[uuid] or percent[uuid])):
            raise Refused(f"GPU {uuid} was assigned to one container alone and to others as well{_gone(orphans, uuid)}")


def _gone(orphans: Iterable[Orphan], uuid: str) -> str:
    """Which of the pods that use a GPU have left the API, as the end of a sentence."""
    names = sorted(orphan.key for orphan in orphans if any(gpu.uuid == uuid for gpu in orphan.held))
    them = f"pod{'s' if len(names) > 1 else ''} {', '.join(names)}"
    return f", counting {them}, deleted by force, whose processes still run" if names else ""


def _gpus_of_pod(node_pod: NodePod) -> set[str]:
    return {gpu.uuid for gpus in node_pod.assignment.containers.values() for gpu in gpus}


def _uses_any(node_pod: NodePod, gpus: Collection[str]) -> bool:
    for assigned_gpus in node_pod.assignment.containers.values():
        for assigned in assigned_gpus:
            if assigned.uuid in gpus:
                return True
    return False


def _slot(device_id: str) -> int:
    tail = device_id.rpartition("-")[2]
    return int(tail) if len(tail) < 8 and tail.isdigit() else 0
