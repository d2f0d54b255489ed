"""Where on the GPUs on demand of one node the MIG instances of a pod go, and what that loses for the mix of requests.

`mig_choice` chooses place by place, which always finds one for instances of one profile: their places never overlap. Instances of several
profiles may then be in each other's way. `fill` tries the other ways, up to `MOST_STEPS` of them; a pod that needs more is refused.

Units and shapes as in `fleet`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vgpu.api.inventory import Gpu
from vgpu.api.mig import MOST_INSTANCES, Layout, MigSlot, MigTable, with_slot
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.mig_choice import EVEN, MigGpu, MixWorth, choose

Floats = npt.NDArray[np.float32]
Way = list[tuple[int, MigSlot]]
"""Per instance: which of the GPUs, and the slot."""

STEPS_OF_A_MIX: Final = 20
"""Parts of the requests are rounded to 1 of this: what layouts are worth is worked out anew only when the mix has moved. Guessed."""
MOST_KEPT: Final = 64
"""Tables of losses, and mixes, that are kept with a fleet, those used last. Guessed."""
MOST_STEPS: Final = 2_000
"""Places tried for the instances of one pod on one node: 10 ms. Guessed."""
MOST_ANSWERS: Final = 65_536
"""Answers of `fit_together` that are kept with a fleet. Guessed."""

Mix = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class SlotGpu:
    """A GPU on demand as one pod may use it."""

    row: int
    """In the node's inventory."""
    gpu: Gpu
    table: MigTable
    used: Layout
    may_use: Callable[[MigSlot], bool] | None = None
    """Which of its slots the pod may have; None: all."""

    def free_slots(self, profile: str) -> tuple[MigSlot, ...]:
        """Where an instance may be created for the pod."""
        if profile not in self.table.by_name:
            return ()
        found = self.table.free_slots(self.used, profile)
        return found if self.may_use is None else tuple(slot for slot in found if self.may_use(slot))

    def room(self, profile: str) -> int:
        """How many instances of a profile fit, if there are no others."""
        if self.may_use is None:
            return self.table.room(self.used, profile) if profile in self.table.by_name else 0
        most, beside = 0, self.used
        for slot in self.free_slots(profile):
            if not self.table.fits(beside, slot):
                break
            beside, most = (*beside, slot), most + 1
        return most

    @property
    def idle(self) -> Layout:
        """Instances that exist for no pod."""
        there = (MigSlot(one.start, one.profile) for one in self.gpu.instances)
        return tuple(sorted(slot for slot in there if slot not in self.used))


def mix_of(fleet: Fleet) -> Mix:
    """Profile -> its part of the instances that pods requested, rounded; those that round to nothing are left out."""
    seen = fleet.distribution.instances()
    total = sum(seen.values())
    rounded = ((profile, round(STEPS_OF_A_MIX * times / total)) for profile, times in sorted(seen.items()))
    return tuple((profile, steps) for profile, steps in rounded if steps)


def worth_of(fleet: Fleet, table: MigTable) -> MixWorth:
    """What layouts of a model are worth under the mix of requests now."""
    mix = mix_of(fleet)
    found: MixWorth = _kept(fleet, ("worth", mix, table), lambda: MixWorth(table, dict(mix)))
    return found


class _Losses:
    """Of one profile under one mix, by the number of a GPU's state plus 1."""

    def __init__(self) -> None:
        self.known = 0
        self.lost: Floats = np.zeros(64, np.float32)

    def extend(self, fleet: Fleet, profile: str) -> None:
        """There are more states."""
        states = fleet.stock.states
        while len(states) >= len(self.lost):
            self.lost = np.concatenate([self.lost, np.zeros_like(self.lost)])
        for number in range(self.known, len(states)):
            layout = states[number].layout
            best = None if layout is None else worth_of(fleet, states[number].table).best(layout, profile)
            self.lost[number + 1] = 0.0 if best is None else best[0]
        self.known = len(states)


def losses(fleet: Fleet, profile: str, columns: Any) -> Floats | None:
    """(GPUs, nodes) what the best place for an instance loses of each GPU, as a part of it; 0 where no instance is created. None: none has slots."""
    if not fleet.stock.on_demand:
        return None
    kept: _Losses = _kept(fleet, ("lost", mix_of(fleet), profile), _Losses)
    if kept.known < len(fleet.stock.states):
        kept.extend(fleet, profile)
    lost: Floats = kept.lost[fleet.stock.number[:, columns] + 1]
    return lost


def _kept(fleet: Fleet, key: Any, make: Callable[[], Any]) -> Any:
    found = fleet.stock.kept.pop(key, None)
    if found is None:
        found = make()
    fleet.stock.kept[key] = found
    if len(fleet.stock.kept) > MOST_KEPT:
        del fleet.stock.kept[next(iter(fleet.stock.kept))]
    return found


