"""The names that Tangram's parts and its users agree on. Nothing else in the tree spells them.

The domain is a chart value, so names hang on a `Names` value; `DEFAULT` serves everything that is not configured otherwise.
A MIG resource is named as NVIDIA's device plugin writes profiles: `mig-1g.10gb`, `mig-1g.10gb.me`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, Literal

from vgpu.api.mig import is_profile

Kind = Literal["share", "whole", "mig"]
"""What a container is given: part of a GPU, GPUs of its own, or MIG instances."""

CLASSES: Final = ("latency-critical", "standard", "best-effort")
"""Service classes, most urgent first."""

DEFAULT_CLASS: Final = "standard"
LEVELS: Final = range(5)
"""Levels order pods inside a class; 0 first."""

DEFAULT_LEVEL: Final = 2
DEFAULT_POLICY: Final = "binpack"
POLICY_NAMES: Final = ("binpack", "spread", "fragmentation", "topology", "cool", "scheduler")
"""Placement policies, as a pod may name them. What they do is in `vgpu.scheduling.policies`, which a reader of requests need not load."""


OverLimitAction = Literal["report", "evict", "kill"]
"""What happens to a container that uses more GPU memory than it was granted, by a way around the library."""

OVER_LIMIT_ACTIONS: Final[tuple[OverLimitAction, ...]] = ("report", "evict", "kill")
"""Mildest first."""

DEFAULT_OVER_LIMIT_ACTION: Final[OverLimitAction] = "report"

GPU_FACTS: Final = ("model", "count", "memory", "driver", "cuda", "mig.capable", "arch")
"""What node labels say of GPUs (`vgpu.api.node_labels`)."""

ANNOTATION_NAME_LIMIT: Final = 63
"""Characters after the slash of an annotation key. Specified by Kubernetes."""


@dataclass(frozen=True, slots=True)
class Names:
    """Every resource and annotation name under one domain."""

    domain: str = "tangram.sh"

    @property
    def gpu_mem(self) -> str:
        """Resource: memory of a share. Units, or bytes when the number is at least 2**20."""
        return f"{self.domain}/gpu-mem"

    @property
    def gpu_core(self) -> str:
        """Resource: compute time of a share, percent of one GPU summed over the GPUs it spans."""
        return f"{self.domain}/gpu-core"

    @property
    def gpu(self) -> str:
        """Resource: whole GPUs, exclusive."""
        return f"{self.domain}/gpu"

    def mig(self, profile: str) -> str:
        """Resource: MIG instances of one profile, e.g. `1g.10gb`."""
        return f"{self.domain}/mig-{profile}"

    def mig_profile(self, resource: str) -> str | None:
        """The profile in a MIG resource name, or None when it is no MIG resource of this domain."""
        domain, _, name = resource.partition("/")
        profile = name.removeprefix("mig-")
        return profile if domain == self.domain and profile != name and is_profile(profile) else None

    def ours(self, key: str) -> bool:
        """Is this resource or annotation key under our domain?"""
        return key.startswith(f"{self.domain}/")

    @property
    def gpu_count(self) -> str:
        """Annotation: number of GPUs that each container's gpu-mem and gpu-core are split over evenly."""
        return f"{self.domain}/gpu-count"

    @property
    def service_class(self) -> str:
        """Annotation: service class, one of `CLASSES`."""
        return f"{self.domain}/class"

    @property
    def level(self) -> str:
        """Annotation: order inside a class, one of `LEVELS`."""
        return f"{self.domain}/level"

    @property
    def placement(self) -> str:
        """Annotation: placement policy."""
        return f"{self.domain}/placement"

    @property
    def gpu_model(self) -> str:
        """Annotation: GPU models allowed, by comma."""
        return f"{self.domain}/gpu-model"

    @property
    def not_gpu_model(self) -> str:
        """Annotation: GPU models excluded, by comma."""
        return f"{self.domain}/not-gpu-model"

    @property
    def gpu_uuid(self) -> str:
        """Annotation: GPU UUIDs allowed, by comma."""
        return f"{self.domain}/gpu-uuid"

    @property
    def not_gpu_uuid(self) -> str:
        """Annotation: GPU UUIDs excluded, by comma."""
        return f"{self.domain}/not-gpu-uuid"

    @property
    def over_limit(self) -> str:
        """Annotation: what happens to the pod when a container uses more than it was granted, one of `OVER_LIMIT_ACTIONS`."""
        return f"{self.domain}/over-limit"

    @property
    def gpu_mem_burst(self) -> str:
        """Annotation: memory that a container may have in all, written as gpu-mem, or `max`. Of the pod, or of one container (`of_container`)."""
        return f"{self.domain}/gpu-mem-burst"

    @property
    def gpu_core_burst(self) -> str:
        """Annotation: compute time that a container may have in all while others leave it idle, written as gpu-core; likewise."""
        return f"{self.domain}/gpu-core-burst"

    @property
    def gpu_mem_burst_wait(self) -> str:
        """Annotation: seconds for which an allocation above gpu-mem may wait until others give way; likewise."""
        return f"{self.domain}/gpu-mem-burst-wait"

    @property
    def burst_annotations(self) -> tuple[str, ...]:
        """The annotations of bursts, as they are written for a whole pod."""
        return self.gpu_mem_burst, self.gpu_core_burst, self.gpu_mem_burst_wait

    def of_container(self, annotation: str, container: str) -> str:
        """The annotation for one container, where each may have its own."""
        return f"{annotation}.{container}"

    def burst_annotation(self, key: str) -> tuple[str, str] | None:
        """(annotation of bursts, container or "" for the whole pod) that a key stands for; None when it is no such key."""
        for annotation in self.burst_annotations:
            if key == annotation:
                return annotation, ""
            container = key.removeprefix(f"{annotation}.")
            if container not in ("", key):
                return annotation, container
        return None

    @property
    def assignment(self) -> str:
        """Annotation that we write with the Binding: per container the GPUs, MiB, core percent, class (JSON)."""
        return f"{self.domain}/assignment"

    @property
    def inventory(self) -> str:
        """Node annotation that the device plugin writes: what GPUs the node has (JSON)."""
        return f"{self.domain}/inventory"

    def gpu_label(self, fact: str) -> str:
        """Node label that the device plugin writes: one of `GPU_FACTS`."""
        return f"{self.domain}/gpu.{fact}"

    @property
    def gpu_labels(self) -> tuple[str, ...]:
        """All of these."""
        return tuple(self.gpu_label(fact) for fact in GPU_FACTS)

    @property
    def cordoned_gpus(self) -> str:
        """Node annotation that operators write, by `tangramctl cordon`: which GPUs get no new pods, and why (JSON)."""
        return f"{self.domain}/cordoned-gpus"

    @property
    def mig_config(self) -> str:
        """Node label that operators write: the name of the node's MIG configuration."""
        return f"{self.domain}/mig.config"

    @property
    def mig_config_state(self) -> str:
        """Node label that the device plugin writes: whether the node's MIG configuration is applied."""
        return f"{self.domain}/mig.config.state"

    @property
    def node_labels(self) -> tuple[str, ...]:
        """Every node label that the device plugin writes."""
        return *self.gpu_labels, self.mig_config_state

    @property
    def unhealthy_taint(self) -> str:
        """Key of the node's taint while a GPU of it is unhealthy, where the operator wants one."""
        return f"{self.domain}/gpu-unhealthy"

    @property
    def startup_taint(self) -> str:
        """Key of the taint that a node group sets on new nodes, and that the device plugin removes when the node's GPUs are usable."""
        return f"{self.domain}/not-ready"

    @property
    def placeholder_for(self) -> str:
        """Label of a placeholder pod: the UID of the pod that it stands for. Also an annotation of it: that pod's `namespace/name`."""
        return f"{self.domain}/placeholder-for"

    @property
    def bursts(self) -> str:
        """Node annotation that the device plugin writes for people: its host pool, and the sums of limits (JSON)."""
        return f"{self.domain}/bursts"

    @property
    def numa(self) -> str:
        """Node annotation that the device plugin writes: to which NUMA nodes the kubelet aligns pods depends on it (JSON)."""
        return f"{self.domain}/numa"

    @property
    def memory_stranded(self) -> str:
        """Pod condition that the device plugin writes: memory of a container cannot come back from host memory."""
        return f"{self.domain}/GpuMemoryStranded"

    @property
    def memory_over_limit(self) -> str:
        """Pod condition that the device plugin writes: a container is over its memory limit."""
        return f"{self.domain}/GpuMemoryOverLimit"

    def gpus_of(self, container: str) -> str:
        """Annotation that we write with the Binding: comma list of GPU UUIDs of one container, read by fieldRef.

        A container name that would push the key past Kubernetes' limit is replaced by `sha256_` and its SHA-256, shortened. No
        container can have that for its name: names of containers have no underscore.
        """
        name = f"gpus.{container}"
        if len(name) > ANNOTATION_NAME_LIMIT:
            name = f"gpus.sha256_{hashlib.sha256(container.encode()).hexdigest()[:32]}"
        return f"{self.domain}/{name}"

    @property
    def user_annotations(self) -> frozenset[str]:
        """Annotations that a user may write on a pod."""
        return frozenset(
            {
                self.gpu_count, self.service_class, self.level, self.placement,
                self.gpu_model, self.not_gpu_model, self.gpu_uuid, self.not_gpu_uuid,
                self.over_limit,
            }
        )  # fmt: skip

    @property
    def own_annotation_prefixes(self) -> tuple[str, ...]:
        """Pod annotations that only Tangram writes, as prefixes."""
        return (self.assignment, f"{self.domain}/gpus.")


def stricter(one: OverLimitAction, other: OverLimitAction) -> OverLimitAction:
    """The one of two that takes less."""
    return max(one, other, key=OVER_LIMIT_ACTIONS.index)


DEFAULT: Final = Names()
