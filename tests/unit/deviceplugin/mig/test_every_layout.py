"""What a node offers and allocates in every layout that creating and removing instances can lead to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.deviceplugin.mig.double import MigDouble, PodsThatHave, mig_gpu, on_demand_of
from tests.unit.vgpu.mig_layouts import SPECIFIED, name_of, places, reachable, table_of
from vgpu.api.inventory import Inventory
from vgpu.api.mig import Layout, MigTable
from vgpu.api.mig_device import slot_device
from vgpu.api.names import DEFAULT
from vgpu.mig.on_demand import in_the_way

LAYOUTS = {title: sorted(reachable(table_of(title))) for title in SPECIFIED}


@pytest.mark.parametrize("title", SPECIFIED)
async def test_the_kubelet_is_offered_what_is_in_use_and_what_can_be_made_and_no_more(
    title: str, tmp_path: Path
) -> None:
    table, gpu, pods = table_of(title), mig_gpu(name_of(title)), PodsThatHave()
    offer, node = on_demand_of(MigDouble(name_of(title)), pods, tmp_path)
    inventory = Inventory((gpu,))
    await node.prepare(inventory)
    offer.set_inventory(inventory)
    for layout in LAYOUTS[title]:
        pods.have(slot_device(gpu.uuid, slot) for slot in layout)
        offer.refresh()
        for profile in table.by_name:
            wanted = {slot for slot in layout if slot.profile == profile} | set(places(table, layout, profile))
            found = [device.id for device in offer.devices(DEFAULT.mig(profile))]
            assert sorted(found) == sorted(slot_device(gpu.uuid, slot) for slot in wanted), (layout, profile)


@pytest.mark.parametrize("title", SPECIFIED)
def test_beside_slots_in_use_nothing_is_made_that_overlaps_them_or_exceeds_the_gpu(title: str) -> None:
    table = table_of(title)
    for layout in LAYOUTS[title]:
        for profile in table.by_name:
            free = places(table, layout, profile)
            for slot in table.slots(profile):
                assert (in_the_way(table, layout, (), slot) == ()) == (slot in free), (layout, slot)


@pytest.mark.parametrize("title", ["A100 80 GB", "H100 80 GB"])
def test_an_idle_instance_goes_only_where_it_is_in_the_way(title: str) -> None:
    table = table_of(title)
    for layout in LAYOUTS[title]:
        for idle in layout[:1] + layout[-1:]:
            check_one_idle(table, layout, tuple(one for one in layout if one != idle))


def check_one_idle(table: MigTable, layout: Layout, used: Layout) -> None:
    (idle,) = set(layout) - set(used)
    for profile in table.by_name:
        beside, instead = places(table, layout, profile), places(table, used, profile)
        for slot in set(table.slots(profile)) - {idle}:
            expected = () if slot in beside else (idle,) if slot in instead else None
            assert in_the_way(table, used, (idle,), slot) == expected, (layout, idle, slot)
