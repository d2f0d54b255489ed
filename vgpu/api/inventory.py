"""What a node has: its GPUs, their memory, links, MIG instances and health.

Probed by the device plugin, carried in a node annotation, read by the extender. It states facts and decides nothing.

Units: memory in MiB (2**20 bytes), rounded down from what NVML reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
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

WITHDRAWN: Final = "withdrawn"
"""The state of a condition that says nothing about health: new pods do not get the GPU, and running ones stay."""

WORST_FIRST: Final[tuple[HealthState, ...]] = ("unhealthy", "unmonitored", "degraded", "healthy")

HeatClass = Literal["cool", "normal", "hot"]
"""How warm a GPU was, and how much power it drew, in the last minutes (`vgpu.health.heat`)."""

HEAT_CLASSES: Final[tuple[HeatClass, ...]] = ("cool", "normal", "hot")
NORMAL: Final[HeatClass] = "normal"
"""Also of a GPU of which nothing is known."""

CoherentMemory = Literal["", "driver", "numa", "unified", "unknown"]
"""How a GPU's memory is part of the machine's (`vgpu.api.coherent`). Empty: not at all, as behind PCIe."""

LIMITS_ENFORCED: Final[frozenset[str]] = frozenset({"", "driver"})
"""Of these, all memory that a process uses of the GPU was requested through the driver."""

CordonState = Literal["cordoned", "not-released", "released", "testing"]
"""cordoned: an operator keeps new pods off. released: also, no pod has it, and no process of Tangram has it open. not-released: no pod has it, and NVML cannot leave
it out, as its PCI address is not known. testing: it is tried before pods get it again."""

CORDONED: Final[CordonState] = "cordoned"
NOT_RELEASED: Final[CordonState] = "not-released"
RELEASED: Final[CordonState] = "released"
TESTING: Final[CordonState] = "testing"


class Withdrawal(StrEnum):
    """Why new pods do not get a GPU, whatever its health: reasons of conditions of state `WITHDRAWN`."""

    CORDONED = "Cordoned"
    NOT_RELEASED = "NotReleased"
    RELEASED = "Released"
    TESTING = "SelfTest"
    NOT_SELECTED = "NotSelected"
    CLASH = "GpuClash"
    UNKNOWN = "OwnerUnknown"
    MIG_CONFIG = "MigConfig"


CORDON_REASONS: Final[Mapping[str, CordonState]] = {
    Withdrawal.CORDONED: CORDONED, Withdrawal.NOT_RELEASED: NOT_RELEASED, Withdrawal.RELEASED: RELEASED, Withdrawal.TESTING: TESTING,
}  # fmt: skip
CORDON_STATES: Final = tuple(CORDON_REASONS.values())

MOST_CONDITIONS: Final = 16
"""Of one GPU. Guessed: there are thirteen of health, and two withdrawals may stand at once."""


@dataclass(frozen=True, slots=True)
class GpuCondition:
    """Something is wrong with a GPU."""

    reason: str
    """In CamelCase, as `vgpu.health.conditions.Reason` or `Withdrawal`; a reader takes any."""
    state: str
    """What the GPU is at best while this lasts, as `HealthState`, or `WITHDRAWN`; a reader takes any."""
    since_s: int
    """Seconds since 1970."""
    message: str = ""
    """For a person."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}" if self.message else self.reason


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
    arch: str = ""
    """Architecture in lower case, as `hopper`; empty when it is not known."""
    mig_capable: bool = False
    """It has a MIG mode, on or off."""
    conditions: tuple[GpuCondition, ...] = ()
    """The worst first. A reader of an earlier version passes over them, and sees `healthy`."""
    heat: str = NORMAL
    """As `HeatClass`; a reader takes any, and counts one that it does not know as normal."""
    on_demand: bool = False
    """It is in MIG mode, and its instances are made when pods request them: `instances` are those that exist now, for pods or idle.
    Pods get slots of it (`vgpu.api.mig_device`), not instances. A reader of an earlier version passes over it."""
    coherent: str = ""
    """As `CoherentMemory`; a reader takes any, and gives a GPU with one that it does not know as a whole only. An extender of an earlier version passes over it: the
    node offers it no units of such a GPU, and its plugin refuses a share of it."""

    @property
    def heat_number(self) -> int:
        """Of its class in `HEAT_CLASSES`; higher is warmer."""
        known: Sequence[str] = HEAT_CLASSES
        return known.index(self.heat if self.heat in known else NORMAL)

    @property
    def state(self) -> HealthState:
        """That of its worst condition of health. An earlier plugin writes no conditions."""
        states = {one.state for one in self.conditions}
        found: HealthState = next((state for state in WORST_FIRST if state in states), "healthy")
        if self.healthy or found != "healthy":
            return found
        return "unmonitored" if self.cordon else "unhealthy"  # NVML leaves it out, or did until now

    @property
    def withdrawn(self) -> tuple[GpuCondition, ...]:
        """Why new pods do not get it, whatever its health."""
        return tuple(one for one in self.conditions if one.state == WITHDRAWN)

    @property
    def selected(self) -> bool:
        """Does `node.gpus` select it?"""
        return all(one.reason != Withdrawal.NOT_SELECTED for one in self.withdrawn)

    @property
    def cordon(self) -> CordonState | Literal[""]:
        """Whether an operator keeps new pods off, or its plugin does until it is seen to work; empty: neither."""
        return next((CORDON_REASONS[one.reason] for one in self.withdrawn if one.reason in CORDON_REASONS), "")

    @property
    def offered_instances(self) -> tuple[MigInstance, ...]:
        """Instances that pods may be given now. Of a GPU on demand none: its slots are."""
        return self.instances if self.mig and self.offered and not self.on_demand else ()

    @property
    def shareable(self) -> bool:
        """May this GPU be shared out or given whole? (MIG GPUs are not: their instances are.)"""
        return self.offered and not self.mig

    @property
    def whole_only(self) -> bool:
        """Is it never shared, as processes can use its memory without the driver, so that no limit of memory is enforced on it?"""
        return self.coherent not in LIMITS_ENFORCED

    @property
    def offers_shares(self) -> bool:
        """May new pods be given a share of this GPU?"""
        return self.shareable and not self.whole_only

    @property
    def offered(self) -> bool:
        """May new pods be given this GPU, or instances of it?"""
        return self.healthy and not self.withdrawn


def withdraw(gpu: Gpu, *conditions: GpuCondition) -> Gpu:
    """The same GPU, which new pods do not get because of these. Without conditions it is as it was."""
    return replace(gpu, conditions=(*gpu.conditions, *conditions)) if conditions else gpu


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
    cuda: str = ""
    """Newest CUDA version that the driver supports, as `13.0`."""
    driver_root: str = ""
    """The driver's root on the node; empty where NVIDIA's container runtime brings its files. A reader of an earlier version passes over it."""
    driver_place: str = ""
    """Which platform has it there, and why this place was taken, for people."""

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
    """The same GPUs with the memory that a copier's context leaves. GPUs in MIG mode, and those that are not shared, have no copier."""
    return tuple(gpu if gpu.mig or gpu.whole_only else replace(gpu, mib=max(0, gpu.mib - context_mib)) for gpu in gpus)
