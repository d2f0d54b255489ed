"""The layouts that tests of MIG walk through."""

from __future__ import annotations

from collections.abc import Iterator

from vgpu.api.mig import Layout, MigTable, with_slot


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
