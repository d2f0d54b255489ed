"""What admission does about bursts: checks what a pod writes, and writes the default of its namespace.

What the annotations mean, and every error in them, is in `vgpu.api.burst`; what a GPU can give is decided on the node.
"""

from __future__ import annotations

from collections.abc import Mapping

from vgpu.api.burst import EVERY, BurstBound, bursts_of
from vgpu.api.errors import BadRequest
from vgpu.api.request import PodRequest
from webhook.admission_rules import AdmissionRules
from webhook.objects import AdmissionPod


def burst(
    pod: AdmissionPod, request: PodRequest, rules: AdmissionRules, namespace: str
) -> tuple[dict[str, str], list[str]]:
    """Annotations to write, and warnings. Raises BadRequest with a sentence when the pod is denied."""
    annotations, names = pod.metadata.annotations or {}, rules.names
    bound = BurstBound.of(namespace, rules.burst_max) if rules.burst_enabled else BurstBound(namespace)
    _check(annotations, request, rules, bound)
    written = sorted(key for key in annotations if names.burst_annotation(key))
    if not rules.burst_enabled:
        return {}, [
            f"annotation {key} has no effect: bursts are disabled in this cluster (chart value burst.enabled), so the pod runs at its guarantee"
            for key in written[:1]
        ]
    added = _default(annotations, request, rules, bound)
    waits = [key for key in written if _annotation(key, rules) == names.gpu_mem_burst_wait]
    if waits and not added and not any(_annotation(key, rules) == names.gpu_mem_burst for key in written):
        return {}, [f"annotation {waits[0]} has no effect: the pod has no annotation {names.gpu_mem_burst}"]
    return added, []


def _default(
    annotations: Mapping[str, str], request: PodRequest, rules: AdmissionRules, bound: BurstBound
) -> dict[str, str]:
    """The annotation of a pod that writes no memory burst. It gets none where a container's guarantee is above the default."""
    names = rules.names
    text = rules.burst_default.get(bound.namespace, rules.burst_default.get(EVERY))
    if text is None or any(_annotation(key, rules) == names.gpu_mem_burst for key in annotations):
        return {}
    added = {names.gpu_mem_burst: text}
    try:
        _check({**annotations, **added}, request, rules, bound)
    except BadRequest:
        return {}
    return added


def _check(annotations: Mapping[str, str], request: PodRequest, rules: AdmissionRules, bound: BurstBound) -> None:
    bursts_of(
        annotations, request, names=rules.names, unit_mib=rules.unit_mib, largest_gpu_mib=rules.largest_gpu_mib, bound=bound,
    )  # fmt: skip


def _annotation(key: str, rules: AdmissionRules) -> str:
    """The annotation of bursts that a key stands for, of the pod or of a container; else empty."""
    parts = rules.names.burst_annotation(key)
    return parts[0] if parts else ""
