"""MIG on demand: the choice over every reachable layout of every model, against judging each place by hand."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.vgpu.mig_layouts import places, reachable, slices
from vgpu.api.mig import Layout, MigSlot, MigTable, with_slot
from vgpu.api.mig_tables import MODELS
from vgpu.scheduling.mig_choice import EVEN, MigGpu, MixWorth, choose, offered

TABLES = {model.title: model.table for model in MODELS if model.table.profiles}
NAMED = ["A100 40 GB", "A100 80 GB", "H100 80 GB", "H200", "B200", "RTX PRO 6000", "A30"]
H100 = TABLES["H100 80 GB"]
MIX = {"1g.10gb": 0.5, "2g.20gb": 0.25, "3g.40gb": 0.15, "7g.80gb": 0.1}


class Slow:
    """Sets of slices instead of masks, and nothing remembered but layouts."""

    def __init__(self, table: MigTable, mix: dict[str, float]) -> None:
        self.table, self.mix = table, mix
        self.known: dict[Layout, float] = {}

    def slices(self, slot: MigSlot) -> set[int]:
        return slices(self.table, slot)

    def places(self, layout: Layout, name: str) -> list[MigSlot]:
        return places(self.table, layout, name)

    def left(self, layout: Layout) -> float:
        if layout not in self.known:
            free = self.table.compute - sum(self.table.by_name[slot.profile].compute for slot in layout)
            self.known[layout] = (
                sum(w for name, w in self.mix.items() if self.places(layout, name)) * free / self.table.compute
            )
        return self.known[layout]


@pytest.mark.parametrize("title", NAMED)
def test_of_every_reachable_layout_the_place_that_loses_least_is_chosen_and_overlaps_nothing(title):
    table = TABLES[title]
    mix = {profile.name: 1 / (at + 1) for at, profile in enumerate(table.profiles)}
    worth, slow = MixWorth(table, mix), Slow(table, mix)
    layouts = sorted(reachable(table))
    for layout in layouts:
        for profile in table.profiles:
            places = slow.places(layout, profile.name)
            found = worth.best(layout, profile.name)
            if found is None:
                assert places == []
                continue
            lost, slot = found
            assert slot in places
            after = with_slot(layout, slot)
            assert all(not slow.slices(one) & slow.slices(other) for one, other in combinations(after, 2))
            losses = {place: slow.left(layout) - slow.left(with_slot(layout, place)) for place in places}
            assert abs(lost - losses[slot]) < EVEN
            assert lost < min(losses.values()) + EVEN
    assert len(layouts) > 50


@pytest.mark.parametrize("title", NAMED)
def test_a_gpu_offers_what_is_in_use_and_what_could_be_created_and_nothing_else(title):
    table = TABLES[title]
    for layout in sorted(reachable(table)):
        slots = offered(table, layout)
        for profile in table.profiles:
            for slot in table.slots(profile.name):
                there = slot in layout or table.possible((*layout, slot))
                assert (slot in slots[profile.name]) == there, (layout, slot)


def gpu(uuid: str, *used: MigSlot, idle: Layout = (), worth: MixWorth | None = None) -> MigGpu:
    return MigGpu(uuid, worth or MixWorth(H100, MIX), tuple(sorted(used)), tuple(sorted(idle)))


def test_a_small_instance_goes_where_no_larger_one_can():
    assert choose([gpu("a")], "1g.10gb").slot == MigSlot(6, "1g.10gb")


def test_a_gpu_in_use_is_filled_before_an_empty_one():
    found = choose([gpu("a"), gpu("b", MigSlot(6, "1g.10gb")), gpu("c", MigSlot(0, "7g.80gb"))], "1g.10gb")
    assert found.uuid == "b"


def test_no_room_and_an_unknown_profile_are_no_choice():
    assert choose([gpu("a", MigSlot(0, "1g.10gb"))], "7g.80gb") is None
    assert choose([gpu("a")], "1g.5gb") is None
    assert choose([], "1g.10gb") is None


def test_an_idle_instance_is_used_again_and_one_in_the_way_is_removed():
    idle = (MigSlot(6, "1g.10gb"),)
    again = choose([gpu("a"), gpu("b", idle=idle)], "1g.10gb")
    assert (again.uuid, again.exists, again.remove) == ("b", True, ())
    over = choose([gpu("a", idle=(MigSlot(0, "1g.10gb"), MigSlot(4, "1g.10gb")))], "7g.80gb")
    assert (over.exists, over.remove) == (False, (MigSlot(0, "1g.10gb"), MigSlot(4, "1g.10gb")))


def test_an_idle_instance_that_has_the_media_engine_gives_way():
    table = TABLES["RTX PRO 6000"]
    found = choose([gpu("a", idle=(MigSlot(0, "1g.24gb.me.all"),), worth=MixWorth(table, {}))], "1g.24gb")
    assert (found.slot, found.remove) == (MigSlot(9, "1g.24gb"), (MigSlot(0, "1g.24gb.me.all"),))


@settings(deadline=None)
@given(st.data())
def test_any_choice_leaves_a_possible_gpu(data):
    table = data.draw(st.sampled_from(list(TABLES.values())))
    worth = MixWorth(table, {})
    gpus = []
    for number in range(data.draw(st.integers(1, 4))):
        layout: Layout = ()
        for _ in range(data.draw(st.integers(0, 7))):
            free = [slot for profile in table.profiles for slot in table.free_slots(layout, profile.name)]
            if free:
                layout = with_slot(layout, data.draw(st.sampled_from(free)))
        idle = data.draw(st.sets(st.sampled_from(layout))) if layout else set()
        used = tuple(slot for slot in layout if slot not in idle)
        gpus.append(MigGpu(f"g{number}", worth, used, tuple(sorted(idle))))
    profile = data.draw(st.sampled_from(table.profiles)).name
    found = choose(gpus, profile)
    if found is None:
        assert not any(table.free_slots(one.used, profile) for one in gpus)
        return
    of = next(one for one in gpus if one.uuid == found.uuid)
    stay = [slot for slot in of.idle if slot not in found.remove and slot != found.slot]
    assert table.possible((*of.used, *stay, found.slot))
    assert found.exists == (found.slot in of.idle)
    least = min(worth.best(one.used, profile)[0] for one in gpus if worth.best(one.used, profile))
    assert found.lost <= least + 2 * EVEN
