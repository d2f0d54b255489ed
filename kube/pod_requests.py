"""What a pod requests, counted as kube-scheduler counts it. Nothing else in Tangram adds up requests.

    applicant  a pod that is to be placed: its spec
    holder     a pod on a node: its spec, and what its status reports of containers and pods that were resized in place

Containers add up. Init containers run one after another before them, so the largest of them counts where it is more than that sum; native
sidecars (restartPolicy Always) stay beside whatever starts after them. Requests of the pod as a whole stand in place of those of its
containers, for the resources that may be requested so. Overhead comes on top.

Amounts are integers by resource, rounded up after they were added up: thousandths of a processor for `cpu`, bytes for memory, units for
everything else. A quantity that cannot be read counts as 0: the API server lets none through.

Source: k8s.io/component-helpers v0.36 (resource.PodRequests), with the feature gates that Kubernetes 1.36 has on; compared with it by
tests/contract/test_pod_requests.py. Amounts from ResourceClaims of node resources (DRANodeAllocatableResources, alpha) are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Final, TypeAlias

from kube.objects import Amounts, Container, Pod, PodSpec, PodStatus, Resources
from vgpu.api.errors import BadRequest
from vgpu.api.quantity import LARGEST, parse

CPU: Final = "cpu"

NANO: Final = 10**9
"""A quantity counts to a billionth, rounded up (apimachinery, resource.Quantity)."""

MILLI: Final = 10**6
"""Billionths in a thousandth."""

RESIZE_PENDING: Final = "PodResizePending"
INFEASIBLE: Final = "Infeasible"
"""Condition and reason of a resize that its node will never carry out: the spec then does not count."""

_Nanos: TypeAlias = Mapping[str, int]
_Counted: TypeAlias = Callable[[Container], _Nanos]


def pending_pod_requests(spec: PodSpec) -> dict[str, int]:
    """What a pod that is to be placed requests. Do not change what is answered: pods may share it."""
    if spec.requests is not None:
        return spec.requests
    per_pod = _whole_pod(spec)
    return _rounded(_total(spec, lambda one: _nanos(one.resources.requests), per_pod))


def bound_pod_requests(pod: Pod) -> dict[str, int]:
    """What a pod has of its node. Do not change what is answered: pods may share it."""
    spec, status = pod.spec, pod.status
    if spec.requests is not None:
        return spec.requests
    infeasible = _resize_is_infeasible(status)
    reported = {one.name: one for one in (*status.container_statuses, *status.init_container_statuses)}

    def counted(one: Container) -> _Nanos:
        wanted, known = _nanos(one.resources.requests), reported.get(one.name)
        if known is None or known.resources is None:
            return wanted
        return _effective(wanted, known.resources, known.allocated_resources, infeasible=infeasible)

    per_pod = _whole_pod(spec)
    if per_pod and status.resources is not None:
        requested = _nanos(spec.resources.requests if spec.resources is not None else None)
        effective = _effective(requested, status.resources, status.allocated_resources, infeasible=infeasible)
        per_pod = {resource: effective.get(resource, 0) for resource in per_pod}
    return _rounded(_total(spec, counted, per_pod))


def requests_of(pod: Pod) -> dict[str, int]:
    """As a holder, once it is bound; before that as an applicant."""
    return bound_pod_requests(pod) if pod.spec.node_name else pending_pod_requests(pod.spec)


def reports_resources(status: PodStatus) -> bool:
    """Does it report what the pod or a container really has? Else a holder has what its spec requests."""
    if status.resources is not None:
        return True
    return any(one.resources is not None for one in (*status.container_statuses, *status.init_container_statuses))


@lru_cache(maxsize=4096)
def _one_for_all(items: tuple[tuple[str, int], ...]) -> dict[str, int]:
    return dict(items)


def shared(requests: Mapping[str, int]) -> dict[str, int]:
    """The same, one object for all pods that request the same: for a caller that keeps thousands."""
    return _one_for_all(tuple(sorted(requests.items())))


def _total(spec: PodSpec, counted: _Counted, per_pod: _Nanos) -> dict[str, int]:
    total, sidecars, peak = dict[str, int](), dict[str, int](), dict[str, int]()
    for one in spec.containers:
        _add(total, counted(one))
    for one in spec.init_containers:
        if one.restart_policy == "Always":
            _add(total, counted(one))
            _add(sidecars, counted(one))
            _raise_to(peak, sidecars)
        else:  # its status does not count: it has ended, or ends before anything can be resized
            running = dict(sidecars)
            _add(running, _nanos(one.resources.requests))
            _raise_to(peak, running)
    _raise_to(total, peak)
    total.update(per_pod)
    _add(total, _nanos(spec.overhead))
    return total


def _whole_pod(spec: PodSpec) -> _Nanos:
    """What is requested for the pod as a whole, of the resources that may be."""
    if spec.resources is None:
        return {}
    return {name: amount for name, amount in _nanos(spec.resources.requests).items() if _for_whole_pods(name)}


def _for_whole_pods(resource: str) -> bool:
    return resource in (CPU, "memory") or resource.startswith("hugepages-")


def _effective(wanted: _Nanos, actual: Resources, allocated: Amounts | None, *, infeasible: bool) -> dict[str, int]:
    """The most of what is requested, what the node has allocated and what the container really has."""
    most = dict[str, int]()
    for one in (_nanos(actual.requests), _nanos(allocated), {} if infeasible else wanted):
        _raise_to(most, one)
    return most


def _resize_is_infeasible(status: PodStatus) -> bool:
    pending = (one for one in status.conditions if one.type == RESIZE_PENDING)
    first = next(pending, None)
    return first is not None and first.reason == INFEASIBLE


def _add(total: dict[str, int], more: _Nanos) -> None:
    for resource, amount in more.items():
        total[resource] = total.get(resource, 0) + amount


def _raise_to(most: dict[str, int], other: _Nanos) -> None:
    for resource, amount in other.items():
        most[resource] = max(most.get(resource, 0), amount)


def _rounded(nanos: Mapping[str, int]) -> dict[str, int]:
    return {name: -(-amount // (MILLI if name == CPU else NANO)) for name, amount in nanos.items()}


def _nanos(amounts: Amounts | None) -> _Nanos:
    return {resource: _nano(quantity) for resource, quantity in (amounts or {}).items()}


@lru_cache(maxsize=4096)
def _nano(quantity: str | float) -> int:
    """Billionths, rounded up."""
    try:
        return min(LARGEST * NANO, max(0, -int(-parse(str(quantity)) * NANO // 1)))
    except BadRequest:
        return 0


def amounts_of(quantities: Amounts | Mapping[str, str] | None) -> dict[str, int]:
    """Such quantities as integers, rounded up as those of pods are."""
    return _rounded({resource: _nano(quantity) for resource, quantity in (quantities or {}).items()})


def milli(quantity: str | float) -> int:
    """Thousandths of one quantity, rounded up."""
    return -(-_nano(quantity) // MILLI)


def total_of(some: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Of several pods together."""
    total = dict[str, int]()
    for one in some:
        _add(total, one)
    return total
