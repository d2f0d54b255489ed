"""Decide what a pod's spec must carry before it is stored: a patch with warnings, or a denial.

Pure: reads a decoded pod and the cluster's rules, answers with `Admitted` or raises BadRequest. It knows no cluster: whether a
well-formed request fits is placement's business. Applying the patch and deciding again changes nothing (the API server may call
twice), and a pod that requests nothing of ours is left alone.

What a pod that requests GPUs gets
    limits, requests    quantities in the cluster's units, the same in both
    its containers      NVIDIA_VISIBLE_DEVICES and TANGRAM_GPUS, read at start from the annotation that the Binding brings; those with MIG instances
                       neither where MIG on demand is on, since the device plugin's Allocate decides what they see
    shares              our library in front of LD_PRELOAD; the mounts come from the device plugin
    other containers    NVIDIA_VISIBLE_DEVICES=void, because images often carry `all`
    the pod             scheduler, service class (that of its priority class, if the operator set one); runtime class, priority class,
                       placement policy and burst limit if the operator set them

A priority class needs care: the API server's Priority plugin has run before and has written spec.priority. It runs again
after a webhook changed the pod and refuses a number that does not match the class, so the number is taken out with it
(plugin/pkg/admission/priority, admission/reinvocation.go in Kubernetes 1.36).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec

from kube.patch import pointer
from vgpu.api.contract import CONTAINER_LIBRARY, EARLIER_CONTAINER_LIBRARY, GPUS_ENV, NVIDIA_ENV, PRELOAD_ENV
from vgpu.api.errors import BadRequest
from vgpu.api.names import DEFAULT_POLICY
from vgpu.api.quantity import counted, rounds_up
from vgpu.api.request import GpuRequest, PodRequest, pod_request
from webhook import checks
from webhook.admission_rules import STOCK_SCHEDULER, AdmissionRules
from webhook.burst import burst
from webhook.objects import AdmissionContainer, AdmissionPod, pod_of

DEFAULT_NAMESPACE: Final = "default"
"""Of a pod that names none. Specified by Kubernetes."""

NO_GPU: Final = {"name": NVIDIA_ENV, "value": checks.NO_GPU_VALUES[0]}


Op: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class Patch:
    """A JSON patch (RFC 6902), built in the order in which it applies.

    `add` on a member that exists replaces it, which makes most of a patch shorter than a list of cases.
    """

    ops: list[Op] = field(default_factory=list)

    def set(self, path: str, value: Any) -> None:
        """Write a member, or insert before an element of a list."""
        self.ops.append({"op": "add", "path": path, "value": value})

    def remove(self, path: str) -> None:
        """Remove a member; it must be there."""
        self.ops.append({"op": "remove", "path": path})

    def put(self, parent: str, members: dict[str, str], *, there: bool) -> None:
        """Write members into the object at `parent`, which is made when it is not `there`."""
        if members and not there:
            self.set(parent, members)
        elif members:
            for key, value in members.items():
                self.set(parent + pointer(key), value)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A pod that is admitted."""

    ops: tuple[Op, ...] = ()
    warnings: tuple[str, ...] = ()


def mutate(document: Mapping[str, Any], rules: AdmissionRules, namespace: str = "") -> Admitted:
    """What to change in a pod that is being created. `namespace` is where; empty = as in the pod.

    Raises BadRequest with a sentence when it is denied.
    """
    try:
        pod = pod_of(document)
    except msgspec.ValidationError as error:
        raise BadRequest(f"this is no pod that Kubernetes would store: {error}") from None
    checks.own_annotations(pod, rules.names)
    checks.misplaced_requests(pod, rules.names)
    request = _request(document, rules)
    if not request:
        return Admitted()
    checks.whole_pod(pod, request, rules)
    namespace = namespace or pod.metadata.namespace or DEFAULT_NAMESPACE
    patch = Patch()
    warnings = [*_confine(pod, request, rules, namespace), *checks.without_effect(pod, request, rules.names)]
    added, notes = burst(pod, request, rules, namespace)
    warnings += notes
    added[rules.names.service_class] = checks.service_class(pod, rules, namespace)
    requests = {request.container: request for request in request.containers}
    for path, container in pod.located():
        wanted = requests.get(container.name)
        if wanted is None:
            _hide_gpus(patch, path, container)
        else:
            warnings += _normalise(patch, path, container, wanted, rules)
            _inject(patch, path, container, wanted, rules)
    _pod_wide(patch, pod, added, rules)
    return Admitted(tuple(patch.ops), tuple(warnings))


def _request(document: Mapping[str, Any], rules: AdmissionRules) -> PodRequest:
    try:
        return pod_request(
            document, names=rules.names, unit_mib=rules.unit_mib, policies=rules.policies,
            default_policy=rules.default_policy, largest_gpu_mib=rules.largest_gpu_mib,
        )  # fmt: skip
    except BadRequest as error:
        raise BadRequest(f"{error}{checks.by_limit_range(document, rules.names)}") from None


