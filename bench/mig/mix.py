"""Replay a mix of requests for MIG instances on 100 nodes of 8 H100 80 GB: on demand against static layouts and a lowest-start placement.

Requests arrive at random and hold their instance for an exponential time. One that fits nowhere is lost: there is no queue. Allocation is the mean
part of all compute slices that requests hold, after the first tenth of the run.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vgpu.api.mig import Layout, MigSlot, MigTable, with_slot, without_slot
from vgpu.api.mig_tables import model_of
from vgpu.scheduling.mig_choice import MigGpu, MixWorth, choose

GPUS = 800
MIX: Mapping[str, float] = {"1g.10gb": 0.5, "2g.20gb": 0.25, "3g.40gb": 0.15, "7g.80gb": 0.1}
STATIC: Mapping[str, Mapping[str, int]] = {
    "7 x 1g": {"1g.10gb": 7},
    "3g + 3g": {"3g.40gb": 2},
    "2g + 2g + 3g": {"2g.20gb": 2, "3g.40gb": 1},
}
FOUND = model_of("NVIDIA H100 80GB HBM3")
assert FOUND is not None
TABLE: MigTable = FOUND.table


Place = Callable[["OnDemand", str], tuple[Layout, MigSlot] | None]


class OnDemand:
    """GPUs on which instances are created for requests. GPUs with the same layout are equal, so one of each is judged."""

    def __init__(self, place: Place) -> None:
        self.worth = MixWorth(TABLE, MIX)
        self._place = place
        self._layout: list[Layout] = [()] * GPUS
        self.of: dict[Layout, set[int]] = {(): set(range(GPUS))}

    def take(self, profile: str) -> tuple[int, MigSlot] | None:
        """Instance for a request; None: it is lost."""
        found = self._place(self, profile)
        if found is None:
            return None
        layout, slot = found
        gpu = min(self.of[layout])
        self._set(gpu, with_slot(layout, slot))
        return gpu, slot

    def give(self, held: tuple[int, MigSlot]) -> None:
        """The request ends, and its instance is removed."""
        gpu, slot = held
        self._set(gpu, without_slot(self._layout[gpu], slot))

    def _set(self, gpu: int, layout: Layout) -> None:
        before = self.of[self._layout[gpu]]
        before.remove(gpu)
        if not before:
            del self.of[self._layout[gpu]]
        self._layout[gpu] = layout
        self.of.setdefault(layout, set()).add(gpu)


class Static:
    """GPUs that all have the same layout, for ever. A request takes an instance of its own profile only, as resource names have it."""

    def __init__(self, layout: Mapping[str, int]) -> None:
        self._free = Counter({profile: count * GPUS for profile, count in layout.items()})

    def take(self, profile: str) -> tuple[int, MigSlot] | None:
        """As of `OnDemand`."""
        if not self._free[profile]:
            return None
        self._free[profile] -= 1
        return 0, MigSlot(0, profile)

    def give(self, held: tuple[int, MigSlot]) -> None:
        """As of `OnDemand`."""
        self._free[held[1].profile] += 1


def tangram(fleet: OnDemand, profile: str) -> tuple[Layout, MigSlot] | None:
    """The choice among one GPU of each layout."""
    layouts = sorted(fleet.of)
    chosen = choose((MigGpu(str(at), fleet.worth, layout) for at, layout in enumerate(layouts)), profile)
    return None if chosen is None else (layouts[int(chosen.uuid)], chosen.slot)


def lowest_start(fleet: OnDemand, profile: str) -> tuple[Layout, MigSlot] | None:
    """The first GPU with room, at its lowest start."""
    first: tuple[int, Layout] | None = None
    for layout, gpus in fleet.of.items():
        if TABLE.free_slots(layout, profile) and (first is None or min(gpus) < first[0]):
            first = min(gpus), layout
    return None if first is None else (first[1], TABLE.free_slots(first[1], profile)[0])


FLEETS: Mapping[str, Callable[[], OnDemand | Static]] = {
    "on demand": lambda: OnDemand(tangram),
    "lowest start": lambda: OnDemand(lowest_start),
    **{name: (lambda layout=layout: Static(layout)) for name, layout in STATIC.items()},  # type: ignore[misc]
}


@dataclass(slots=True)
class Outcome:
    """Of one replay."""

    allocation: float
    """Percent of all compute slices, on average."""
    refused: dict[str, float] = field(default_factory=dict)
    """Profile -> percent of its requests."""


def replay(fleet: OnDemand | Static, load: float, seed: int, requests: int) -> Outcome:
    """`requests` arrivals at a load, as a part of the compute slices."""
    random_ = random.Random(seed)
    profiles, weights = list(MIX), list(MIX.values())
    slices = {profile: TABLE.by_name[profile].compute for profile in profiles}
    each = sum(weight * slices[profile] for profile, weight in MIX.items()) / sum(weights)
    rate = load * GPUS * TABLE.compute / each  # arrivals in one mean holding time
    ends: list[tuple[float, int, str, tuple[int, MigSlot]]] = []
    now = held = area = counted_from = 0.0
    asked, refused = Counter[str](), Counter[str]()
    for number in range(requests):
        arrival = now + random_.expovariate(rate)
        while ends and ends[0][0] <= arrival:
            end, _, profile, instance = heapq.heappop(ends)
            area += held * (end - now)
            now, held = end, held - slices[profile]
            fleet.give(instance)
        area += held * (arrival - now)
        now = arrival
        if number == requests // 10:
            area, counted_from = 0.0, now
            asked.clear()
            refused.clear()
        (profile,) = random_.choices(profiles, weights)
        asked[profile] += 1
        instance_ = fleet.take(profile)
        if instance_ is None:
            refused[profile] += 1
            continue
        held += slices[profile]
        heapq.heappush(ends, (now + random_.expovariate(1.0), number, profile, instance_))
    total = GPUS * TABLE.compute * (now - counted_from)
    return Outcome(100 * area / total, {one: 100 * refused[one] / asked[one] for one in profiles})
