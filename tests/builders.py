"""Small builders of Kubernetes objects, for tests and benches that need one with a GPU in it.

    pod("a").asking(mib=8192, core=30).on("n1").assigned(...).json()
    node("n1").with_inventory(gpu(0), gpu(1, mib=40_000)).json()

Each step answers a new builder, so a half-built one can be a starting point for many.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec

from kube.objects import Node, Pod
from vgpu.api.codec import assignment_to_json, inventory_to_json
from vgpu.api.cordon import Cordon, condition
from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.inventory import AccessMode, CordonState, Gpu, Inventory, MigInstance, withdraw
from vgpu.api.names import DEFAULT, Names

NAMESPACE = uuid.UUID("6f1d4a52-0000-4000-8000-000000000000")


def uuid_of(text: str, prefix: str = "GPU") -> str:
    """The same UUID for the same text, spelled as NVML spells them."""
    return f"{prefix}-{uuid.uuid5(NAMESPACE, text)}"


def cordoned(gpu: Gpu, state: str) -> Gpu:
    """As the inventory has it in this `CordonState`; empty: as it is."""
    return withdraw(gpu, condition(cast(CordonState, state), Cordon())) if state else gpu


def gpu(index: int, mib: int = 81_920, node: str = "n1", model: str = "NVIDIA A100-SXM4-80GB", **more: Any) -> Gpu:
    """GPU `index` of a node."""
    return Gpu(uuid_of(f"{node}/{index}"), index, model, mib, minor=index, **more)


def mig_gpu(index: int, *profiles: str, node: str = "n1", mib: int = 81_920) -> Gpu:
    """A GPU in MIG mode with one instance for each profile named."""
    instances = tuple(
        MigInstance(uuid_of(f"{node}/{index}/{at}", "MIG"), profile, 9_728, at, 0)
        for at, profile in enumerate(profiles)
    )
    return gpu(index, mib, node, mig=True, instances=instances)


def share(of: Gpu, mib: int, core: int = 0) -> AssignedGpu:
    """Part of a GPU."""
    return AssignedGpu(of.uuid, of.index, mib, core)


def owner(kind: str, name: str, api_version: str = "batch/v1") -> dict[str, Any]:
    """An owner reference to a controller; the UID is `uid-` and the name."""
    return {"apiVersion": api_version, "kind": kind, "name": name, "uid": f"uid-{name}", "controller": True}


def workload(name: str, *owners: str, namespace: str = "default") -> dict[str, Any]:
    """Kueue's, whose owners have these UIDs."""
    refs = [{"apiVersion": "batch/v1", "kind": "Job", "name": uid, "uid": uid} for uid in owners]
    meta = {"name": name, "namespace": namespace, "uid": f"uid-{namespace}-{name}", "ownerReferences": refs}
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": meta, "spec": {"active": True}}


