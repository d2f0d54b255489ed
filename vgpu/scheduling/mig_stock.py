"""MIG instances of a fleet: those that exist because they were declared, and those that GPUs on demand have room for.

Of a GPU on demand the slots of its pods decide (bound, reserved or orphaned: whatever the fleet counts). What it offers of a profile is how many
instances would fit on it without pods, and what is free how many still fit beside those slots, if no other profile takes the place.
So for one profile at a time both kinds of GPUs are counted alike; `mig_slots` decides where several profiles share a GPU.

Each state of a GPU on demand has a number, so that what follows from it is worked out once and looked up for all nodes. There are some thousand
states of a model at most.

Units and shapes as in `fleet`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.mig import Layout, MigSlot, MigTable
from vgpu.api.mig_device import slot_mib, slot_of_device
from vgpu.api.mig_tables import model_of
from vgpu.api.request import FULL_CORE_PERCENT
from vgpu.scheduling.arrays import Ints

NONE: Final = -1
"""State of a GPU that is not on demand. As an index it is the last."""

MOST_STATES: Final = 20_000
"""That are kept although no GPU is in them. Guessed: each costs some hundred bytes. A node that reports another memory of a GPU each time makes new ones without end."""

_slot_of: Final = lru_cache(maxsize=65_536)(slot_of_device)


@dataclass(frozen=True, slots=True, eq=False)
class Instances:
    """MIG instances of one profile, per GPU."""

    offered: Ints
    """(GPUs, nodes) instances that exist and may be given; on demand: that would fit if no pod had any."""
    free: Ints
    """(GPUs, nodes) of those, how many are free; on demand: that still fit."""
    free_mib: Ints
    """(GPUs, nodes) memory of the free ones together."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """A GPU on demand."""

    table: MigTable
    gpu_mib: int
    layout: Layout | None
    """The slots of pods. None: they cannot exist together, or one is not known, so nothing more is placed there."""

    @property
    def free_mib(self) -> int:
        """Of memory slices that no pod has."""
        used = 0 if self.layout is None else sum(self.table.by_name[one.profile].memory for one in self.layout)
        return 0 if self.layout is None else self.gpu_mib * (self.table.memory - used) // self.table.memory

    def room(self, profile: str) -> int:
        """How many instances of a profile still fit, if there are no others."""
        if self.layout is None or profile not in self.table.by_name:
            return 0
        return self.table.room(self.layout, profile)

    def mib(self, profile: str) -> int:
        """Memory of an instance."""
        return slot_mib(self.gpu_mib, self.table, profile)


def table_of(gpu: Gpu) -> MigTable | None:
    """Profiles that may be placed on a GPU on demand; None where it is no such GPU, or its placements are not known."""
    model = model_of(gpu.model) if gpu.on_demand and gpu.mig and gpu.offered else None
    return model.table if model is not None and model.table.profiles else None


def free_on(gpu: Gpu, profile: str, taken: Iterable[str] = ()) -> int:
    """How many instances of a profile a GPU on demand has room for; 0 for another GPU. `taken` as for `state_of`."""
    table = table_of(gpu)
    return 0 if table is None else state_of(gpu, table, taken).room(profile)


def state_of(gpu: Gpu, table: MigTable, taken: Iterable[str]) -> SlotState:
    """`taken`: slots and MIG instances that pods of the node have, on any GPU."""
    slots, known = set[MigSlot](), {one.uuid: MigSlot(one.start, one.profile) for one in gpu.instances}
    for name in taken:
        of = _slot_of(name)
        if of is not None and of[0] == gpu.uuid:
            slots.add(of[1])
        elif name in known:
            slots.add(known[name])
    layout = tuple(sorted(slots))
    possible = table.possible(layout) and all(table.possible((one,)) for one in known.values())
    return SlotState(table, gpu.mib, layout if possible else None)


class MigStock:
    """`by_profile` and `containers` are read by everyone, and written here alone."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.by_profile: dict[str, Instances] = {}
        self.containers: dict[str, dict[str, int]] = {}
        """Node -> UUID of a MIG instance, or name of a slot -> containers that use it; free ones are left out."""
        self.number: Ints = np.full(shape, NONE, np.int32)
        """(GPUs, nodes) the state of each GPU on demand."""
        self.states: list[SlotState] = []
        self.on_demand = 0
        """GPUs on demand in the fleet."""
        self.kept: dict[Any, Any] = {}
        """What `mig_slots` keeps with the fleet."""
        self._numbers: dict[tuple[MigTable, int, Layout | None], int] = {}
        self._most_states = MOST_STATES

    def set_node(self, node: str, at: int, inventory: Inventory) -> None:
        """A node has these GPUs now, in a column that was cleared, and no pod has any."""
        if len(self.states) >= self._most_states:
            self._drop_unused_states()
        self.containers[node] = {}
        for row, gpu in enumerate(inventory.gpus):
            self._count(node, row, at, gpu, sorted({instance.profile for instance in gpu.offered_instances}))

    def change(self, node: str, at: int, inventory: Inventory, assigned: AssignedGpu, sign: int) -> None:
        """A pod has this instance or slot now, or no longer."""
        held = self.containers[node]
        held[assigned.uuid] = held.get(assigned.uuid, 0) + sign
        if not held[assigned.uuid]:
            del held[assigned.uuid]
        slot = _slot_of(assigned.uuid)
        for row, gpu in enumerate(inventory.gpus):
            if slot is not None and gpu.uuid == slot[0]:
                self._count(node, row, at, gpu, ())
            elif slot is None and any(instance.uuid == assigned.uuid for instance in gpu.instances):
                self._count(node, row, at, gpu, (assigned.profile,))

    def clear(self, at: int) -> None:
        """A column has no GPUs."""
        self.on_demand -= int(np.count_nonzero(self.number[:, at] != NONE))
        self.number[:, at] = NONE
        for known in self.by_profile.values():
            for array in (known.offered, known.free, known.free_mib):
                array[:, at] = 0

    def grow(self, axis: int) -> None:
        """There are twice as many GPUs (0) or nodes (1)."""
        self.number = np.concatenate([self.number, np.full_like(self.number, NONE)], axis=axis)
        for profile, known in self.by_profile.items():
            arrays = (known.offered, known.free, known.free_mib)
            self.by_profile[profile] = Instances(
                *(np.concatenate([array, np.zeros_like(array)], axis=axis) for array in arrays)
            )

    def state(self, row: int, at: int) -> SlotState | None:
        """Of a GPU; None where it is not on demand."""
        number = int(self.number[row, at])
        return None if number == NONE else self.states[number]

    def emptied(self, number: int) -> int:
        """The state of the same GPU without pods."""
        return self._number(self.states[number].table, self.states[number].gpu_mib, ())

    def is_free(self, node: str, at: int, inventory: Inventory, name: str) -> bool:
        """May a pod be given this instance or slot?"""
        if name in self.containers[node]:
            return False
        slot = _slot_of(name)
        for row, gpu in enumerate(inventory.gpus):
            state = self.state(row, at)
            if slot is None and any(one.uuid == name for one in gpu.offered_instances):
                return True
            if slot is not None and slot[0] == gpu.uuid and state is not None and state.layout is not None:
                return state.table.fits(state.layout, slot[1])
        return False

    def overlaps(self, at: int) -> bool:
        """Do pods of a node have slots that cannot exist together?"""
        return any(self.states[one].layout is None for one in self.number[:, at].tolist() if one != NONE)

    def overcommitted(
        self, column: Mapping[str, int], inventories: Mapping[str, Inventory]
    ) -> Iterator[tuple[str, str, int, int]]:
        """(node, UUID, free MiB, free percent) of instances and slots that several pods have, and of GPUs whose slots exclude each other."""
        for node, taken in self.containers.items():
            gpus = inventories[node].gpus
            if any(containers > 1 for containers in taken.values()):
                mib = {one.uuid: one.mib for gpu in gpus for one in gpu.instances}
                for name, containers in taken.items():
                    if containers > 1 and (name in mib or self._is_slot_of(gpus, name)):
                        yield node, name, mib.get(name, 0) * (1 - containers), FULL_CORE_PERCENT * (1 - containers)
            if self.on_demand and self.overlaps(column[node]):
                for row, gpu in enumerate(gpus):
                    state = self.state(row, column[node])
                    if state is not None and state.layout is None:
                        yield node, gpu.uuid, -1, -1

    def free_mib(self) -> Ints:
        """(GPUs, nodes) memory that pods may still get as instances."""
        total: Ints = np.zeros(self.number.shape, np.int32)
        for known in self.by_profile.values():
            total += np.where(self.number == NONE, known.free_mib, 0)
        if self.on_demand:
            total += np.array([*(one.free_mib for one in self.states), 0], np.int32)[self.number]
        return total

    @staticmethod
    def _is_slot_of(gpus: Iterable[Gpu], name: str) -> bool:
        slot = _slot_of(name)
        return slot is not None and any(gpu.uuid == slot[0] for gpu in gpus)

    def _count(self, node: str, row: int, at: int, gpu: Gpu, profiles: Iterable[str]) -> None:
        """Write down how many instances a GPU offers, and what of them is free. `profiles`: of declared instances that may have changed."""
        table = table_of(gpu)
        if table is not None:
            self._count_slots(row, at, state_of(gpu, table, self.containers[node]))
            return
        for profile in profiles:
            known, taken = self._known(profile), self.containers[node]
            offered = [one for one in gpu.offered_instances if one.profile == profile]
            free = [one.mib for one in offered if one.uuid not in taken]
            known.offered[row, at], known.free[row, at], known.free_mib[row, at] = len(offered), len(free), sum(free)

    def _count_slots(self, row: int, at: int, state: SlotState) -> None:
        number = self._number(state.table, state.gpu_mib, state.layout)
        if self.number[row, at] == number:
            return
        first = self.number[row, at] == NONE
        self.on_demand += bool(first)
        self.number[row, at] = number
        for profile in state.table.by_name:
            known, free = self._known(profile), state.room(profile)
            if first:
                known.offered[row, at] = state.table.room((), profile)
            known.free[row, at], known.free_mib[row, at] = free, free * state.mib(profile)

    def _known(self, profile: str) -> Instances:
        if profile not in self.by_profile:
            self.by_profile[profile] = Instances(*(np.zeros(self.number.shape, np.int32) for _ in range(3)))
        return self.by_profile[profile]

    def _number(self, table: MigTable, gpu_mib: int, layout: Layout | None) -> int:
        key = table, gpu_mib, layout
        if key not in self._numbers:
            self._numbers[key] = len(self.states)
            self.states.append(SlotState(table, gpu_mib, layout))
        return self._numbers[key]

    def _drop_unused_states(self) -> None:
        """Number those anew that GPUs are in. What was worked out for the others goes, too."""
        used = [int(one) for one in np.unique(self.number) if one != NONE]
        after = np.full(len(self.states) + 1, NONE, np.int32)  # the last is of NONE
        after[used] = np.arange(len(used), dtype=np.int32)
        self.number = after[self.number]
        self.states = [self.states[one] for one in used]
        self._numbers = {(one.table, one.gpu_mib, one.layout): at for at, one in enumerate(self.states)}
        self.kept.clear()
        self._most_states = max(MOST_STATES, 2 * len(self.states))
