"""What was decided for a pod, and the limits of one of its containers.

An `Assignment` is the extender's decision: it travels in a pod annotation, written with the Binding. A `Grant` is the part
of it that one container needs: the device plugin writes it as a file that the library and the arbiter read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vgpu.api.names import DEFAULT_CLASS, DEFAULT_LEVEL, DEFAULT_OVER_LIMIT_ACTION, Kind, OverLimitAction


@dataclass(frozen=True, slots=True)
class AssignedGpu:
    """A container's part of one GPU."""

    uuid: str
    """Of the GPU, or of the MIG instance."""
    index: int
    """Of the GPU in the node's inventory."""
    mib: int
    core_percent: int = 0
    """0 = no cap was requested."""
    kind: Kind = "share"
    profile: str = ""
    """MIG profile; MIG only."""
    limit_mib: int = 0
    """What the container may have in all, where that was settled with the placement and is more than `mib` (`vgpu.api.overcommit`); else 0."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Per container of a pod, the GPUs it was given."""

    containers: dict[str, tuple[AssignedGpu, ...]]
    """In the order in which the pod starts them: a sidecar that stands before an init container runs beside it."""
    init: frozenset[str] = frozenset()
    """Containers that run to completion before later ones start, so that those reuse what they were given."""
    service_class: str = DEFAULT_CLASS
    level: int = DEFAULT_LEVEL

    def uuids(self, container: str) -> tuple[str, ...]:
        """UUIDs that a container sees, in order."""
        return tuple(gpu.uuid for gpu in self.containers.get(container, ()))

    def held(self) -> tuple[AssignedGpu, ...]:
        """What the pod occupies at its peak, one entry for each GPU, sorted by UUID.

        Per GPU the largest of: everything that keeps running together, and each init container together with the
        sidecars started before it. So counts the kubelet, which hands an init container's devices on, and the scheduler.
        """
        running: dict[str, AssignedGpu] = {}
        peak: dict[str, AssignedGpu] = {}
        for name, gpus in self.containers.items():
            for gpu in gpus:
                together = _together(running.get(gpu.uuid), gpu)
                peak[gpu.uuid] = _larger(peak.get(gpu.uuid), together)
                if name not in self.init:
                    running[gpu.uuid] = together
        return tuple(peak[uuid] for uuid in sorted(peak))


def _together(one: AssignedGpu | None, other: AssignedGpu) -> AssignedGpu:
    if one is None:
        return other
    limit_mib = (one.limit_mib or one.mib) + (other.limit_mib or other.mib) if one.limit_mib or other.limit_mib else 0
    return replace(
        other, mib=one.mib + other.mib, core_percent=one.core_percent + other.core_percent, limit_mib=limit_mib
    )


def _larger(one: AssignedGpu | None, other: AssignedGpu) -> AssignedGpu:
    if one is None:
        return other
    mib = max(one.mib, other.mib)
    limit_mib = max(one.limit_mib or one.mib, other.limit_mib or other.mib)
    return replace(
        other,
        mib=mib,
        core_percent=max(one.core_percent, other.core_percent),
        limit_mib=limit_mib if limit_mib > mib else 0,
    )


@dataclass(frozen=True, slots=True)
class GrantGpu:
    """A container's limits on one GPU."""

    uuid: str
    mib: int
    core_percent: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """The limits of one container."""

    namespace: str
    pod: str
    uid: str
    container: str
    gpus: tuple[GrantGpu, ...] = field(default=())
    service_class: str = DEFAULT_CLASS
    level: int = DEFAULT_LEVEL
    over_limit_action: OverLimitAction = DEFAULT_OVER_LIMIT_ACTION
    """What happens when it uses more than this, by a way around the library."""
    clear: bool = False
    """Is memory zeroed before the container is handed it?"""
