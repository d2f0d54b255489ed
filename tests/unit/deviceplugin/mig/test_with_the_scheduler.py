"""What the scheduler chooses on a GPU on demand the kubelet is offered, and the node makes it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.deviceplugin.mig.double import MigDouble, PodsThatHave, mig_gpu, on_demand_of
from tests.unit.vgpu.mig_layouts import SPECIFIED, name_of, table_of
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Inventory
from vgpu.api.mig_device import slot_of_device
from vgpu.api.names import DEFAULT
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import Placement, place

END, TIDY = "end", "tidy"


class World:
    """A node of one GPU, and a scheduler that knows its inventory and its pods."""

    def __init__(self, title: str, folder: Path) -> None:
        self.driver, self.seen = MigDouble(name_of(title)), PodsThatHave()
        self.gpu, self.pods, self.now_s = mig_gpu(name_of(title)), list[AssignedGpu](), 0.0
        self.offer, self.node = on_demand_of(self.driver, self.seen, folder, clock=lambda: self.now_s)

    async def begin(self) -> None:
        await self.node.prepare(Inventory((self.gpu,)))
        self.offer.set_inventory(Inventory((self.gpu,)))
        await self.tidies()

    async def arrives(self, profile: str) -> bool:
        fleet = Fleet()
        fleet.set_node("n1", self.offer.inventory(), self.pods)
        found = place(fleet, PodRequest((GpuRequest("main", "mig", 1, profile=profile),)), ["n1"])
        offered = {device.id for device in self.offer.devices(DEFAULT.mig(profile))}
        if not isinstance(found, Placement):
            assert offered == {one.uuid for one in self.pods if one.profile == profile}, "what is in use, and no more"
            return False
        (chosen,) = found.assignment.containers["main"]
        assert chosen.uuid in offered - {one.uuid for one in self.pods}
        await self.node.allocate([chosen.uuid])
        self.pods.append(chosen)
        self.see()
        return True

    def ends(self, number: int) -> None:
        if self.pods:
            del self.pods[number % len(self.pods)]
        self.see()

    async def tidies(self) -> None:
        for _ in range(2):
            self.now_s += 60
            await self.node._tidy()

    def see(self) -> None:
        self.seen.have(one.uuid for one in self.pods)
        self.offer.refresh()


@pytest.mark.parametrize("title", SPECIFIED)
@settings(deadline=None, max_examples=examples(25))
@given(data=st.data())
def test_what_the_scheduler_chooses_is_offered_and_made(
    tmp_path_factory: pytest.TempPathFactory, title: str, data
) -> None:  # type: ignore[no-untyped-def]
    profiles = [profile.name for profile in table_of(title).profiles]
    events = data.draw(st.lists(st.sampled_from([*profiles, *profiles, END, END, END, TIDY]), min_size=4, max_size=20))

    async def happen() -> None:
        world = World(title, tmp_path_factory.mktemp("mig"))
        await world.begin()
        for event in events:
            if event == END:
                world.ends(data.draw(st.integers(0, 9)))
            elif event == TIDY:
                await world.tidies()
            else:
                await world.arrives(event)
            in_use = {slot_of_device(one.uuid) for one in world.pods}
            there = {(world.gpu.uuid, slot) for slot in world.driver.layout()}
            assert in_use <= there
            assert event != TIDY or in_use == there

    asyncio.run(happen())
