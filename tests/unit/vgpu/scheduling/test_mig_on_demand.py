"""Slots of GPUs on demand: placement against an obvious version that knows which memory slices and engines are taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import gpu, mig_gpu
from tests.examples import examples
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory, MigInstance
from vgpu.api.mig import MigSlot
from vgpu.api.mig_device import slot_device, slot_of_device
from vgpu.api.mig_tables import model_of
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling import mig_stock
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import NO_MIG_EVER, NO_MIG_ROOM, Placement, explain, place, spare

A30, H100 = "NVIDIA A30", "NVIDIA H100 80GB HBM3"


def on_demand(index: int, *exists: MigSlot, node: str = "n1", model: str = H100, **more: object) -> Gpu:
    """A GPU whose instances are made on demand; `exists`: those that are there now."""
    instances = tuple(
        MigInstance(f"MIG-{node}-{index}-{at}", one.profile, 1, at, 0, one.start) for at, one in enumerate(exists)
    )
    made = gpu(index, 24_576 if model == A30 else 81_920, node, mig=True, on_demand=True, instances=instances)
    return replace(made, model=model, **more)  # type: ignore[arg-type]


def mig(profile: str, count: int = 1, name: str = "", *, init: bool = False) -> GpuRequest:
    """A container that requests instances."""
    return GpuRequest(name or f"c-{profile}", "mig", count, profile=profile, init=init)


def pod(*parts: GpuRequest, **more: frozenset[str]) -> PodRequest:
    """A pod of these containers."""
    return PodRequest(parts, **more)


def in_slot(of: Gpu, profile: str, start: int) -> AssignedGpu:
    """What a pod has."""
    return AssignedGpu(slot_device(of.uuid, MigSlot(start, profile)), of.index, 1, 100, "mig", profile)


class Slices:
    """The obvious version: one GPU as a set of memory slices, and what is left of the rest."""

    def __init__(self, one: Gpu) -> None:
        found = model_of(one.model)
        assert found is not None
        self.table, self.taken = found.table, set[int]()
        self.left = [self.table.compute, self.table.decoders, self.table.flow_engines]

    def take(self, slot: MigSlot) -> bool:
        """False where it cannot be."""
        of = next(profile for profile in self.table.profiles if profile.name == slot.profile)
        slices = set(range(slot.start, slot.start + of.memory))
        left = [have - want for have, want in zip(self.left, (of.compute, of.decoders, of.flow_engines), strict=True)]
        if slot.start not in of.starts or slices & self.taken or min(left) < 0:
            return False
        self.taken |= slices
        self.left = left
        return True


def ways(gpus: Sequence[Gpu], wanted: Sequence[GpuRequest]) -> Iterator[tuple[tuple[Gpu, MigSlot], ...]]:
    """Every way to choose slots, possible or not."""
    of_each = []
    for part in wanted:
        slots = [
            (one, MigSlot(start, part.profile))
            for one in gpus
            for profile in Slices(one).table.profiles
            if profile.name == part.profile
            for start in profile.starts
        ]
        of_each.append(list(combinations(slots, part.gpus)))
    for chosen in product(*of_each):
        yield tuple(slot for some in chosen for slot in some)


def possible(gpus: Sequence[Gpu], held: Sequence[AssignedGpu], more: Sequence[tuple[Gpu, MigSlot]]) -> bool:
    """Can all of this exist together?"""
    slices = {one.uuid: Slices(one) for one in gpus}
    taken = [slot_of_device(one.uuid) for one in held] + [(one.uuid, slot) for one, slot in more]
    return all(found is not None and slices[found[0]].take(found[1]) for found in taken)


PROFILES = {
    A30: ["1g.6gb", "1g.6gb.me", "2g.12gb", "2g.12gb.me", "4g.24gb"],
    H100: ["1g.10gb", "1g.10gb.me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"],
}
requests = st.sampled_from([A30, H100]).flatmap(
    lambda model: st.lists(
        st.tuples(st.sampled_from(PROFILES[model]), st.integers(1, 2)), min_size=1, max_size=3, unique_by=lambda one: one[0]
    )
)  # fmt: skip


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.sampled_from([A30, H100]), min_size=1, max_size=2),
    st.lists(st.one_of(requests, st.integers(0, 9)), max_size=12),
    requests,
)
def test_pods_never_overlap_and_fit_exactly_where_some_way_is_possible(
    models: list[str], events: list[list[tuple[str, int]] | int], last: list[tuple[str, int]]
) -> None:
    gpus = [on_demand(at, model=model) for at, model in enumerate(models)]
    fleet, pods = Fleet(), list[tuple[AssignedGpu, ...]]()
    fleet.set_node("n1", Inventory(tuple(gpus)))
    for event in [*events, last]:
        held = [one for pod_ in pods for one in pod_]
        if isinstance(event, int):
            for one in pods.pop(event % len(pods)) if pods else ():
                fleet.credit("n1", one)
            continue
        request = pod(*(mig(profile, count) for profile, count in event))
        placed = place(fleet, request, ["n1"])
        if isinstance(placed, Placement):
            pods.append(placed.assignment.held())
            assert len(pods[-1]) == sum(count for _, count in event)
            assert possible(gpus, [*held, *pods[-1]], ())
            for one in pods[-1]:
                fleet.debit("n1", one)
        else:
            empty = any(possible(gpus, (), way) for way in ways(gpus, request.containers))
            assert placed.reasons == {"n1": NO_MIG_ROOM if empty else NO_MIG_EVER}
            assert not any(possible(gpus, held, way) for way in ways(gpus, request.containers))
        assert not fleet.overcommitted()
    counted = Fleet()
    counted.set_node("n1", Inventory(tuple(gpus)), [one for pod_ in pods for one in pod_])
    for profile, known in fleet.mig.items():
        again = counted.mig[profile]
        assert (known.offered == again.offered).all()
        assert (known.free == again.free).all()
        assert (known.free_mib == again.free_mib).all()


def test_declared_instances_go_first_and_slots_fill_up_what_lacks() -> None:
    declared, slots = mig_gpu(1, "1g.10gb"), on_demand(0)
    fleet = Fleet()
    fleet.set_node("n1", Inventory((slots, declared)))
    placed = place(fleet, pod(mig("1g.10gb", 3)), ["n1"])
    assert isinstance(placed, Placement)
    first, *others = placed.assignment.uuids("c-1g.10gb")
    assert first == declared.instances[0].uuid
    assert [slot_of_device(one) for one in others] == [
        (slots.uuid, MigSlot(6, "1g.10gb")),
        (slots.uuid, MigSlot(5, "1g.10gb")),
    ]
    assert explain(fleet, pod(mig("1g.10gb", 9)), ["n1"]) == {"n1": NO_MIG_EVER}


def test_an_init_container_hands_its_slots_on_and_a_share_lies_on_another_gpu() -> None:
    fleet, plain = Fleet(), gpu(1)
    fleet.set_node("n1", Inventory((on_demand(0), plain)))
    share = GpuRequest("share", "share", 1, mib=1_024)
    placed = place(fleet, pod(mig("3g.40gb", 2, "init", init=True), mig("3g.40gb", 1, "app"), share), ["n1"])
    assert isinstance(placed, Placement)
    assert placed.assignment.uuids("app") == placed.assignment.uuids("init")[:1]
    assert placed.assignment.uuids("share") == (plain.uuid,)
    assert len(placed.assignment.held()) == 3


def test_an_idle_instance_is_used_again_and_one_without_a_known_place_keeps_pods_off() -> None:
    fleet = Fleet()
    fleet.set_node("n1", Inventory((on_demand(0), on_demand(1, MigSlot(5, "1g.10gb")))))
    placed = place(fleet, pod(mig("1g.10gb")), ["n1"])
    assert isinstance(placed, Placement)
    assert slot_of_device(placed.assignment.uuids("c-1g.10gb")[0]) == (on_demand(1).uuid, MigSlot(5, "1g.10gb"))
    fleet.set_node("n1", Inventory((on_demand(0, MigSlot(-1, "1g.10gb")),)))
    assert explain(fleet, pod(mig("1g.10gb")), ["n1"]) == {"n1": NO_MIG_ROOM}


def test_pods_whose_slots_exclude_each_other_are_reported_and_nothing_joins_them() -> None:
    one, fleet = on_demand(0), Fleet()
    fleet.set_node("n1", Inventory((one,)), [in_slot(one, "3g.40gb", 0), in_slot(one, "2g.20gb", 2)])
    assert [(node, uuid) for node, uuid, _, _ in fleet.overcommitted()] == [("n1", one.uuid)]
    assert explain(fleet, pod(mig("1g.10gb")), ["n1"]) == {"n1": NO_MIG_ROOM}
    fleet.credit("n1", in_slot(one, "2g.20gb", 2))
    assert not fleet.overcommitted()
    fleet.debit("n1", in_slot(one, "3g.40gb", 0))
    assert [uuid for _, uuid, _, _ in fleet.overcommitted()] == [in_slot(one, "3g.40gb", 0).uuid]


def test_a_sick_gpu_and_one_of_an_unknown_model_have_no_slots() -> None:
    fleet = Fleet()
    fleet.set_node("n1", Inventory((on_demand(0, healthy=False), replace(on_demand(1), model="NVIDIA X"))))
    assert explain(fleet, pod(mig("1g.10gb")), ["n1"]) == {"n1": NO_MIG_EVER}


def test_conditions_name_gpus_and_slots() -> None:
    first, second, fleet = on_demand(0), on_demand(1), Fleet()
    fleet.set_node("n1", Inventory((first, second)))
    slot = in_slot(second, "1g.10gb", 2).uuid

    def given(request: PodRequest, only: dict[str, set[str]] | None = None) -> list[str]:
        placed = place(fleet, request, ["n1"], only)
        return [one.uuid for one in placed.assignment.held()] if isinstance(placed, Placement) else []

    assert all(one.startswith(second.uuid) for one in given(pod(mig("1g.10gb", 7), uuids=frozenset({second.uuid}))))
    assert not given(pod(mig("1g.10gb", 8), uuids=frozenset({second.uuid})))
    assert given(pod(mig("1g.10gb"), uuids=frozenset({slot}))) == [slot]
    assert given(pod(mig("1g.10gb")), {"n1": {slot}}) == [slot]
    assert not given(pod(mig("1g.10gb", 2)), {"n1": {slot}})
    assert len(given(pod(mig("1g.10gb"), mig("7g.80gb")))) == 2
    assert not given(pod(mig("1g.10gb"), mig("7g.80gb"), uuids=frozenset({second.uuid})))
    assert len(given(pod(mig("1g.10gb", 13), not_uuids=frozenset({slot})))) == 13
    assert not given(pod(mig("1g.10gb", 14), not_uuids=frozenset({slot})))


def test_memory_slices_that_no_pod_has_count_once_for_pods_without_a_gpu() -> None:
    one, fleet = on_demand(0), Fleet()
    fleet.set_node("n1", Inventory((one, on_demand(1))), [in_slot(one, "7g.80gb", 0)])
    assert spare(fleet, ["n1"]) == {"n1": 9}


def test_a_node_that_changes_to_on_demand_and_back_is_counted_anew() -> None:
    plain, slots, fleet = gpu(0), on_demand(0), Fleet()
    held = [in_slot(slots, "4g.40gb", 0)]
    for inventory, room in ((plain, None), (slots, NO_MIG_ROOM), (plain, None), (slots, NO_MIG_ROOM)):
        fleet.set_node("n1", Inventory((inventory,)), held)
        assert explain(fleet, pod(mig("4g.40gb")), ["n1"]) == {"n1": room or NO_MIG_EVER}
        assert fleet.stock.on_demand == (inventory is slots)
    fleet.remove_node("n1")
    assert fleet.stock.on_demand == 0


def test_a_node_that_reports_another_memory_each_time_makes_no_states_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mig_stock, "MOST_STATES", 4)
    fleet, fresh = Fleet(), Fleet()
    stays, changes = on_demand(0), on_demand(0, node="n2")
    held = [in_slot(stays, "3g.40gb", 4)]
    for one in (fleet, fresh):
        one.set_node("n1", Inventory((stays,)), held)
    for mib in range(40_000, 40_100):
        fleet.set_node("n2", Inventory((replace(changes, mib=mib),)))
        place(fleet, pod(mig("1g.10gb")), ["n1", "n2"])
        assert len(fleet.stock.states) <= 8
    fresh.set_node("n2", Inventory((replace(changes, mib=40_099),)))
    for wanted in (("1g.10gb",), ("3g.40gb", "1g.10gb"), ("4g.40gb",), ("7g.80gb",)):
        parts = [mig(profile, name=f"c{at}") for at, profile in enumerate(wanted)]
        for nodes in (["n1"], ["n2"], ["n1", "n2"]):
            assert place(fleet, pod(*parts), nodes) == place(fresh, pod(*parts), nodes)
    assert fleet.stock.free_mib().sum() == fresh.stock.free_mib().sum()
