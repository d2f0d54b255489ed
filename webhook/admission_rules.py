"""What the cluster's operator decided about admission: the settings that a decision reads, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from vgpu.api.confinement import NODE_FOLDERS
from vgpu.api.names import DEFAULT, DEFAULT_POLICY, POLICY_NAMES, Names

STOCK_SCHEDULER: Final = "default-scheduler"
"""What the API server writes when a pod names no scheduler. Specified by Kubernetes."""

EVERYWHERE: Final = "*"
"""Stands for every namespace. No namespace can have that for its name."""

LARGEST_GPU_MIB: Final = 2**20
"""1 TiB: more than any GPU sold has (guessed to stay true for years; 288 GiB is the most in 2025)."""


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """How pods are admitted."""

    names: Names = DEFAULT
    unit_mib: int = 1024
    """Memory unit of the cluster, MiB."""
    scheduler_name: str = "tangram-scheduler"
    """Given to pods that name none."""
    other_schedulers: frozenset[str] = frozenset()
    """Further schedulers that run Tangram's extender, so that a pod may name them."""
    runtime_class: str = ""
    """Given to pods that name none; empty = none is given."""
    policies: tuple[str, ...] = POLICY_NAMES
    """Placement policies that a pod may name."""
    default_policy: str = DEFAULT_POLICY
    """Set on pods that name none; if such a pod gets it anyway, nothing is written."""
    largest_gpu_mib: int = LARGEST_GPU_MIB
    """A share that requests more than this on one GPU is denied at once."""
    privileged: Literal["deny", "warn"] = "deny"
    """What happens to a pod with a share that its own rights or volumes exempt from every limit."""
    privileged_namespaces: frozenset[str] = frozenset()
    """Where such pods are admitted with a warning."""
    node_folders: Mapping[str, str] = field(default_factory=lambda: NODE_FOLDERS)
    """Folders that a pod with a share may not have from its node -> what is there."""
    latency_critical_namespaces: frozenset[str] = frozenset({EVERYWHERE})
    """Where pods may be of class latency-critical, which preempts every other container on a GPU."""
    classes_by_priority_class: Mapping[str, str] = field(default_factory=dict)
    """PriorityClass -> service class of pods that name the one and not the other."""
    priority_classes: Mapping[str, str] = field(default_factory=dict)
    """Service class -> PriorityClass given to pods that name none; empty = none is given."""
    mig_on_demand: bool = False
    """Whether nodes may make MIG instances on demand. Then the device plugin's Allocate decides what a container with MIG instances sees; a plugin of a
    release without MIG on demand decides nothing there, and the image's own NVIDIA_VISIBLE_DEVICES would count."""
    burst_enabled: bool = False
    """Whether containers may use more than their guarantee. Else annotations of bursts are checked and have no effect."""
    burst_default: Mapping[str, str] = field(default_factory=dict)
    """Namespace, or * for every other one -> memory limit of pods that write none: a quantity or `max`."""
    burst_max: Mapping[str, str] = field(default_factory=dict)
    """Namespace, or * for every other one -> the largest memory limit that its pods may write, a quantity or `max`. A namespace without any may
    not burst; empty = there is no bound."""