@dataclass(frozen=True)
class PodBuilder:
    """A pod in the making."""

    name: str
    namespace: str = "default"
    uid: str = ""
    containers: tuple[dict[str, Any], ...] = ()
    init_containers: tuple[dict[str, Any], ...] = ()
    annotations: dict[str, str] = field(default_factory=dict)
    node: str = ""
    phase: str = "Pending"
    started: bool = False
    deleting: bool = False
    version: int = 1
    scheduler: str = "tangram-scheduler"
    names: Names = DEFAULT
    priority: int = 0
    preemption_policy: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    nominated: str = ""
    group: str = ""
    owners: tuple[dict[str, Any], ...] = ()

    def asking(
        self, mib: int = 0, core: int = 0, gpus: int = 0, mig: str = "", count: int = 1, container: str = "main",
        init: bool = False, **raw: str,
    ) -> PodBuilder:  # fmt: skip
        """One more container, with limits as the webhook leaves them (units of 1 GiB)."""
        limits = dict(raw)
        if mib:
            limits[self.names.gpu_mem] = str(-(-mib // 1024))
        if core:
            limits[self.names.gpu_core] = str(core)
        if gpus:
            limits[self.names.gpu] = str(gpus)
        if mig:
            limits[self.names.mig(mig)] = str(count)
        made = {"name": container, "image": "busybox", "resources": {"limits": limits, "requests": dict(limits)}}
        if init:
            return replace(self, init_containers=(*self.init_containers, made))
        return replace(self, containers=(*self.containers, made))

    def annotated(self, **annotations: str) -> PodBuilder:
        """Annotations under our domain: annotated(gpu_model="...") writes tangram.sh/gpu-model."""
        ours = {f"{self.names.domain}/{key.replace('_', '-')}": value for key, value in annotations.items()}
        return replace(self, annotations=self.annotations | ours)

    def of_priority(self, priority: int, policy: str = "") -> PodBuilder:
        """What its PriorityClass gives it; the policy may be Never."""
        return replace(self, priority=priority, preemption_policy=policy)

    def labelled(self, **labels: str) -> PodBuilder:
        """Its labels."""
        return replace(self, labels=labels)

    def controlled_by(self, kind: str, name: str, api_version: str = "batch/v1") -> PodBuilder:
        """Whose it is; the UID is `uid-` and the name."""
        return replace(self, owners=(owner(kind, name, api_version),))

    def nominated_to(self, node: str) -> PodBuilder:
        """A scheduler has evicted others for it there."""
        return replace(self, nominated=node)

    def in_group(self, name: str) -> PodBuilder:
        """Scheduled with the pods of this PodGroup."""
        return replace(self, group=name)

    def on(self, node: str) -> PodBuilder:
        """Bound to a node."""
        return replace(self, node=node)

    def assigned(self, *gpus: AssignedGpu, container: str = "main", text: str | None = None) -> PodBuilder:
        """Carrying an assignment; `text` for one that is not of our making."""
        text = assignment_to_json(Assignment({container: gpus})) if text is None else text
        return replace(self, annotations=self.annotations | {self.names.assignment: text})

    def with_phase(self, phase: str, *, started: bool = True) -> PodBuilder:
        """Running, Succeeded, Failed; `started` = the kubelet has admitted it."""
        return replace(self, phase=phase, started=started)

    def terminating(self) -> PodBuilder:
        """Deleted, and still there."""
        return replace(self, deleting=True)

    def at_version(self, version: int) -> PodBuilder:
        """Its resourceVersion."""
        return replace(self, version=version)

    def plain(self) -> dict[str, Any]:
        """As the API shows it, decoded."""
        metadata: dict[str, Any] = {
            "name": self.name, "namespace": self.namespace, "uid": self.uid or f"uid-{self.namespace}-{self.name}",
            "resourceVersion": str(self.version), "annotations": dict(self.annotations),
        }  # fmt: skip
        if self.labels:
            metadata["labels"] = self.labels
        if self.owners:
            metadata["ownerReferences"] = list(self.owners)
        if self.deleting:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        containers = self.containers or ({"name": "main", "image": "busybox"},)
        spec: dict[str, Any] = {"containers": list(containers), "schedulerName": self.scheduler}
        if self.init_containers:
            spec["initContainers"] = list(self.init_containers)
        if self.group:
            spec["schedulingGroup"] = {"podGroupName": self.group}
        if self.node:
            spec["nodeName"] = self.node
        if self.priority:
            spec["priority"] = self.priority
        if self.preemption_policy:
            spec["preemptionPolicy"] = self.preemption_policy
        status: dict[str, Any] = {"phase": self.phase}
        if self.nominated:
            status["nominatedNodeName"] = self.nominated
        if self.started:
            status["startTime"] = "2026-01-01T00:00:00Z"
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}

    def json(self) -> bytes:
        """As the API sends it."""
        return msgspec.json.encode(self.plain())

    def build(self) -> Pod:
        """As kube/ decodes it."""
        return msgspec.json.decode(self.json(), type=Pod)


@dataclass(frozen=True)
class NodeBuilder:
    """A node in the making."""

    name: str
    gpus: tuple[Gpu, ...] = ()
    access: AccessMode = "nvidia"
    unit_mib: int = 1024
    text: str | None = None
    version: int = 1
    names: Names = DEFAULT

    def with_inventory(self, *gpus: Gpu) -> NodeBuilder:
        """Publishing an inventory of these GPUs."""
        return replace(self, gpus=gpus)

    def with_gpus(self, count: int, mib: int = 81_920) -> NodeBuilder:
        """Publishing an inventory of equal GPUs."""
        return self.with_inventory(*(gpu(at, mib, self.name) for at in range(count)))

    def with_access(self, access: AccessMode) -> NodeBuilder:
        """How its containers get their devices."""
        return replace(self, access=access)

    def with_text(self, text: str) -> NodeBuilder:
        """Publishing an inventory that is not of our making."""
        return replace(self, text=text)

    def at_version(self, version: int) -> NodeBuilder:
        """Its resourceVersion."""
        return replace(self, version=version)

    def plain(self) -> dict[str, Any]:
        """As the API shows it, decoded."""
        metadata: dict[str, Any] = {"name": self.name, "uid": f"uid-{self.name}", "resourceVersion": str(self.version)}
        text = self.text
        if text is None and self.gpus:
            text = inventory_to_json(Inventory(self.gpus, self.unit_mib, self.access))
        if text is not None:
            metadata["annotations"] = {self.names.inventory: text}
        return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}, "status": {}}

    def json(self) -> bytes:
        """As the API sends it."""
        return msgspec.json.encode(self.plain())

    def build(self) -> Node:
        """As kube/ decodes it."""
        return msgspec.json.decode(self.json(), type=Node)


def pod(name: str, namespace: str = "default") -> PodBuilder:
    """Start a pod."""
    return PodBuilder(name, namespace)


def node(name: str) -> NodeBuilder:
    """Start a node."""
    return NodeBuilder(name)
