"""What a pod that requests GPUs must not contain.

Every check raises BadRequest with a sentence, or passes. The request itself (quantities, classes, policies) is judged by
`vgpu.api.request`; here it is about the rest of the pod: whatever would let it bypass the scheduler, unload the library or reach
GPUs that it was not assigned. What is allowed is not changed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Final

from vgpu.api.confinement import Rights, folder_behind, way_out
from vgpu.api.contract import GPUS_ENV, NVIDIA_ENV, PRELOAD_ENV
from vgpu.api.errors import BadRequest
from vgpu.api.mount_paths import refusal
from vgpu.api.names import CLASSES, DEFAULT_CLASS, Names
from vgpu.api.request import PodRequest
from vgpu.api.uuids import kind_of_uuid
from webhook.admission_rules import EVERYWHERE, STOCK_SCHEDULER, AdmissionRules
from webhook.objects import AdmissionContainer, AdmissionPod

NO_GPU_VALUES: Final = ("void", "none", "")
"""NVIDIA_VISIBLE_DEVICES values by which NVIDIA's container runtime gives no GPU. Specified by NVIDIA."""

MOST_URGENT: Final = CLASSES[0]
NVIDIA_DOMAIN: Final = "nvidia.com/"
ALIKE: Final = 0.8
"""Of two names, at least this part is the same where one counts as a typing error of the other. Guessed: one or two letters."""
A_UUID: Final = "GPU-8e1c3f1a-0000-0000-0000-000000000001"
"""An example of one."""
MOST_SLICES: Final = 7
"""Compute slices of a GPU in MIG mode: every one so far has 4 or 7. Specified by NVIDIA."""
LIMIT_RANGER: Final = "kubernetes.io/limit-ranger"
"""Annotation in which the API server records what a LimitRange set. Specified by Kubernetes (plugin/pkg/admission/limitranger)."""
SHOWN_CHARACTERS: Final = 300
"""Characters of it that are repeated."""


def own_annotations(pod: AdmissionPod, names: Names) -> None:
    """Only the scheduler writes what was decided for a pod."""
    for key in pod.metadata.annotations or {}:
        if key.startswith(names.own_annotation_prefixes):
            raise BadRequest(f"annotation {key} is written by Tangram when it places a pod: leave it out")


def unknown_annotations(pod: AdmissionPod, names: Names) -> None:
    """A typing error must not silently change what is requested."""
    known = sorted(names.user_annotations)
    domain = f"{names.domain}/"
    for key in pod.metadata.annotations or {}:
        if names.ours(key) and key not in known and not names.burst_annotation(key):
            named = key.removeprefix(domain)  # all share the domain
            words = [one.removeprefix(domain) for one in (*known, *names.burst_annotations)]
            near = get_close_matches(named, words, n=1, cutoff=ALIKE)
            rather = f"did you mean {domain}{near[0]}?" if near else f"it must be one of {', '.join(known)}"
            raise BadRequest(f"annotation {key} is unknown to Tangram: {rather}")


def misplaced_requests(pod: AdmissionPod, names: Names) -> None:
    """Only init and app containers request GPUs."""
    for container in pod.spec.ephemeral_containers:
        if any(map(names.ours, container.resource_names())):
            raise BadRequest(f"ephemeral container {container.name} requests GPUs: only init and app containers can")
    whole = pod.spec.resources
    if whole and any(map(names.ours, [*(whole.limits or ()), *(whole.requests or ())])):
        raise BadRequest("spec.resources requests GPUs for the pod as a whole: write it under a container's resources")


def past_the_scheduler(pod: AdmissionPod, rules: AdmissionRules) -> None:
    """A node would refuse a pod that Tangram did not place, so it is better denied now."""
    if pod.spec.node_name:
        raise BadRequest(
            f"spec.nodeName is {pod.spec.node_name}: a pod that requests GPUs is placed by the scheduler; to choose the node use a nodeSelector"
        )
    named = pod.spec.scheduler_name or STOCK_SCHEDULER
    allowed = {STOCK_SCHEDULER, rules.scheduler_name, *rules.other_schedulers}
    if named not in allowed:
        raise BadRequest(
            f"spec.schedulerName is {named}, which does not place GPU shares: leave it out or write {' or '.join(sorted(allowed - {STOCK_SCHEDULER}) or [STOCK_SCHEDULER])}"
        )


