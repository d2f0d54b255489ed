"""Read what a pod requests, and report what is wrong with it.

Works on plain mappings (the decoded JSON of a pod), so that the webhook, the extender and the device plugin read a request in
exactly one way. A request that passes here can be granted by some cluster; whether it fits this one is placement's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from vgpu.api.errors import BadRequest
from vgpu.api.names import (
    CLASSES,
    DEFAULT,
    DEFAULT_CLASS,
    DEFAULT_LEVEL,
    DEFAULT_OVER_LIMIT_ACTION,
    DEFAULT_POLICY,
    LEVELS,
    OVER_LIMIT_ACTIONS,
    Kind,
    Names,
    OverLimitAction,
)
from vgpu.api.numa import ContainerNeeds
from vgpu.api.quantity import LARGEST_GPU_MIB, SMALLEST_BYTES, counted, memory_units, parse, whole_number

MOST_GPUS: Final = 16
"""GPUs in the largest single machines sold (guessed to be enough; HGX boards have 8)."""

FULL_CORE_PERCENT: Final = 100

_Word = TypeVar("_Word", bound=str)


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """What one container requests."""

    container: str
    kind: Kind
    gpus: int
    """GPUs (or MIG instances) wanted."""
    units: int = 0
    """Memory units over all GPUs, as the kubelet counts them; shares only."""
    mib: int = 0
    """Memory on each GPU; shares only."""
    core_percent: int = 0
    """Compute time on each GPU; 0 = not requested, a fair share of what is idle."""
    profile: str = ""
    """MIG profile; MIG only."""
    init: bool = False
    """It runs to completion before the app containers start, so that they reuse what it was given."""

    def resources(self, names: Names) -> dict[str, int]:
        """The extended resources the kubelet sees for this request."""
        match self.kind:
            case "whole":
                return {names.gpu: self.gpus}
            case "mig":
                return {names.mig(self.profile): self.gpus}
            case "share":
                core = {names.gpu_core: self.core_percent * self.gpus} if self.core_percent else {}
                return {names.gpu_mem: self.units} | core


@dataclass(frozen=True, slots=True)
class PodRequest:
    """What a pod requests, and under which conditions. Containers that request nothing of ours are left out."""

    containers: tuple[GpuRequest, ...]
    service_class: str = DEFAULT_CLASS
    level: int = DEFAULT_LEVEL
    policy: str = DEFAULT_POLICY
    over_limit_action: OverLimitAction = DEFAULT_OVER_LIMIT_ACTION
    """The user's action for a container over its limit; the operator may set a stricter one."""
    models: frozenset[str] = frozenset()
    not_models: frozenset[str] = frozenset()
    uuids: frozenset[str] = frozenset()
    not_uuids: frozenset[str] = frozenset()
    cpu_milli: int = 0
    """The pod's CPU request, 0 if its spec has none: policies use it, fitting does not."""
    limits_mib: tuple[int, ...] = ()
    """Memory limits of its shares on each of their GPUs, where those count for placement (`vgpu.scheduling.bursts`)."""
    requests: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """All that it requests beside GPUs, if they are known (`kube.pod_requests`). Placement does not use it."""
    needs: tuple[ContainerNeeds, ...] = field(default=(), compare=False, repr=False)
    """What the kubelet aligns, of every container, if it is known (`kube.alignment`). Placement does not use it."""

    def __bool__(self) -> bool:
        return bool(self.containers)

    def of_profile(self, profile: str) -> tuple[GpuRequest, ...]:
        """Its containers that request MIG instances of a profile."""
        return tuple(part for part in self.containers if part.kind == "mig" and part.profile == profile)

    def allows_model(self, model: str) -> bool:
        """May the pod have a GPU of this model?"""
        return (not self.models or model in self.models) and model not in self.not_models

    def allows(self, model: str, uuids: Set[str]) -> bool:
        """May the pod have a GPU or MIG instance of this model that answers to these UUIDs, if it is free?"""
        return (
            self.allows_model(model)
            and (not self.uuids or not uuids.isdisjoint(self.uuids))
            and uuids.isdisjoint(self.not_uuids)
        )


