"""The layouts that tests of MIG walk through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vgpu.api.mig import Layout, MigSlot, MigTable, with_slot
from vgpu.api.mig_tables import MODELS

SPECIFIED: Final = ("A100 40 GB", "A100 80 GB", "H100 80 GB", "H200", "B200")
"""Models of which every reachable layout is tested. Specified: issue K."""


def table_of(title: str) -> MigTable:
    return next(model.table for model in MODELS if model.title == title)


def name_of(title: str) -> str:
    """As NVML names such a GPU."""
    return next(model.names[0] for model in MODELS if model.title == title)


def slices(table: MigTable, slot: MigSlot) -> set[int]:
    return set(range(slot.start, slot.start + table.by_name[slot.profile].memory))


def places(table: MigTable, layout: Layout, name: str) -> list[MigSlot]:
    """Where an instance may be created beside a layout: by sets of slices and sums of engines, nothing remembered."""
    taken = set().union(*(slices(table, slot) for slot in layout))
    all_ = [table.by_name[slot.profile] for slot in layout] + [table.by_name[name]]
    if (
        sum(one.decoders for one in all_) > table.decoders
        or sum(one.flow_engines for one in all_) > table.flow_engines
        or sum(one.compute for one in all_) > table.compute
    ):
        return []
    starts = table.by_name[name].starts
    return [slot for slot in (MigSlot(start, name) for start in starts) if not slices(table, slot) & taken]


def reachable(table: MigTable) -> Iterator[Layout]:
    """Every layout that creating and removing instances can lead to."""
    seen: set[Layout] = {()}
    rest: list[Layout] = [()]
    while rest:
        layout = rest.pop()
        yield layout
        for profile in table.profiles:
            for slot in table.free_slots(layout, profile.name):
                more = with_slot(layout, slot)
                if more not in seen:
                    seen.add(more)
                    rest.append(more)
