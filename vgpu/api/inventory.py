"""What a node has: its GPUs, their memory, links, MIG instances and health.

Probed by the device plugin, carried in a node annotation, read by the extender. It states facts and decides nothing.

Units: memory in MiB (2**20 bytes), rounded down from what NVML reports.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Literal

from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.mig_device import slot_of_device

AccessMode = Literal["cdi", "nvidia"]
"""How a container gets its devices: CDI names from Allocate, or NVIDIA's runtime reading NVIDIA_VISIBLE_DEVICES."""

ACCESS_MODES: Final[tuple[AccessMode, ...]] = ("cdi", "nvidia")

MOST_GPUS_OF_A_NODE: Final = 64
"""GPUs that an inventory or a grant may name. The largest single machines have 16; specified with the grant file."""

MOST_ORPHANS: Final = 500
"""That an inventory may name. Guessed: four times the pods that a node has at most by the kubelet's default, and 128 KiB of annotation."""


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One MIG instance that exists on a GPU. Where instances are declared, it is offered while its GPU is in MIG mode and healthy."""

    uuid: str
    profile: str
    mib: int
    gpu_instance: int
    compute_instance: int
    start: int = -1
    """First memory slice; -1 when it is not known. A reader of an earlier version passes over it."""


HealthState = Literal["healthy", "degraded", "unhealthy", "unmonitored"]
"""degraded: pods may have the GPU. unhealthy: it is not fit for use. unmonitored: nothing is known about it. New pods get neither of the last two."""

WORST_FIRST: Final[tuple[HealthState, ...]] = ("unhealthy", "unmonitored", "degraded", "healthy")

MOST_CONDITIONS: Final = 16
"""Of one GPU. Guessed: there are twelve reasons."""


@dataclass(frozen=True, slots=True)
class GpuCondition:
    """Something is wrong with a GPU."""

    reason: str
    """In CamelCase, as `vgpu.health.conditions.Reason`; a reader takes any."""
    state: str
    """What the GPU is at best while this lasts, as `HealthState`; a reader takes any."""
    since_s: int
    """Seconds since 1970."""
    message: str = ""
    """For a person."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU."""

    uuid: str
    index: int
    model: str
    mib: int
    minor: int = 0
    numa: int = -1
    """NUMA node, -1 when the platform does not report it."""
    pci: str = ""
    healthy: bool = True
    mig: bool = False
    """MIG mode is on: the GPU is offered as its instances only."""
    instances: tuple[MigInstance, ...] = ()
    nvlinks: dict[str, int] = field(default_factory=dict)
    """UUID of the peer -> number of active NVLinks to it."""
    conditions: tuple[GpuCondition, ...] = ()
    """The worst first. A reader of an earlier version passes over them, and sees `healthy`."""
    on_demand: bool = False
    """It is in MIG mode, and its instances are made when pods request them: `instances` are those that exist now, for pods or idle.
    Pods get slots of it (`vgpu.api.mig_device`), not instances. A reader of an earlier version passes over it."""

    @property
    def state(self) -> HealthState:
        """That of its worst condition. An earlier plugin writes no conditions."""
        states = {one.state for one in self.conditions}
        found: HealthState = next((state for state in WORST_FIRST if state in states), "healthy")
        return found if self.healthy or found != "healthy" else "unhealthy"

    @property
    def offered_instances(self) -> tuple[MigInstance, ...]:
        """Instances that pods may be given now. Of a GPU on demand none: its slots are."""
        return self.instances if self.mig and self.healthy and not self.on_demand else ()

    @property
    def shareable(self) -> bool:
        """May this GPU be shared out or given whole? (MIG GPUs are not: their instances are.)"""
        return self.healthy and not self.mig


@dataclass(frozen=True, slots=True)
class Orphan:
    """A pod that the API no longer has and whose processes run on: it was deleted by force. They still use its GPUs."""

    uid: str
    namespace: str
    pod: str
    held: tuple[AssignedGpu, ...]
    """What it occupies at its peak, one part a GPU or MIG instance."""

    @property
    def key(self) -> str:
        """The pod, as `namespace/name`."""
        return f"{self.namespace}/{self.pod}"

    @property
    def assignment(self) -> Assignment:
        """What it still uses. Which of its containers uses which GPU is not known, so each GPU counts as one container's."""
        return Assignment({f"orphan-{at}": (gpu,) for at, gpu in enumerate(self.held)})


@dataclass(frozen=True, slots=True)
class Inventory:
    """All GPUs of a node, by index, and the orphans that use them without the API's knowledge."""

    gpus: tuple[Gpu, ...]
    unit_mib: int = 1024
    access: AccessMode = "cdi"
    driver: str = ""
    orphans: tuple[Orphan, ...] = ()
    """By UID. A reader of an earlier version passes over them."""

    def gpu(self, uuid: str) -> Gpu | None:
        """The GPU with this UUID, or the GPU that carries this MIG instance or MIG slot."""
        slot = slot_of_device(uuid)
        uuid = slot[0] if slot else uuid
        for gpu in self.gpus:
            if gpu.uuid == uuid or any(instance.uuid == uuid for instance in gpu.instances):
                return gpu
        return None

    @property
    def profiles(self) -> tuple[str, ...]:
        """MIG profiles that exist on the node, sorted."""
        return tuple(sorted({instance.profile for gpu in self.gpus for instance in gpu.instances}))


def without_copiers(gpus: tuple[Gpu, ...], context_mib: int) -> tuple[Gpu, ...]:
    """The same GPUs with the memory that a copier's context leaves. GPUs in MIG mode have no copier."""
    return tuple(gpu if gpu.mig else replace(gpu, mib=max(0, gpu.mib - context_mib)) for gpu in gpus)
