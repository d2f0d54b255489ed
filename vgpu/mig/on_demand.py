"""MIG on demand on one GPU: which instances are ours, which may go, and whether the driver agrees with the table.

Pure: it reads what the driver reports and what the record says. An instance is ours if the record says that we made it, or were making it, at its slot.
All others are foreign: they are never touched, and nothing is made beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from vgpu.api.mig import Layout, MigProfile, MigSlot, MigTable, nvidia_form

Step = Literal["making", "made", "removing", "lost"]
"""Of an instance in the record. lost: it is gone with a reset or a reboot, and a pod has its slot still."""


@dataclass(frozen=True, slots=True)
class Existing:
    """A GPU instance that the driver reports."""

    number: int
    """Its ID on the GPU."""
    slot: MigSlot
    uuid: str
    """Of its compute instance; empty when it does not have exactly one."""
    complete: bool
    """It has one compute instance, as large as itself."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the record says about a slot."""

    step: Step
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Sorted:
    """The instances of a GPU."""

    ours: Mapping[MigSlot, Existing] = field(default_factory=dict)
    """Usable."""
    leftovers: tuple[Existing, ...] = ()
    """Ours, and half made or half removed: they go."""
    foreign: tuple[Existing, ...] = ()
    absent: tuple[MigSlot, ...] = ()
    """Slots of the record without an instance."""


def sort_out(existing: Iterable[Existing], recorded: Mapping[MigSlot, Recorded]) -> Sorted:
    """Whose each instance is."""
    ours: dict[MigSlot, Existing] = {}
    leftovers, foreign, seen = [], [], set()
    for one in existing:
        record = recorded.get(one.slot)
        seen.add(one.slot)
        if record is None or record.step == "lost":
            foreign.append(one)
        elif record.step == "making":
            if one.complete:
                ours[one.slot] = one
            else:
                leftovers.append(one)
        elif one.complete and one.uuid != record.uuid:
            foreign.append(one)
        elif record.step == "removing":
            leftovers.append(one)
        elif one.complete:
            ours[one.slot] = one
        else:
            foreign.append(one)
    return Sorted(ours, tuple(leftovers), tuple(foreign), tuple(slot for slot in recorded if slot not in seen))


def disagreement(table: MigTable, reported: Iterable[MigProfile]) -> str:
    """Where the driver's profiles contradict the table, for a person; empty when they do not. Profiles that only the driver has are never made."""
    drivers = {one.name: one for one in reported}
    for known in table.profiles:
        found, name = drivers.get(known.name), nvidia_form(known.name)
        if found is None:
            return f"the driver reports no profile {name}, which the model has by the table"
        for what in ("compute", "memory", "starts", "decoders", "flow_engines"):
            if getattr(found, what) != getattr(known, what):
                return f"the driver reports {what} {getattr(found, what)} for profile {name}: by the table it is {getattr(known, what)}"
    return ""


def in_the_way(
    table: MigTable, used: Iterable[MigSlot], idle: Iterable[MigSlot], slot: MigSlot
) -> tuple[MigSlot, ...] | None:
    """Idle instances that must go before one can be made at `slot`; None where it does not fit beside those in use."""
    kept = tuple(used)
    if not table.possible((*kept, slot)):
        return None
    mask = table.by_name[slot.profile].mask(slot.start)
    remove: list[MigSlot] = []
    stay: list[MigSlot] = []
    for one in sorted(idle):
        (remove if table.by_name[one.profile].mask(one.start) & mask else stay).append(one)
    while stay and not table.possible((*kept, *stay, slot)):
        remove.append(stay.pop())
    return tuple(remove)


def layout_in_use(table: MigTable, held: Iterable[MigSlot], assigned: Iterable[MigSlot]) -> Layout:
    """Slots that containers have, and of those that waiting pods were assigned the ones that fit beside them. Sorted."""
    layout = tuple(sorted({one for one in held if one.profile in table.by_name}))
    for one in sorted(set(assigned) - set(layout)):
        if table.possible((*layout, one)):
            layout = tuple(sorted((*layout, one)))
    return layout