def pod_request(
    pod: Mapping[str, Any],
    *,
    names: Names = DEFAULT,
    unit_mib: int = 1024,
    policies: Iterable[str] = (DEFAULT_POLICY,),
    default_policy: str = DEFAULT_POLICY,
    largest_gpu_mib: int = LARGEST_GPU_MIB,
) -> PodRequest:
    """The request of a pod, given as decoded JSON. Falsy when it requests nothing of ours. `default_policy` is for pods that name none.
    A share may request `largest_gpu_mib` on each GPU at most.

    Raises BadRequest with a sentence for the user.
    """
    metadata, spec = pod.get("metadata") or {}, pod.get("spec") or {}
    init_containers, app_containers = spec.get("initContainers") or [], spec.get("containers") or []
    if not any(requests_ours(container, names) for container in [*init_containers, *app_containers]):
        return PodRequest(())
    annotations: Mapping[str, str] = metadata.get("annotations") or {}
    count = _gpu_count(annotations, names)
    in_order = [(container, container.get("restartPolicy") != "Always") for container in init_containers]
    in_order += [(container, False) for container in app_containers]
    requests = [
        _container_request(container, count, largest_gpu_mib, init=init, names=names, unit_mib=unit_mib)
        for container, init in in_order
    ]
    return PodRequest(
        tuple(request for request in requests if request),
        service_class=one_of(
            annotations.get(names.service_class, DEFAULT_CLASS), CLASSES, what=f"annotation {names.service_class}"
        ),
        level=_level(annotations, names),
        policy=one_of(
            annotations.get(names.placement, default_policy), tuple(policies), what=f"annotation {names.placement}"
        ),
        over_limit_action=one_of(
            annotations.get(names.over_limit, DEFAULT_OVER_LIMIT_ACTION),
            OVER_LIMIT_ACTIONS,
            what=f"annotation {names.over_limit}",
        ),
        models=_comma_list(annotations, names.gpu_model),
        not_models=_comma_list(annotations, names.not_gpu_model),
        uuids=_comma_list(annotations, names.gpu_uuid),
        not_uuids=_comma_list(annotations, names.not_gpu_uuid),
    )


def peak(requests: Iterable[GpuRequest], amount: Callable[[GpuRequest], int]) -> int:
    """The most of something that a pod uses at once, when each container uses `amount`.

    `requests` are in the order in which the pod starts its containers: what an init container used is free again for the
    next one, what a sidecar or an app container uses stays in use.
    """
    running = most = 0
    for request in requests:
        most = max(most, running + amount(request))
        running += 0 if request.init else amount(request)
    return most


def requests_ours(container: Mapping[str, Any], names: Names) -> bool:
    """Does a container name any resource under our domain, well formed or not?"""
    resources = container.get("resources") or {}
    return any(names.ours(key) for part in ("limits", "requests") for key in resources.get(part) or {})


def one_of(value: str, allowed: tuple[_Word, ...], *, what: str) -> _Word:
    """`value`, when it is one of `allowed`; BadRequest names the others."""
    for one in allowed:
        if value == one:
            return one
    raise BadRequest(f"{what} is {value!r}: it must be one of {', '.join(allowed)}")


def _container_request(
    container: Mapping[str, Any], count: int, largest_mib: int, *, init: bool, names: Names, unit_mib: int
) -> GpuRequest | None:
    if not requests_ours(container, names):
        return None
    name = str(container.get("name", ""))
    limits = _limits(container, names)
    kinds = _kinds(limits, name, names)
    if kinds == {"share"}:
        return _share(limits, name, count, largest_mib, init=init, names=names, unit_mib=unit_mib)
    (resource,) = limits
    gpus = whole_number(limits[resource], what=f"container {name}: {resource}", at_most=MOST_GPUS)
    profile = names.mig_profile(resource)
    if profile is None:
        return GpuRequest(name, "whole", gpus, core_percent=FULL_CORE_PERCENT, init=init)
    return GpuRequest(name, "mig", gpus, profile=profile, init=init)


