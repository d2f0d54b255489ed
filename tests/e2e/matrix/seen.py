"""What the matrix looks at: values that `look` reads from the API, the node's disk, its processes, the driver and the arbiter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vgpu.api.grant import Assignment, Grant
from vgpu.api.inventory import Inventory
from vgpu.protocol.status import StatusDocument


@dataclass(frozen=True, slots=True)
class SeenPod:
    """A pod as the API has it."""

    uid: str
    key: str
    """`namespace/name`"""
    assignment: Assignment | None
    phase: str = "Running"
    ready: bool = True

    @property
    def finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A living process that the driver counts on a GPU."""

    pid: int
    uid: str
    """Of its pod, by cgroup; empty = of the node's own."""
    held_mib: Mapping[str, int]
    """GPU UUID -> MiB, as the driver counts."""
    grant: Grant | None
    """As the process finds it in its own file system."""
    grant_folder: str
    """Name of the directory that is mounted there."""
    has_library: bool


@dataclass(frozen=True, slots=True)
class Tried:
    """What a process in a container saw, and two allocations: one that the limit allows and one that it does not."""

    key: str
    sees: frozenset[str]
    """UUIDs of GPUs, through CUDA, without prefix."""
    within: str
    """What the program printed; `took` in it = it had the memory."""
    beyond: str
    """`OUT_OF_MEMORY` in it = it was refused."""


@dataclass(frozen=True, slots=True)
class Share:
    """GPU time of a container over some seconds, as the driver counts it."""

    key: str
    percent: float
    limit_percent: int


@dataclass(frozen=True, slots=True)
class Preemption:
    """An Event: a pod had to go for another."""

    victim: str
    preemptor: str
    """UID"""


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything at one moment."""

    inventory: Inventory
    allocatable: Mapping[str, int]
    """Resource -> units that the node offers."""
    pods: tuple[SeenPod, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    grants: Mapping[str, Grant] = field(default_factory=dict)
    """Name of the grant directory -> the grant in it."""
    status: StatusDocument = StatusDocument(())  # noqa: RUF009 - a frozen struct
    kubelet: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    """(pod UID, resource, GPU UUID) -> devices, by the kubelet's checkpoint."""
    drift_metric: frozenset[tuple[str, str]] = frozenset()
    """(resource, GPU UUID) for which the plugin's metric reports that the kubelet counts otherwise."""
    tried: tuple[Tried, ...] = ()
    shares: tuple[Share, ...] = ()
    longest_rest_s: Mapping[str, float] = field(default_factory=dict)
    """Pod -> longest time in which its process, which always has work, did not run while the arbiter was away."""
    unenforced_metric: frozenset[tuple[str, str]] = frozenset()
    """(pod, reason) that the arbiter's metrics name."""
    unenforced_events: frozenset[str] = frozenset()
    """Pods with a LimitNotEnforced Event."""
    waiting: tuple[str, ...] = ()
    """Pods that should run, as what they request is free, and do not."""
    preemptions: tuple[Preemption, ...] = ()
