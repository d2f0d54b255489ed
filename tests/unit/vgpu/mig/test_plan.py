"""The plan of one GPU: every layout of every model to every other kind, against trying all sets of instances to keep."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.vgpu.mig_layouts import reachable
from vgpu.api.mig import Layout, MigSlot, MigTable, with_slot
from vgpu.api.mig_tables import MODELS, model_of
from vgpu.mig.layout import place
from vgpu.mig.plan import GpuInstance, GpuState, differences, plan

PLACED = [model for model in MODELS if model.table.profiles]
H100 = model_of("NVIDIA H100 80GB HBM3").table


def state(table: MigTable, layout: Layout, used: frozenset[int] = frozenset(), **more: object) -> GpuState:
    instances = tuple(GpuInstance(at, slot, f"pid {100 + at}" if at in used else "") for at, slot in enumerate(layout))
    return GpuState(**{"index": 0, "uuid": "GPU-x", "device_id": "0x0", "capable": True, "mig": True, "pending": True, "table": table, "instances": instances} | more)  # fmt: skip


def possible_counts(table: MigTable) -> set[tuple[tuple[str, int], ...]]:
    """Every multiset of instances that fits on an empty GPU."""
    return {tuple(sorted(Counter(slot.profile for slot in layout).items())) for layout in reachable(table)}


@pytest.mark.parametrize("model", PLACED, ids=lambda model: model.title)
def test_every_possible_set_of_instances_is_placed(model):
    for counts in possible_counts(model.table):
        slots = place(model.table, (), dict(counts))
        assert slots is not None, counts
        assert model.table.possible(slots)
        assert tuple(sorted(Counter(slot.profile for slot in slots).items())) == counts


def most_kept(now: GpuState, counts: dict[str, int]) -> int | None:
    """By trying each set of instances; None: it cannot be done."""
    used = {one for one in now.instances if one.in_use}
    for size in range(len(now.instances), -1, -1):
        for kept in map(set, combinations(now.instances, size)):
            left = Counter(counts)
            left.subtract(one.slot.profile for one in kept)
            if used <= kept and min(left.values(), default=0) >= 0:
                slots = place(now.table, tuple(sorted(one.slot for one in kept)), +left)
                if slots is not None:
                    return size
    return None


@st.composite
def cases(draw):
    table = draw(st.sampled_from([model.table for model in PLACED]))
    layout: Layout = ()
    for _ in range(draw(st.integers(0, 7))):
        free = [slot for profile in table.profiles for slot in table.free_slots(layout, profile.name)]
        if not free:
            break
        layout = with_slot(layout, draw(st.sampled_from(free)))
    used = draw(st.frozensets(st.sampled_from(range(len(layout)))) if layout else st.just(frozenset()))
    counts = draw(
        st.dictionaries(st.sampled_from([profile.name for profile in table.profiles]), st.integers(1, 4), max_size=3)
    )
    return state(table, layout, used), counts


@settings(deadline=None)
@given(cases())
def test_a_plan_leads_to_what_is_wanted_keeps_what_is_used_and_as_much_else_as_can_be(case):
    now, counts = case
    found = plan(now, True, counts)
    most = most_kept(now, counts)
    if found.refused:
        assert most is None
        assert not found.changes
        return
    after = (*(one.slot for one in found.keep), *found.create)
    assert now.table.possible(after)
    assert Counter(slot.profile for slot in after) == Counter(counts)
    assert not any(one.in_use for one in found.destroy)
    assert set(found.keep) | set(found.destroy) == set(now.instances)
    assert len(found.keep) == most
    beside: Layout = tuple(sorted(one.slot for one in found.keep))
    for slot in found.create:  # each can be created in this order
        assert now.table.fits(beside, slot)
        beside = with_slot(beside, slot)
    done = state(now.table, tuple(sorted(after)))
    assert not plan(done, True, counts).changes
    assert differences(done, True, counts) == []


def test_nothing_changes_when_all_is_as_wanted():
    now = state(H100, (MigSlot(0, "3g.40gb"), MigSlot(4, "3g.40gb")), frozenset({0, 1}))
    assert not plan(now, True, {"3g.40gb": 2}).changes


def test_an_instance_in_use_is_named():
    now = state(H100, (MigSlot(0, "3g.40gb"), MigSlot(4, "1g.10gb")), frozenset({1}))
    found = plan(now, True, {"3g.40gb": 2})
    assert found.refused == (
        "GPU 0 (GPU-x): 2 x 3g.40gb cannot be had while 1g.10gb at slice 4 (GPU instance 1) is in use by pid 101"
    )
    assert not found.changes


def test_an_idle_instance_in_the_way_is_destroyed_and_another_stays():
    now = state(H100, (MigSlot(0, "1g.10gb"), MigSlot(5, "1g.10gb")), frozenset({1}))
    found = plan(now, True, {"1g.10gb": 1, "4g.40gb": 1})
    assert [one.number for one in found.destroy] == [0]
    assert found.create == (MigSlot(0, "4g.40gb"),)


def test_an_instance_without_its_compute_instance_is_made_anew():
    broken = GpuInstance(9, MigSlot(0, "7g.80gb"), complete=False)
    found = plan(state(H100, (), instances=(broken,)), True, {"7g.80gb": 1})
    assert (found.destroy, found.create) == ((broken,), (MigSlot(0, "7g.80gb"),))
    assert "no compute instance" in differences(state(H100, (), instances=(broken,)), True, {})[0]


@pytest.mark.parametrize(
    ("more", "mig", "counts", "words"),
    [
        ({"capable": False, "mig": False, "pending": False}, True, {}, "it has no MIG"),
        ({"pending": False}, True, {}, "MIG mode is on and will be off after a reset of the GPU: reset it first"),
        ({"mig": False, "pending": False, "in_use": "pid 7"}, True, {}, "the GPU is in use (pid 7)"),
        ({}, True, {"1g.5gb": 1}, "it has no profile 1g.5gb, it has 1g.10gb, 1g.10gb+me"),
        ({}, True, {"4g.40gb": 2}, "2 x 4g.40gb do not fit together"),
    ],
)
def test_what_cannot_be_is_refused(more, mig, counts, words):
    found = plan(state(H100, (), **more), mig, counts)
    assert words in found.refused
    assert not found.changes


def test_mig_mode_is_switched_only_on_an_idle_gpu():
    layout = (MigSlot(0, "7g.80gb"),)
    assert plan(state(H100, layout), False, {}).mode is False
    assert "MIG mode must be off" in plan(state(H100, layout, frozenset({0})), False, {}).refused
    assert not plan(state(H100, (), mig=False, pending=False), False, {}).changes
    assert not plan(state(H100, (), mig=False, pending=False, in_use="pid 1"), False, {}).changes
    on = plan(state(H100, (), mig=False, pending=False), True, {"7g.80gb": 1})
    assert (on.mode, on.create) == (True, layout)
    assert differences(state(H100, layout), False, {}) == ["GPU 0: MIG mode is on, must be off"]