def _limits(container: Mapping[str, Any], names: Names) -> dict[str, str]:
    """Our limits of a container; requests, where written, must be the same."""
    name, resources = container.get("name", ""), container.get("resources") or {}
    limits = {key: str(value) for key, value in (resources.get("limits") or {}).items() if names.ours(key)}
    requests = {key: str(value) for key, value in (resources.get("requests") or {}).items() if names.ours(key)}
    for key, value in requests.items():
        if key not in limits or (limits[key] != value and not _equal(limits[key], value, f"container {name}: {key}")):
            raise BadRequest(
                f"container {name}: {key} is requested as {value} and limited to {limits.get(key, 'nothing')}: write it under limits only, or the same in both"
            )
    return limits


def _equal(limit: str, request: str, what: str) -> bool:
    try:
        return parse(limit) == parse(request)
    except BadRequest as error:
        raise BadRequest(f"{what}: {error}") from None


def _kinds(limits: Mapping[str, str], name: str, names: Names) -> set[Kind]:
    """The kind of request, after making sure that there is exactly one in this container."""
    kinds: dict[str, Kind] = {}
    for resource in limits:
        if resource in (names.gpu_mem, names.gpu_core):
            kinds[resource] = "share"
        elif resource == names.gpu:
            kinds[resource] = "whole"
        elif names.mig_profile(resource):
            kinds[resource] = "mig"
        else:
            known = f"{names.gpu_mem}, {names.gpu_core}, {names.gpu}, {names.domain}/mig-<profile>"
            raise BadRequest(f"container {name}: {resource} is no resource of Tangram: it must be one of {known}")
    found = set(kinds.values())
    if len(found) > 1 or ("mig" in found and len(kinds) > 1):
        inside = (
            ". No MIG instance is shared: the library limits shares of whole GPUs only"
            if found >= {"mig", "share"}
            else ""
        )
        raise BadRequest(
            f"container {name} requests {' and '.join(sorted(limits))}: a container takes either a share (gpu-mem, gpu-core), or whole GPUs (gpu), or MIG instances of one profile{inside}"
        )
    return found


def _share(
    limits: Mapping[str, str], name: str, count: int, largest_mib: int, *, init: bool, names: Names, unit_mib: int
) -> GpuRequest:
    if names.gpu_mem not in limits:
        raise BadRequest(
            f"container {name} requests {names.gpu_core} without {names.gpu_mem}: a share needs memory, such as {names.gpu_mem}: 8Gi"
        )
    what = f"container {name}: {names.gpu_mem}"
    most = min(max(1, largest_mib // unit_mib) * count, SMALLEST_BYTES - 1)
    units = memory_units(limits[names.gpu_mem], unit_mib=unit_mib, what=what, most=most)
    if units % count:
        raise BadRequest(
            f"{what} is {limits[names.gpu_mem]}, which is {counted(units)} of {unit_mib} MiB: it does not divide over {count} GPUs ({names.gpu_count})"
        )
    core = 0
    if names.gpu_core in limits:
        what = f"container {name}: {names.gpu_core}"
        core = whole_number(limits[names.gpu_core], what=what, at_most=FULL_CORE_PERCENT * count)
        if core % count:
            raise BadRequest(f"{what} is {core}: it does not divide over {count} GPUs ({names.gpu_count})")
    return GpuRequest(
        name, "share", count, units=units, mib=units // count * unit_mib, core_percent=core // count, init=init
    )


def _gpu_count(annotations: Mapping[str, str], names: Names) -> int:
    if names.gpu_count not in annotations:
        return 1
    return whole_number(annotations[names.gpu_count], what=f"annotation {names.gpu_count}", at_most=MOST_GPUS)


def _level(annotations: Mapping[str, str], names: Names) -> int:
    text = annotations.get(names.level, str(DEFAULT_LEVEL))
    return int(one_of(text, tuple(str(level) for level in LEVELS), what=f"annotation {names.level}"))


def _comma_list(annotations: Mapping[str, str], key: str) -> frozenset[str]:
    if key not in annotations:
        return frozenset()
    values = frozenset(part.strip() for part in annotations[key].split(","))
    if "" in values:
        raise BadRequest(
            f"annotation {key} is {annotations[key]!r}: it must be a list of names by comma, none of them empty"
        )
    return values
