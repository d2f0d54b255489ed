"""Profiles and placements: the tables against NVIDIA's documented counts, and every reachable layout against a slow check."""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.unit.vgpu.mig_layouts import reachable
from vgpu.api.inventory import Gpu
from vgpu.api.mig import (
    MOST_INSTANCES,
    MigSlot,
    MigTable,
    is_profile,
    nvidia_form,
    resource_form,
    with_slot,
    without_slot,
)
from vgpu.api.mig_tables import MODELS, known_profiles, model_of
from vgpu.api.names import DEFAULT

PLACED = [model for model in MODELS if model.table.profiles]

DOCUMENTED = {
    "A30": [4, 1, 2, 1, 1],
    "RTX PRO 6000": [4, 1, 4, 1, 4, 2, 2, 1, 2, 1, 1],
}
"""Instances that fit on an empty GPU, by NVIDIA's MIG User Guide, in the order of the table; all others have `SEVENTHS`."""
SEVENTHS = [7, 1, 4, 3, 2, 1, 1]


def slices(table: MigTable, slot: MigSlot) -> set[int]:
    return set(range(slot.start, slot.start + table.by_name[slot.profile].memory))


@pytest.mark.parametrize("model", PLACED, ids=lambda model: model.title)
def test_as_many_instances_of_each_profile_fit_as_nvidia_documents(model):
    table = model.table
    assert [table.room((), profile.name) for profile in table.profiles] == DOCUMENTED.get(model.title, SEVENTHS)


@pytest.mark.parametrize("model", PLACED, ids=lambda model: model.title)
def test_no_reachable_layout_has_two_instances_on_one_slice_or_more_than_the_gpu_has(model):
    table, whole = model.table, 0
    for layout in reachable(table):
        whole += 1
        assert len(layout) <= MOST_INSTANCES
        assert all(not slices(table, one) & slices(table, other) for one, other in combinations(layout, 2)), layout
        of = [table.by_name[slot.profile] for slot in layout]
        assert sum(one.compute for one in of) <= table.compute
        assert sum(one.decoders for one in of) <= table.decoders
        assert sum(one.flow_engines for one in of) <= 1
        assert all(max(slices(table, slot)) < table.memory for slot in layout)
    assert whole > 50


@pytest.mark.parametrize("model", PLACED, ids=lambda model: model.title)
def test_room_is_what_trying_every_set_of_places_finds(model):
    table = model.table
    for layout in list(reachable(table))[::97]:
        for profile in table.profiles:
            slots = table.slots(profile.name)
            sizes = range(len(slots), -1, -1)
            most = next(n for n in sizes if any(table.possible((*layout, *some)) for some in combinations(slots, n)))
            assert table.room(layout, profile.name) == most, (layout, profile.name)


@pytest.mark.parametrize("model", PLACED, ids=lambda model: model.title)
def test_places_of_one_profile_never_overlap(model):
    for profile in model.table.profiles:
        assert all(b - a >= profile.memory for a, b in zip(profile.starts, profile.starts[1:], strict=False))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.title)
def test_every_profile_is_a_resource_and_has_nvidias_spelling(model):
    for name in (*model.profiles, *model.other_names):
        assert is_profile(name)
        assert resource_form(nvidia_form(name)) == name
        assert DEFAULT.mig_profile(f"tangram.sh/mig-{name}") == name
    assert (nvidia_form("1g.24gb.me.all"), nvidia_form("1g.24gb-me")) == ("1g.24gb+me.all", "1g.24gb-me")


@pytest.mark.parametrize(
    "name", ["", "1g", "1g.5", "0g.5gb", "1g.5gb+me", "1c.2g.10gb", "1g.5gb.", "1g.5gb.me.", "mig-1g.5gb", "1g.5gb\n"]
)
def test_what_is_no_profile_is_none(name):
    assert not is_profile(name)
    assert DEFAULT.mig_profile(f"tangram.sh/mig-{name}") is None


def test_profile_numbers_and_names_are_unique_in_a_model():
    for model in PLACED:
        numbers = [profile.number for profile in model.table.profiles]
        assert len(set(numbers)) == len(numbers)
        assert len(model.table.by_name) == len(numbers)


def test_a_gpu_is_found_by_the_name_that_nvml_has():
    assert model_of(Gpu("GPU-x", 0, "NVIDIA B200", 1).model).title == "B200"
    assert model_of("Tesla T4") is None
    names = [name for model in MODELS for name in model.names]
    assert len(set(names)) == len(names)


def test_names_of_new_models_are_known():
    assert {"1g.34gb", "7g.269gb", "1g.24gb.gfx", "1g.24gb-me", "4g.96gb", "2g.48gb.me.all"} <= set(known_profiles())
    assert len(set(known_profiles())) == len(known_profiles())


def test_a_place_of_no_table_is_not_possible():
    table = model_of("NVIDIA H200").table
    assert not table.possible((MigSlot(1, "3g.71gb"),))
    assert not table.possible((MigSlot(0, "1g.5gb"),))
    layout = (MigSlot(0, "3g.71gb"), MigSlot(4, "1g.18gb"))
    assert without_slot(with_slot(layout, MigSlot(5, "1g.18gb")), MigSlot(5, "1g.18gb")) == layout
    with pytest.raises(ValueError, match="not in list"):
        without_slot(layout, MigSlot(6, "1g.18gb"))