def names_of_gpus(request: PodRequest, names: Names) -> None:
    """Names that no GPU can have. One that only this cluster's GPUs do not have is not seen here: such a pod waits."""
    for key, uuids in ((names.gpu_uuid, request.uuids), (names.not_gpu_uuid, request.not_uuids)):
        for uuid in sorted(uuids):
            if kind_of_uuid(uuid) is None:
                raise BadRequest(
                    f"annotation {key} names {uuid!r}: it must be a whole UUID as nvidia-smi -L prints it, such as {A_UUID}"
                )
    for part in request.containers:
        if part.kind == "mig" and int(part.profile.partition("g.")[0]) > MOST_SLICES:
            raise BadRequest(
                f"container {part.container} requests {names.mig(part.profile)}: a GPU has at most {MOST_SLICES} compute slices, it must be {names.domain}/mig-1g.<memory>gb to mig-{MOST_SLICES}g.<memory>gb"
            )


def without_effect(pod: AdmissionPod, request: PodRequest, names: Names) -> list[str]:
    """What the pod sets and nothing reads, a sentence each."""
    if names.gpu_count in (pod.metadata.annotations or {}) and all(part.kind != "share" for part in request.containers):
        return [
            f"annotation {names.gpu_count} has no effect: it applies to {names.gpu_mem}; the limit sets the number of whole GPUs or instances"
        ]
    return []


def by_limit_range(document: Mapping[str, Any], names: Names) -> str:
    """A clause for a pod that got our resources from a LimitRange, which the API server writes into an annotation; else empty."""
    written = ((document.get("metadata") or {}).get("annotations") or {}).get(LIMIT_RANGER)
    if not isinstance(written, str) or names.domain not in written:
        return ""
    return f" (a LimitRange of the namespace gave the pod some of that: {written[:SHOWN_CHARACTERS]})"


def foreign_gpus(container: AdmissionContainer) -> None:
    """NVIDIA's plugin and ours would each set the container's GPUs, and one would overwrite the other."""
    for resource in sorted(container.resource_names()):
        if resource.startswith(NVIDIA_DOMAIN):
            raise BadRequest(
                f"container {container.name} requests {resource} and GPUs of Tangram: it must request one of them, or be two containers"
            )


def visible_gpus(container: AdmissionContainer, field_path: str) -> None:
    """Variables of a container that requests GPUs: only Tangram decides which GPUs it sees."""
    for env in container.env:
        if env.name in (NVIDIA_ENV, GPUS_ENV) and env.field_path != field_path:
            raise BadRequest(
                f"container {container.name} sets {env.name}{_as(env.value)}: Tangram sets it to the GPUs that the container is given, leave it out"
            )


def no_gpus(container: AdmissionContainer) -> None:
    """Variables of a container that requests nothing beside one that does: it sees no GPU."""
    for env in container.env:
        if env.name == NVIDIA_ENV and (env.value_from or (env.value or "") not in NO_GPU_VALUES):
            raise BadRequest(
                f"container {container.name} requests no GPU and sets {NVIDIA_ENV}{_as(env.value)}: leave it out, or request a share"
            )


def preload(container: AdmissionContainer) -> None:
    """LD_PRELOAD can be prepended to only when its text is there to read."""
    found = [env for env in container.env if env.name == PRELOAD_ENV]
    if len(found) > 1:
        raise BadRequest(f"container {container.name} sets {PRELOAD_ENV} {len(found)} times: it must be set once")
    if found and found[0].value_from:
        raise BadRequest(
            f"container {container.name} sets {PRELOAD_ENV} by valueFrom: Tangram puts its library in front, so it must be written as a value"
        )


