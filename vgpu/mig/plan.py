"""The plan that leads a GPU from the MIG instances it has to those that it should have.

Pure: it reads what is there and answers with instances to destroy, then instances to create. It destroys nothing that is in use, and as few instances as
can be. Whoever carries it out plans every GPU first: if one is refused, none is touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from vgpu.api.mig import Layout, MigSlot, MigTable, nvidia_form
from vgpu.mig.layout import place


@dataclass(frozen=True, slots=True)
class GpuInstance:
    """A GPU instance that exists."""

    number: int
    """Its ID on the GPU."""
    slot: MigSlot
    in_use: str = ""
    """By what, for a person; empty = idle."""
    complete: bool = True
    """It has one compute instance, as large as itself. Else no pod can use it as its profile."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU as it is."""

    index: int
    uuid: str
    device_id: str
    """PCI device ID, `0x233010de`."""
    capable: bool
    """It has MIG."""
    mig: bool
    """MIG mode is on now."""
    pending: bool
    """MIG mode that it will have after its next reset."""
    table: MigTable
    """Profiles that its driver reports; of a model that is known, if MIG mode is off."""
    instances: tuple[GpuInstance, ...] = ()
    in_use: str = ""
    """By what, if MIG mode is off; empty = idle."""

    @property
    def counts(self) -> Counter[str]:
        """Profile -> instances that are complete."""
        return Counter(one.slot.profile for one in self.instances if one.complete)

    @property
    def layout(self) -> Layout:
        return tuple(sorted(one.slot for one in self.instances))


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """What has to be done on one GPU, in this order: mode off destroys all; destroy; create."""

    index: int
    uuid: str
    mode: bool | None = None
    """MIG mode to switch to; None = it stays."""
    keep: tuple[GpuInstance, ...] = ()
    destroy: tuple[GpuInstance, ...] = ()
    create: tuple[MigSlot, ...] = ()
    refused: str = ""
    """Why nothing can be done, for a person. Then nothing else is set."""

    @property
    def changes(self) -> bool:
        """Is there anything to do?"""
        return self.mode is not None or bool(self.destroy) or bool(self.create)


def plan(state: GpuState, mig: bool, counts: Mapping[str, int]) -> GpuPlan:
    """How the GPU comes to have MIG mode on or off, and these numbers of instances, and no others."""
    if mig and not state.capable:
        return _refused(state, "it has no MIG")
    if state.mig != state.pending:
        now, later = ("on" if mode else "off" for mode in (state.mig, state.pending))
        return _refused(state, f"its MIG mode is {now} and will be {later} after a reset of the GPU: reset it first")
    if not mig:
        return _off(state)
    if state.in_use and not state.mig:
        return _refused(state, f"MIG mode is off, and the GPU is in use ({state.in_use})")
    for profile in counts:
        if profile not in state.table.by_name:
            return _refused(state, f"it has no profile {nvidia_form(profile)}, it has {_names(state.table)}")
    if place(state.table, (), counts) is None:
        return _refused(state, f"{_written(counts)} do not fit together on it")
    return _on(state, counts)


def _off(state: GpuState) -> GpuPlan:
    used = [one for one in state.instances if one.in_use]
    if used:
        return _refused(state, f"MIG mode must be off, and {_instances(used)}")
    if not state.mig:
        return GpuPlan(state.index, state.uuid)
    return GpuPlan(state.index, state.uuid, mode=False, destroy=state.instances)


def _on(state: GpuState, counts: Mapping[str, int]) -> GpuPlan:
    mode = None if state.mig else True
    used = tuple(one for one in state.instances if one.in_use)
    if any(not one.complete for one in used):
        return _refused(
            state, f"{_instances(one for one in used if not one.complete)}, and have other compute instances"
        )
    idle = [one for one in state.instances if not one.in_use and one.complete]
    for size in range(len(idle), -1, -1):
        for some in combinations(idle, size):
            kept = (*used, *some)
            left = Counter(counts)
            left.subtract(one.slot.profile for one in kept)
            if min(left.values(), default=0) < 0:
                continue
            more = place(state.table, tuple(sorted(one.slot for one in kept)), +left)
            if more is not None:
                keep = tuple(one for one in state.instances if one in kept)
                destroy = tuple(one for one in state.instances if one not in kept)
                return GpuPlan(state.index, state.uuid, mode, keep, destroy, more)
    return _refused(state, f"{_written(counts)} cannot be had while {_instances(used)}")


def differences(state: GpuState, mig: bool, counts: Mapping[str, int]) -> list[str]:
    """What the GPU has and should not, or should and has not; one sentence each. Empty: it is as it should be."""
    if state.mig != mig:
        return [f"GPU {state.index}: MIG mode is {'on' if state.mig else 'off'}, must be {'on' if mig else 'off'}"]
    found = [
        f"GPU {state.index}: it has {state.counts[profile]} x {nvidia_form(profile)}, must have {counts.get(profile, 0)}"
        for profile in sorted(state.counts.keys() | counts.keys())
        if state.counts[profile] != counts.get(profile, 0)
    ]
    odd = [one for one in state.instances if not one.complete]
    return found + [
        f"GPU {state.index}: GPU instance {one.number} has no compute instance as large as itself" for one in odd
    ]


def _refused(state: GpuState, why: str) -> GpuPlan:
    return GpuPlan(state.index, state.uuid, refused=f"GPU {state.index} ({state.uuid}): {why}")


def _names(table: MigTable) -> str:
    return ", ".join(nvidia_form(profile.name) for profile in table.profiles) or "none"


def _written(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {nvidia_form(profile)}" for profile, count in counts.items()) or "no instances"


def _instances(used: Iterable[GpuInstance]) -> str:
    return ", ".join(
        f"{nvidia_form(one.slot.profile)} at slice {one.slot.start} (GPU instance {one.number}) is in use by {one.in_use}"
        for one in used
    )
