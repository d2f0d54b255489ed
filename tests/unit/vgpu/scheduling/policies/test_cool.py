"""The policy `cool`, against every choice there is."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import HEAT_CLASSES, Gpu, Inventory, MigInstance
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.nodes.constraints import LabelRequirement, Term
from vgpu.scheduling.placement import Placement, explain, place
from vgpu.scheduling.preferences import Preferences

HEAT = st.sampled_from(HEAT_CLASSES)


def pod(*parts: GpuRequest) -> PodRequest:
    return PodRequest(parts, policy="cool")


def share(mib: int, gpus: int = 1, name: str = "main") -> GpuRequest:
    return GpuRequest(name, "share", gpus, mib=mib)


def fleet_of(**nodes: list[tuple[int, str]]) -> Fleet:
    """Nodes by name: what is free of each of their GPUs, which have 100 MiB, and its heat class."""
    fleet = Fleet()
    for name, gpus in nodes.items():
        inventory = Inventory(
            tuple(Gpu(f"{name}-{row}", row, "t4", 100, heat=heat) for row, (_, heat) in enumerate(gpus))
        )
        held = [AssignedGpu(f"{name}-{row}", row, 100 - free) for row, (free, _) in enumerate(gpus) if free < 100]
        fleet.set_node(name, inventory, held)
    return fleet


def chosen(fleet: Fleet, request: PodRequest, preferences: Preferences | None = None) -> set[str]:
    found = place(fleet, request, sorted(fleet.column), preferences=preferences)
    assert isinstance(found, Placement)
    return {gpu.uuid for gpu in found.assignment.held()}


def test_the_cooler_gpu_is_taken_though_another_is_tighter() -> None:
    assert chosen(fleet_of(a=[(30, "hot"), (35, "normal"), (40, "cool")]), pod(share(20))) == {"a-2"}


def test_no_emptier_gpu_is_opened_because_it_is_cooler() -> None:
    assert chosen(fleet_of(a=[(30, "hot")], b=[(100, "cool")]), pod(share(20))) == {"a-0"}


def test_a_class_of_a_later_version_counts_as_normal() -> None:
    assert chosen(fleet_of(a=[(30, "hot"), (30, "molten"), (30, "cool")]), pod(share(20))) == {"a-2"}
    assert chosen(fleet_of(a=[(30, "hot"), (30, "molten")]), pod(share(20))) == {"a-1"}


def test_a_class_that_changed_is_followed() -> None:
    fleet = fleet_of(a=[(30, "hot"), (30, "normal")])
    assert chosen(fleet, pod(share(20))) == {"a-1"}
    inventory = fleet.inventory["a"]
    first, second = inventory.gpus
    held = [AssignedGpu(gpu.uuid, gpu.index, 70) for gpu in inventory.gpus]
    fleet.set_node("a", replace(inventory, gpus=(replace(first, heat="normal"), replace(second, heat="hot"))), held)
    assert chosen(fleet, pod(share(20))) == {"a-0"}


def test_whole_gpus_are_the_coolest_untouched_ones() -> None:
    fleet = fleet_of(a=[(100, "hot"), (100, "cool"), (90, "cool"), (100, "normal")])
    assert chosen(fleet, pod(GpuRequest("main", "whole", 2))) == {"a-1", "a-3"}


def test_mig_instances_are_taken_on_the_node_whose_gpu_is_cooler() -> None:
    fleet = Fleet()
    for name, heat in (("a", "hot"), ("b", "normal")):
        instance = MigInstance(f"MIG-{name}", "1g.10gb", 10, 1, 0)
        fleet.set_node(name, Inventory((Gpu(name, 0, "h100", 80, mig=True, instances=(instance,), heat=heat),)))
    assert chosen(fleet, pod(GpuRequest("main", "mig", 1, profile="1g.10gb"))) == {"MIG-b"}


def test_of_pods_with_several_containers_the_hottest_gpu_counts_and_nodes_are_compared() -> None:
    fleet = fleet_of(a=[(30, "cool"), (30, "hot")], b=[(30, "normal"), (30, "normal")])
    assert chosen(fleet, pod(share(20, name="one"), share(21, name="two"))) == {"b-0", "b-1"}


def test_a_pod_prefers_its_own_node_before_a_cooler_one_that_is_as_full() -> None:
    fleet = fleet_of(a=[(30, "cool")], b=[(40, "hot")], c=[(100, "cool")])
    for name in "abc":
        fleet.set_labels(name, {"zone": name})
    for zone, expected in (("b", "b-0"), ("c", "a-0")):
        wants = Preferences((Term((LabelRequirement("zone", "In", (zone,)),), weight=1),))
        assert chosen(fleet, pod(share(20)), wants) == {expected}


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    fleet = Fleet()
    for name in draw(st.lists(st.sampled_from("abc"), unique=True, min_size=1)):
        gpus, held = [], []
        for row in range(draw(st.integers(1, 4))):
            size = draw(st.sampled_from([8, 12, 40]))
            gpus.append(Gpu(f"{name}-{row}", row, "t4", size, heat=draw(HEAT), healthy=draw(st.integers(0, 9)) > 0))
            used = draw(st.integers(0, size))
            if used:
                held.append(AssignedGpu(f"{name}-{row}", row, used, draw(st.sampled_from([0, 60]))))
        fleet.set_node(name, Inventory(tuple(gpus)), held)
    return fleet


def slow_choice(fleet: Fleet, request: PodRequest) -> tuple[object, ...] | None:
    """The keys and the node of the best of all sets of GPUs that the pod may have."""
    (part,) = request.containers
    found = []
    for name, at in fleet.column.items():
        gpus = fleet.inventory[name].gpus
        for rows in combinations(range(len(gpus)), part.gpus):
            if not all(gpus[row].shareable for row in rows):
                continue
            free = [int(fleet.free_mib[row, at]) for row in rows]
            if part.kind == "whole":
                if any(fleet.containers[row, at] for row in rows):
                    continue
                fullness, loosest, left = 0, max(gpus[row].mib for row in rows), sum(free)
            else:
                if min(free) < part.mib or any(fleet.free_percent[row, at] < part.core_percent for row in rows):
                    continue
                fullness = max((mib - part.mib) * 4 // gpus[row].mib for mib, row in zip(free, rows, strict=True))
                loosest, left = max(free) - part.mib, part.mib * part.gpus
            heat = max(HEAT_CLASSES.index(gpus[row].heat) for row in rows)  # type: ignore[arg-type]
            node_free = sum(int(fleet.free_mib[row, at]) for row, gpu in enumerate(gpus) if gpu.shareable) - left
            found.append((fullness, heat, loosest, node_free, name))
    return min(found, default=None)


def keys_of(fleet: Fleet, request: PodRequest, placed: Placement) -> tuple[object, ...] | None:
    """The same of what was chosen: as if the node had these GPUs only."""
    alone, name = Fleet(), placed.node
    mine, at = set(placed.assignment.uuids("main")), fleet.column[name]
    gpus = [replace(gpu, healthy=gpu.uuid in mine) for gpu in fleet.inventory[name].gpus]
    alone.set_node(name, Inventory(tuple(gpus)))
    for array in ("free_mib", "free_percent", "containers"):
        getattr(alone, array)[:, alone.column[name]] = getattr(fleet, array)[:, at]
    found = slow_choice(alone, request)
    return found and (*found[:3], found[4])


@settings(max_examples=examples(400), deadline=None)
@given(
    fleets(),
    st.one_of(
        st.builds(share, st.integers(1, 12), st.integers(1, 3)),
        st.builds(lambda mib: GpuRequest("main", "share", 1, mib=mib, core_percent=50), st.integers(1, 12)),
        st.builds(lambda gpus: GpuRequest("main", "whole", gpus), st.integers(1, 3)),
    ),
)
def test_no_choice_is_better_than_the_one_made(fleet: Fleet, part: GpuRequest) -> None:
    request, best = pod(part), slow_choice(fleet, pod(part))
    found = place(fleet, request, sorted(fleet.column, reverse=True))
    if best is None:
        assert not isinstance(found, Placement)
        return
    assert isinstance(found, Placement)
    assert found.node == best[4]
    assert keys_of(fleet, request, found) == (*best[:3], best[4])


@settings(max_examples=examples(200), deadline=None)
@given(fleets(), st.lists(st.builds(share, st.integers(1, 12), st.integers(1, 2)), min_size=1, max_size=3))
def test_heat_never_decides_whether_a_pod_fits(fleet: Fleet, parts: list[GpuRequest]) -> None:
    request = pod(*(replace(part, container=f"c{number}") for number, part in enumerate(parts)))
    packed = replace(request, policy="binpack")
    assert explain(fleet, request, sorted(fleet.column)) == explain(fleet, packed, sorted(fleet.column))
    made = [place(fleet, one, sorted(fleet.column)) for one in (request, packed)]
    assert len({isinstance(one, Placement) for one in made}) == 1


@pytest.mark.parametrize("wanted", [1, 2])
def test_a_node_of_other_sizes_is_compared_by_quarters_of_each_gpu(wanted: int) -> None:
    fleet = Fleet()
    gpus = tuple(Gpu(f"a-{row}", row, "b300", 400, heat="hot") for row in range(2))
    fleet.set_node("a", Inventory(gpus), [AssignedGpu(gpu.uuid, gpu.index, 300) for gpu in gpus])
    gpus = tuple(Gpu(f"b-{row}", row, "t4", 16, heat="cool") for row in range(2))
    fleet.set_node("b", Inventory(gpus))
    assert {uuid[0] for uuid in chosen(fleet, pod(share(2, wanted)))} == {"a"}


def test_a_pod_with_shares_beside_a_whole_gpu_fits_where_it_fits_with_binpack() -> None:
    fleet = Fleet()
    gpus = (Gpu("a-0", 0, "t4", 40, heat="hot"), Gpu("a-1", 1, "t4", 100, heat="cool"))
    fleet.set_node("a", Inventory(gpus))
    shares = (share(18, name=f"c{number}") for number in range(5))  # more than are fitted exactly
    assert chosen(fleet, pod(GpuRequest("w", "whole", 1), *shares)) == {"a-0", "a-1"}