def mounts(pod: AdmissionPod) -> None:
    """What a pod with a share mounts, in any of its containers: nothing that could unload the library."""
    for kind, container in pod.every():
        for what, path in _mounted_at(container):
            why = refusal(path)
            if why:
                raise BadRequest(
                    f"{kind} {container.name} mounts {what} at {path}, which a pod with a GPU share may not: {why}"
                )


def ways_out(pod: AdmissionPod, folders: Mapping[str, str]) -> list[str]:
    """Each way by which a pod's processes could leave the limits of a GPU share, of any of its containers, as a clause."""
    found = [f"container {name} {why}" for name, why in _rights(pod)]
    if pod.spec.host_pid:
        names = ", ".join(container.name for _, container in pod.located())
        found.append(f"the pod has hostPID: true, so that container {names} sees the node's processes")
    for volume in pod.spec.volumes:
        path = volume.host_path.path if volume.host_path else ""
        folder = folder_behind(path, folders) if path else None
        if folder:
            found.append(f"{_mounted(pod, volume.name)} is the node's {path} (hostPath), which shows {folders[folder]}")
    return found


def _rights(pod: AdmissionPod) -> Iterator[tuple[str, str]]:
    for _, container in pod.every():
        security = container.security_context
        added = security.capabilities.add if security.capabilities else ()
        why = way_out(Rights(bool(security.privileged), added, security.proc_mount == "Unmasked"))
        if why:
            yield container.name, why


def _mounted(pod: AdmissionPod, volume: str) -> str:
    """A volume that no container mounts yet may be mounted by an ephemeral one."""
    by = [c.name for _, c in pod.located() if any(mount.name == volume for mount in c.volume_mounts)]
    return f"volume {volume} of container {', '.join(by)}" if by else f"volume {volume}"


def service_class(pod: AdmissionPod, rules: AdmissionRules, namespace: str) -> str:
    """The class that a pod has: by its annotation, else by its priority class. Not every namespace may have the first one.

    A latency-critical container preempts its neighbours on a GPU, whatever work it has, so the operator decides which namespaces
    may use the class. A PriorityClass is no proof of that: every user may name one.
    """
    named, priority_class = (
        (pod.metadata.annotations or {}).get(rules.names.service_class),
        pod.spec.priority_class_name,
    )
    service_class = named or rules.classes_by_priority_class.get(priority_class, DEFAULT_CLASS)
    allowed = rules.latency_critical_namespaces
    if service_class != MOST_URGENT or EVERYWHERE in allowed or namespace in allowed:
        return service_class
    where = f"annotation {rules.names.service_class}" if named else f"the class of priorityClassName {priority_class}"
    others = ", ".join(sorted(allowed)) or "no namespace"
    raise BadRequest(
        f"{where} is {service_class}, which pods of namespace {namespace} may not be (those of {others} may): name another class, or have the operator add the namespace to the chart value webhook.latencyCriticalNamespaces"
    )


def whole_pod(pod: AdmissionPod, request: PodRequest, rules: AdmissionRules) -> None:
    """Every check on a pod that requests GPUs."""
    unknown_annotations(pod, rules.names)
    past_the_scheduler(pod, rules)
    names_of_gpus(request, rules.names)
    requests = {request.container: request for request in request.containers}
    for _, container in pod.located():
        wanted = requests.get(container.name)
        if wanted:
            foreign_gpus(container)
        if wanted and wanted.kind == "share":
            preload(container)
    if any(wanted.kind == "share" for wanted in request.containers):
        mounts(pod)


def _mounted_at(container: AdmissionContainer) -> Iterator[tuple[str, str]]:
    """What, and the path. The kubelet mounts a file of the node for the termination message."""
    yield from ((f"volume {mount.name}", mount.mount_path) for mount in container.volume_mounts)
    yield from ((f"block volume {device.name}", device.device_path) for device in container.volume_devices)
    if container.termination_message_path:
        yield "the termination message (terminationMessagePath)", container.termination_message_path


def _as(value: str | None) -> str:
    return f" to {value!r}" if value is not None else ""