def _normalise(
    patch: Patch, path: str, container: AdmissionContainer, request: GpuRequest, rules: AdmissionRules
) -> list[str]:
    """Quantities as the kubelet counts them."""
    resources = container.resources
    limits, requests = resources.limits or {}, resources.requests
    wanted = {name: str(number) for name, number in request.resources(rules.names).items()}
    patch.put(f"{path}/resources/limits", _differing(wanted, limits), there=True)
    patch.put(f"{path}/resources/requests", _differing(wanted, requests or {}), there=requests is not None)
    requested = limits.get(rules.names.gpu_mem)
    if requested is None or not rounds_up(str(requested), unit_mib=rules.unit_mib):
        return []
    return [
        f"container {container.name}: {rules.names.gpu_mem} {requested} is rounded up to {counted(request.units)} of {rules.unit_mib} MiB ({request.units * rules.unit_mib} MiB)"
    ]


def _differing(wanted: dict[str, str], found: Mapping[str, str | int | float]) -> dict[str, str]:
    return {name: number for name, number in wanted.items() if str(found.get(name)) != number}


def _inject(patch: Patch, path: str, container: AdmissionContainer, request: GpuRequest, rules: AdmissionRules) -> None:
    """Variables of a container that requests GPUs. Ours come first, so that the user's own may refer to them."""
    field_path = f"metadata.annotations['{rules.names.gpus_of(container.name)}']"
    checks.visible_gpus(container, field_path)
    if (
        request.kind == "mig" and rules.mig_on_demand
    ):  # a slot has no UUID before Allocate, which sets what the container sees
        for index in reversed(range(len(container.env))):
            if container.env[index].name in (NVIDIA_ENV, GPUS_ENV):  # of a pod that was admitted before
                patch.remove(f"{path}/env/{index}")
        return
    names = {env.name for env in container.env}
    reference = {"fieldRef": {"apiVersion": "v1", "fieldPath": field_path}}
    added: list[Op] = [{"name": name, "valueFrom": reference} for name in (NVIDIA_ENV, GPUS_ENV) if name not in names]
    if request.kind == "share":
        for index, env in enumerate(container.env):
            if env.name == PRELOAD_ENV and env.value != (text := _preloading(env.value or "")):
                patch.set(f"{path}/env/{index}/value", text)
        if PRELOAD_ENV not in names:
            added.append({"name": PRELOAD_ENV, "value": CONTAINER_LIBRARY})
    _prepend(patch, path, container, added)


def _preloading(value: str) -> str:
    """LD_PRELOAD with the library in front, once. A copy of a pod of an earlier release names it at the path that it had then."""
    others = (path for path in value.split(":") if path not in ("", CONTAINER_LIBRARY, EARLIER_CONTAINER_LIBRARY))
    return ":".join((CONTAINER_LIBRARY, *others))


def _hide_gpus(patch: Patch, path: str, container: AdmissionContainer) -> None:
    """A container that requests nothing; NVIDIA's own plugin serves those that request its resources."""
    if any(name.startswith(checks.NVIDIA_DOMAIN) for name in container.resource_names()):
        return
    checks.no_gpus(container)
    if all(env.name != NVIDIA_ENV for env in container.env):
        _prepend(patch, path, container, [dict(NO_GPU)])


def _prepend(patch: Patch, path: str, container: AdmissionContainer, added: list[Op]) -> None:
    if not container.env and added:
        patch.set(f"{path}/env", added)
        return
    for entry in reversed(added):
        patch.set(f"{path}/env/0", entry)


def _pod_wide(patch: Patch, pod: AdmissionPod, wanted: dict[str, str], rules: AdmissionRules) -> None:
    """`wanted` are annotations of pods that lack them, the service class among them."""
    spec, annotations = pod.spec, pod.metadata.annotations
    if rules.default_policy != DEFAULT_POLICY:
        wanted[rules.names.placement] = rules.default_policy
    missing = {key: value for key, value in wanted.items() if key not in (annotations or {})}
    patch.put("/metadata/annotations", missing, there=annotations is not None)
    if (spec.scheduler_name or STOCK_SCHEDULER) == STOCK_SCHEDULER and spec.scheduler_name != rules.scheduler_name:
        patch.set("/spec/schedulerName", rules.scheduler_name)
    if rules.runtime_class and not spec.runtime_class_name:
        patch.set("/spec/runtimeClassName", rules.runtime_class)
    priority_class = rules.priority_classes.get(wanted[rules.names.service_class])
    if priority_class and not spec.priority_class_name:
        patch.set("/spec/priorityClassName", priority_class)
        if spec.priority is not None:
            patch.remove("/spec/priority")
        if spec.preemption_policy:
            patch.remove("/spec/preemptionPolicy")


def _confine(pod: AdmissionPod, request: PodRequest, rules: AdmissionRules, namespace: str) -> list[str]:
    """One warning for each way out of a share; BadRequest where the operator does not admit such pods.

    All containers of a pod with a share are checked: what one of them may do, it may do for the others.
    """
    if all(request.kind != "share" for request in request.containers):
        return []
    ways = checks.ways_out(pod, rules.node_folders)
    if ways and rules.privileged == "deny" and namespace not in rules.privileged_namespaces:
        raise BadRequest(
            f"{ways[0]}: a pod with a GPU share must stay within its limits, so do without, request whole GPUs ({rules.names.gpu}), or have the operator name namespace {namespace} in the chart value webhook.privilegedNamespaces"
        )
    return [f"{way}: it can leave the limits of its GPU share" for way in ways]
