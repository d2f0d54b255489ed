"""What the scheduler counts as free in every layout that creating and removing instances can lead to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.builders import gpu
from tests.unit.vgpu.mig_layouts import SPECIFIED, name_of, places, reachable, table_of
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Inventory
from vgpu.api.mig import Layout, MigTable, with_slot
from vgpu.api.mig_device import slot_device
from vgpu.scheduling.fleet import Fleet


def most(table: MigTable, layout: Layout, profile: str) -> int:
    """How many more instances of one profile there can be: one after another, in any order the same."""
    free = places(table, layout, profile)
    return 1 + most(table, with_slot(layout, free[0]), profile) if free else 0


@pytest.mark.parametrize("title", SPECIFIED)
def test_a_slot_is_free_where_nothing_in_use_rules_it_out(title: str) -> None:
    table, fleet = table_of(title), Fleet()
    of = replace(gpu(0, 81_920, model=name_of(title)), mig=True, on_demand=True)
    inventory = Inventory((of,))
    for layout in reachable(table):
        held = [AssignedGpu(slot_device(of.uuid, slot), 0, 1, 100, "mig", slot.profile) for slot in layout]
        fleet.set_node("n1", inventory, held)
        at = fleet.column["n1"]
        state = fleet.stock.state(0, at)
        assert state is not None
        assert state.layout == layout
        for profile in table.by_name:
            free = places(table, layout, profile)
            assert state.room(profile) == fleet.stock.by_profile[profile].free[0, at] == most(table, layout, profile)
            for slot in table.slots(profile):
                found = fleet.stock.is_free("n1", at, inventory, slot_device(of.uuid, slot))
                assert found == (slot in free), (layout, slot)