def fit_together(fleet: Fleet, numbers: Iterable[int], wanted: Mapping[str, int]) -> bool:
    """Do instances of several profiles fit on GPUs in these states?"""
    answers: dict[Any, bool] = _kept(fleet, "answers", dict)
    key = tuple(sorted(numbers)), tuple(sorted(wanted.items()))
    if key not in answers:
        if len(answers) >= MOST_ANSWERS:
            answers.clear()
        states = [fleet.stock.states[number] for number in key[0]]
        known = [(one.table, one.layout) for one in states if one.layout is not None]
        answers[key] = fill([table for table, _ in known], [layout for _, layout in known], wanted) is not None
    return answers[key]


def slots_for(fleet: Fleet, gpus: Sequence[SlotGpu], wanted: Mapping[str, int]) -> list[tuple[SlotGpu, MigSlot]] | None:
    """A slot for each instance, largest profiles first; None where they do not all fit. `wanted`: profile -> instances."""
    left, found = list(gpus), list[tuple[SlotGpu, MigSlot]]()
    for profile in _in_order([gpu.table for gpu in gpus], wanted):
        chosen = _best(fleet, left, profile)
        if chosen is None:
            break
        at, slot = chosen
        found.append((gpus[at], slot))
        left[at] = replace(left[at], used=with_slot(left[at].used, slot))
    else:
        return found
    may_use = [gpu.may_use for gpu in gpus]
    way = fill([gpu.table for gpu in gpus], [gpu.used for gpu in gpus], wanted, may_use)
    return None if way is None else [(gpus[at], slot) for at, slot in way]


def _best(fleet: Fleet, gpus: Sequence[SlotGpu], profile: str) -> tuple[int, MigSlot] | None:
    """Which GPU, and the slot there, that loses least."""
    if all(gpu.may_use is None for gpu in gpus):
        offered = [MigGpu(str(at), worth_of(fleet, gpu.table), gpu.used, gpu.idle) for at, gpu in enumerate(gpus)]
        chosen = choose(offered, profile)
        return None if chosen is None else (int(chosen.uuid), chosen.slot)
    best: tuple[float, int, MigSlot] | None = None
    for at, gpu in enumerate(gpus):
        worth = worth_of(fleet, gpu.table)
        for slot in reversed(gpu.free_slots(profile)):
            lost = worth.left(gpu.used) - worth.left(with_slot(gpu.used, slot))
            if best is None or lost < best[0] - EVEN:
                best = lost, at, slot
    return None if best is None else best[1:]


def fill(
    tables: Sequence[MigTable],
    layouts: Sequence[Layout],
    wanted: Mapping[str, int],
    may_use: Sequence[Callable[[MigSlot], bool] | None] = (),
) -> Way | None:
    """A way to place all instances beside what is there; None where there is none, or `MOST_STEPS` did not find it."""
    search = _Fill(tables, tuple(_in_order(tables, wanted)), may_use or [None] * len(tables))
    if len(search.items) > MOST_INSTANCES * len(tables) or not search.possible():
        return None
    return search.place(0, tuple(layouts), (0, -1))


def _in_order(tables: Sequence[MigTable], wanted: Mapping[str, int]) -> list[str]:
    """A profile for each instance, those that take most first."""
    known = {name: table.by_name[name] for table in tables for name in wanted if name in table.by_name}
    names = [name for name, count in sorted(wanted.items()) for _ in range(count)]
    return sorted(names, key=lambda name: (-known[name].memory, -known[name].compute) if name in known else (0, 0))


class _Fill:
    """`items`: a profile for each instance, equal ones side by side."""

    def __init__(
        self,
        tables: Sequence[MigTable],
        items: tuple[str, ...],
        may_use: Sequence[Callable[[MigSlot], bool] | None],
    ) -> None:
        self.items, self._tables, self._may_use = items, tables, may_use
        self._steps = 0
        self._dead = set[tuple[int, tuple[Layout, ...], tuple[int, int]]]()

    def possible(self) -> bool:
        """Does some GPU know each profile?"""
        return all(any(item in table.by_name for table in self._tables) for item in self.items)

    def place(self, item: int, layouts: tuple[Layout, ...], least: tuple[int, int]) -> Way | None:
        """Place this instance and those after it. `least`: the GPU and start after which it comes, if the one before is of the same profile."""
        if item == len(self.items):
            return []
        key = item, layouts, least
        if key in self._dead:
            return None
        profile, tried = self.items[item], set[tuple[MigTable, Layout]]()
        same_next = item + 1 < len(self.items) and self.items[item + 1] == profile
        for at in range(least[0], len(layouts)):
            table, layout, may_use = self._tables[at], layouts[at], self._may_use[at]
            if profile not in table.by_name or (may_use is None and (table, layout) in tried):
                continue
            if may_use is None and at > least[0]:
                tried.add((table, layout))
            for slot in table.free_slots(layout, profile):
                if (at, slot.start) <= least or (may_use is not None and not may_use(slot)):
                    continue
                self._steps += 1
                if self._steps > MOST_STEPS:
                    return None
                beside = (*layouts[:at], with_slot(layout, slot), *layouts[at + 1 :])
                rest = self.place(item + 1, beside, (at, slot.start) if same_next else (0, -1))
                if rest is not None:
                    return [(at, slot), *rest]
        self._dead.add(key)
        return None
