"""The placeholder pod: as large as an empty node, and as particular about nodes as the pod that it stands for. It is never bound.

`vgpu.scheduling.placeholders` decides when there is one. It requests `gpu`, `gpu-mem` and `gpu-core` together, which admission denies to every other pod: only
so it fits no node on which anything is allocated. It is in the release's own namespace, which the webhook leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kube.objects import Metadata, Slim
from vgpu.api.names import Names
from vgpu.scheduling.placeholders import NodeType, amounts

INSTANCE_TYPE: Final = "node.kubernetes.io/instance-type"
"""Label of nodes. Specified: kubernetes.io/docs/reference/labels-annotations-taints."""

PREFIX: Final = "tangram-placeholder-"


class _Affinity(Slim, frozen=True):
    node_affinity: dict[str, Any] | None = None


class _Spec(Slim, frozen=True):
    node_selector: dict[str, str] | None = None
    affinity: _Affinity | None = None
    tolerations: list[dict[str, Any]] | None = None


class ParticularPod(Slim, frozen=True):
    """What is read of the pod that waits, with fields that this program does not know."""

    metadata: Metadata = Metadata()
    spec: _Spec = _Spec()


def name_of(uid: str) -> str:
    """Of the placeholder for the pod with this UID: the API server keeps it the only one."""
    return PREFIX + uid


def placeholder(
    pod: ParticularPod,
    kind: NodeType,
    names: Names,
    requests: Mapping[str, int],
    *,
    scheduler: str,
    image: str,
    priority_class: str,
    owner: Mapping[str, Any],
) -> dict[str, Any]:
    """The pod to create. `requests`: what the waiting pod requests beside GPUs, in units of `kube.pod_requests`. `owner`: reference to the object with which it goes."""
    meta, spec = pod.metadata, pod.spec
    units, percent, gpus = amounts(kind.inventory)
    amount = {
        **{one: f"{much}m" if one == "cpu" else str(much) for one, much in requests.items() if much},
        names.gpu_mem: str(units), names.gpu_core: str(percent), names.gpu: str(gpus),
    }  # fmt: skip
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = ((spec.affinity.node_affinity or {}) if spec.affinity else {}).get(required)
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name_of(meta.uid),
            "labels": {"app.kubernetes.io/component": "placeholder", names.placeholder_for: meta.uid},
            "annotations": {names.placeholder_for: meta.key},
            "ownerReferences": [dict(owner)],
        },
        "spec": {
            "schedulerName": scheduler, "priorityClassName": priority_class, "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False, "enableServiceLinks": False,
            "nodeSelector": {**(spec.node_selector or {}), INSTANCE_TYPE: kind.name},
            **({"affinity": {"nodeAffinity": {required: terms}}} if terms else {}),
            "tolerations": spec.tolerations or [],
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "placeholder", "image": image, "resources": {"limits": amount, "requests": amount},
                    "securityContext": {
                        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }  # fmt: skip


READ: Final = msgspec.json.Decoder(ParticularPod)
