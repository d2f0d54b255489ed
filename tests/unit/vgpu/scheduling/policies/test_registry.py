"""What each policy prefers, on nodes small enough to see it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.names import POLICY_NAMES
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import Placement, explain, place
from vgpu.scheduling.policies.registry import POLICIES


def share(mib: int, policy: str, gpus: int = 1, cpu_milli: int = 0) -> PodRequest:
    return PodRequest((GpuRequest("a", "share", gpus, mib=mib, units=mib * gpus),), policy=policy, cpu_milli=cpu_milli)


def fleet_of(**nodes: list[int]) -> Fleet:
    """Nodes by name: what is free of each of their GPUs, which have 100 MiB."""
    fleet = Fleet()
    for name, free in nodes.items():
        gpus = tuple(Gpu(f"{name}-{row}", row, "t4", 100) for row in range(len(free)))
        fleet.set_node(
            name, Inventory(gpus), [AssignedGpu(f"{name}-{r}", r, 100 - f) for r, f in enumerate(free) if f < 100]
        )
    return fleet


def chosen(fleet: Fleet, request: PodRequest) -> tuple[str, ...]:
    found = place(fleet, request, sorted(fleet.column))
    assert isinstance(found, Placement)
    return found.assignment.uuids("a")


def test_every_policy_there_is_has_a_name_that_pods_may_use() -> None:
    assert tuple(POLICIES) == POLICY_NAMES


def test_binpack_takes_the_tightest_gpu_and_spread_the_emptiest() -> None:
    fleet = fleet_of(a=[60, 30], b=[100, 40])
    assert chosen(fleet, share(30, "binpack")) == ("a-1",)
    assert chosen(fleet, share(30, "spread")) == ("b-0",)


def test_spread_over_two_gpus_takes_the_two_emptiest_of_a_node() -> None:
    assert set(chosen(fleet_of(a=[50, 90, 80]), share(30, "spread", gpus=2))) == {"a-1", "a-2"}


def test_fragmentation_leaves_what_the_pods_seen_can_use() -> None:
    fleet = fleet_of(a=[80], b=[100])
    for _ in range(64):
        fleet.record(share(60, "fragmentation"))
    assert chosen(fleet, share(40, "binpack")) == ("a-0",)
    assert chosen(fleet, share(40, "fragmentation")) == ("b-0",)


def test_fragmentation_packs_before_it_has_seen_a_pod() -> None:
    assert chosen(fleet_of(a=[100], b=[60]), share(40, "fragmentation")) == ("b-0",)


def test_fragmentation_keeps_the_cpu_that_idle_gpus_will_need() -> None:
    fleet = fleet_of(a=[100, 100], b=[100, 100])
    fleet.set_cpu("a", 8000)
    fleet.set_cpu("b", 16000)
    request = share(100, "fragmentation", cpu_milli=8000)
    for _ in range(64):
        fleet.record(request)
    assert chosen(fleet, request)[0].startswith("b")


def of_models(**nodes: str) -> Fleet:
    """Nodes by name: the model of their one GPU, which has 100 MiB."""
    fleet = Fleet()
    for name, model in nodes.items():
        fleet.set_node(name, Inventory((Gpu(f"{name}-0", 0, model, 100),)))
    return fleet


def test_fragmentation_keeps_a_rare_model_for_the_few_pods_that_can_go_nowhere_else() -> None:
    fleet = of_models(a="rare", **{f"b{number}": "common" for number in range(20)})
    anywhere = share(60, "fragmentation")
    assert chosen(fleet, anywhere) == ("a-0",), "equal, so the smaller name"
    for number in range(128):
        fleet.record(replace(anywhere, models=frozenset(("rare",))) if number % 20 == 0 else anywhere)
    assert chosen(fleet, anywhere) == ("b0-0",)


def test_a_model_of_which_no_gpu_may_be_shared_out_does_no_harm() -> None:
    fleet = of_models(a="t4")
    fleet.set_node("m", Inventory((Gpu("m-0", 0, "a100", 100, mig=True),)))
    fleet.record(share(60, "fragmentation"))
    assert chosen(fleet, share(40, "fragmentation")) == ("a-0",)


def test_a_model_that_came_after_the_last_pod_is_as_useful_as_those_before() -> None:
    fleet = fleet_of(a=[100])
    fleet.record(share(60, "fragmentation"))
    assert chosen(fleet, share(40, "fragmentation")) == ("a-0",)
    fleet.set_node("b", Inventory((Gpu("b-0", 0, "h100", 100),)))
    assert chosen(fleet, share(40, "fragmentation")) == ("a-0",), "equal, so the smaller name"


def test_what_pods_requested_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vgpu.scheduling.demand.request_distribution.FORGET_AT", 64)
    fleet = fleet_of(a=[80])
    fleet.record(share(1, "fragmentation"))
    for mib in [60] * 200 + [70] * 200:
        fleet.record(share(mib, "fragmentation"))
    often = {one.mib: times for one, times in fleet.distribution.seen.items()}
    assert 1 not in often
    assert often[70] > 10 * often.get(60, 0)
    assert fleet.distribution.pods == sum(often.values()) < 64


def linked(name: str, pairs: list[tuple[int, int]], numa: list[int]) -> Inventory:
    gpus = []
    for row, node in enumerate(numa):
        peers = {f"{name}-{other}": 4 for pair in pairs for other in pair if row in pair and other != row}
        gpus.append(Gpu(f"{name}-{row}", row, "h100", 100, numa=node, nvlinks=peers))
    return Inventory(tuple(gpus))


def test_topology_takes_linked_gpus_before_those_of_one_numa_node() -> None:
    fleet = Fleet()
    fleet.set_node("a", linked("a", [], [0, 0, 1, 1]))
    fleet.set_node("b", linked("b", [(1, 3)], [0, 0, 1, 1]))
    assert set(chosen(fleet, share(10, "topology", gpus=2))) == {"b-1", "b-3"}
    fleet.remove_node("b")
    assert set(chosen(fleet, share(10, "topology", gpus=2))) in ({"a-0", "a-1"}, {"a-2", "a-3"})


def test_topology_gives_one_gpu_where_its_loss_hurts_sets_least() -> None:
    fleet = Fleet()
    fleet.set_node("a", linked("a", [(0, 1), (0, 2), (1, 2)], [0, 0, 0, 1]))
    assert chosen(fleet, share(10, "topology")) == ("a-3",)


def test_topology_follows_an_inventory_that_changed() -> None:
    fleet = Fleet()
    fleet.set_node("a", linked("a", [(0, 1)], [0, 0, 0, 0]))
    assert set(chosen(fleet, share(10, "topology", gpus=2))) == {"a-0", "a-1"}
    fleet.set_node("a", linked("a", [(2, 3)], [0, 0, 0, 0]))
    assert set(chosen(fleet, share(10, "topology", gpus=2))) == {"a-2", "a-3"}


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 100), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(1, 100),
    st.integers(1, 4),
    st.sampled_from(sorted(POLICIES)),
)
def test_every_policy_places_a_pod_where_it_fits_and_only_there(
    free: list[list[int]], mib: int, gpus: int, policy: str
) -> None:
    nodes = {f"n{number}": gpus_free for number, gpus_free in enumerate(free)}
    fleet, request = fleet_of(**nodes), share(mib, policy, gpus)
    fleet.record(request)
    fits = {name for name, each in nodes.items() if sum(left >= mib for left in each) >= gpus}
    assert set(nodes) - set(explain(fleet, request, nodes)) == fits
    found = place(fleet, request, nodes)
    assert isinstance(found, Placement) == bool(fits)
    if isinstance(found, Placement):
        given = found.assignment.held()
        assert found.node in fits
        assert len(given) == gpus
        assert all(nodes[found.node][assigned.index] >= mib for assigned in given)
