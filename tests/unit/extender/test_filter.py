"""Filter: one node, one reservation, and reasons that a user can act on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from extender.filter import NO_NAMES, filter_nodes
from extender.protocol import FilterArgs, FilterResult
from extender.reasons import (
    BINDING,
    BOUND,
    NEWER_INVENTORY,
    OTHER_UNIT,
    UNKNOWN_NODE,
    UNREADABLE_ASSIGNMENT,
    UNREADABLE_INVENTORY,
)
from extender.state import State
from extender.watch_intake import WatchIntake
from tests.builders import NodeBuilder, PodBuilder, gpu, mig_gpu, node, pod, share
from vgpu.api.codec import assignment_to_json
from vgpu.api.grant import Assignment
from vgpu.api.inventory import AccessMode
from vgpu.api.names import DEFAULT
from vgpu.scheduling.placement import NO_INVENTORY, NO_SINGLE_GPU, SWAP_RISK, TOO_LARGE
from vgpu.scheduling.reservations import STAGES, Event

FULL_MIB = 81_920


@dataclass
class FilteredState:
    """A state, its clock, and short words for what happens to it."""

    now_s: float = 0.0
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self.state = State(lambda: self.now_s, names=DEFAULT)

    def add(self, *nodes: NodeBuilder) -> None:
        for built in nodes:
            WatchIntake(self.state).node_changed(None, built.build())

    def see(self, built: PodBuilder) -> None:
        WatchIntake(self.state).pod_changed(None, built.build())

    def gone(self, built: PodBuilder) -> None:
        WatchIntake(self.state).pod_changed(built.build(), None)

    def filter(self, built: PodBuilder, *names: str) -> FilterResult:
        candidates = names or tuple(f"n{at}" for at in range(1, 4))
        return filter_nodes(self.state, FilterArgs(built.build(), candidates))

    def free_mib(self, name: str) -> list[int]:
        fleet = self.state.fleet
        return fleet.free_mib[: len(fleet.inventory[name].gpus), fleet.column[name]].tolist()

    def reserved_for(self, built: PodBuilder) -> Assignment:
        allocation = self.state.allocations.get(built.build().uid)
        assert allocation is not None
        return allocation.assignment


@pytest.fixture
def cluster() -> FilteredState:
    return FilteredState()


def test_the_one_best_node_is_answered_and_reserved(cluster: FilteredState) -> None:
    cluster.add(node("n1").with_gpus(2), node("n2").with_gpus(1, mib=16_384))
    assert cluster.filter(pod("a").asking(mib=8192), "n1", "n2") == FilterResult(["n2"])
    assert cluster.free_mib("n2") == [8192]


def test_two_pods_filtered_before_either_is_bound_get_different_memory(cluster: FilteredState) -> None:
    cluster.add(node("n1").with_gpus(1))
    whole = [pod("a").asking(mib=FULL_MIB), pod("b").asking(mib=FULL_MIB)]
    assert cluster.filter(whole[0], "n1").node_names == ["n1"]
    assert cluster.filter(whole[1], "n1") == FilterResult([], {NO_SINGLE_GPU: ["n1"]})


def test_a_pod_filtered_again_gives_its_first_place_back(cluster: FilteredState) -> None:
    cluster.add(node("n1").with_gpus(1), node("n2").with_gpus(1))
    asking = pod("a").asking(mib=FULL_MIB)
    assert cluster.filter(asking, "n1").node_names == ["n1"]
    assert cluster.filter(asking, "n2").node_names == ["n2"]
    assert cluster.free_mib("n1") == [FULL_MIB]
    assert cluster.filter(asking, "n2").node_names == ["n2"], "its own place is no obstacle"


def test_a_pod_that_fits_nowhere_any_more_has_no_reservation(cluster: FilteredState) -> None:
    cluster.add(node("n1").with_gpus(1))
    cluster.filter(pod("a").asking(mib=8192), "n1")
    assert not cluster.filter(pod("a").asking(mib=8192), "n2").node_names
    assert len(cluster.state.reservations) == len(cluster.state.allocations) == 0


def test_a_reservation_that_is_not_bound_lapses_after_a_minute(cluster: FilteredState) -> None:
    cluster.add(node("n1").with_gpus(1))
    cluster.filter(pod("a").asking(mib=FULL_MIB), "n1")
    cluster.now_s = STAGES["reserved"].life_s - 1
    assert not cluster.filter(pod("b").asking(mib=FULL_MIB), "n1").node_names
    cluster.now_s = STAGES["reserved"].life_s
    assert cluster.filter(pod("b").asking(mib=FULL_MIB), "n1").node_names == ["n1"]
    assert cluster.state.expired == 1


def test_a_pod_deleted_before_it_is_bound_gives_its_place_back(cluster: FilteredState) -> None:
    cluster.add(node("n1").with_gpus(1))
    asking = pod("a").asking(mib=FULL_MIB)
    cluster.filter(asking, "n1")
    cluster.gone(asking)
    assert cluster.free_mib("n1") == [FULL_MIB]


@pytest.mark.parametrize("events", [("bind",), ("bind", "no answer"), ("bind", "accepted")])
def test_a_place_that_may_still_become_a_bound_pod_is_not_taken_back(
    cluster: FilteredState, events: tuple[Event, ...]
) -> None:
    cluster.add(node("n1").with_gpus(1), node("n2").with_gpus(1))
    asking = pod("a").asking(mib=FULL_MIB)
    cluster.filter(asking, "n1")
    for event in events:
        cluster.state.on(event, asking.build().uid)
    assert cluster.filter(asking, "n1", "n2") == FilterResult(["n1"])
    assert cluster.filter(asking, "n2") == FilterResult([], {}, {BINDING: ["n2"]})
    cluster.now_s = STAGES["reserved"].life_s - 1
    assert not cluster.filter(pod("b").asking(mib=FULL_MIB), "n1").node_names


def test_the_watch_confirms_a_place_without_counting_it_twice(cluster: FilteredState) -> None:
    cluster.add(node("n1").with_gpus(1))
    asking = pod("a").asking(mib=8192)
    cluster.filter(asking, "n1")
    (assigned,) = cluster.reserved_for(asking).containers["main"]
    bound = asking.on("n1").assigned(assigned)
    for built in (asking, bound, bound.with_phase("Running"), bound.terminating()):
        cluster.see(built)
        assert cluster.free_mib("n1") == [FULL_MIB - 8192]
    assert len(cluster.state.reservations) == 0
    assert cluster.filter(asking, "n2") == FilterResult([], {}, {BOUND: ["n2"]})
    cluster.see(bound.with_phase("Succeeded"))
    assert cluster.free_mib("n1") == [FULL_MIB]


def test_a_pod_seen_bound_elsewhere_has_memory_there_only(cluster: FilteredState) -> None:
    cluster.add(node("n1").with_gpus(1), node("n2").with_gpus(1))
    asking = pod("a").asking(mib=8192)
    cluster.filter(asking, "n1")
    cluster.see(asking.on("n2").assigned(share(gpu(0, node="n2"), 8192)))
    assert (cluster.free_mib("n1"), cluster.free_mib("n2")) == ([FULL_MIB], [FULL_MIB - 8192])


def test_a_pod_bound_by_another_scheduler_has_no_allocation_and_is_counted(cluster: FilteredState) -> None:
    cluster.add(node("n1").with_gpus(1))
    asking = pod("a").asking(mib=8192)
    cluster.filter(asking, "n1")
    cluster.see(asking.on("n1"))
    assert cluster.free_mib("n1") == [FULL_MIB]
    assert len(cluster.state.unassigned) == 1
    cluster.gone(asking.on("n1"))
    assert not cluster.state.unassigned


@pytest.mark.parametrize(
    "text",
    ["{", '{"v":2}', '{"v":1,"containers":{"main":[{"uuid":"x","index":0,"mib":1}]},"class":"standard","level":2}'],
)
def test_an_assignment_that_cannot_be_read_takes_its_node_out_and_frees_nothing(
    cluster: FilteredState, text: str
) -> None:
    cluster.add(node("n1").with_gpus(1))
    good = pod("a").asking(mib=8192).on("n1").assigned(share(gpu(0), 8192))
    cluster.see(good)
    cluster.see(good.assigned(text=text))
    assert cluster.filter(pod("b").asking(mib=1024), "n1") == FilterResult([], {}, {UNREADABLE_ASSIGNMENT: ["n1"]})
    cluster.see(good)
    assert cluster.filter(pod("b").asking(mib=FULL_MIB), "n1") == FilterResult([], {NO_SINGLE_GPU: ["n1"]}), (
        "its 8 GiB are still allocated"
    )
    cluster.see(good.assigned(text=text))
    cluster.gone(good)
    assert cluster.filter(pod("b").asking(mib=FULL_MIB), "n1").node_names == ["n1"]


@pytest.mark.parametrize(
    ("built", "reason"),
    [
        (node("n1"), NO_INVENTORY),
        (node("n1").with_text("{"), UNREADABLE_INVENTORY),
        (node("n1").with_text('{"v":99}'), NEWER_INVENTORY),
        (NodeBuilder("n1", (gpu(0),), unit_mib=512), OTHER_UNIT),
        (node("n1").with_gpus(1, mib=4096), TOO_LARGE),
        (node("other"), UNKNOWN_NODE),
    ],
)
def test_a_node_that_no_eviction_helps_has_a_reason(cluster: FilteredState, built: NodeBuilder, reason: str) -> None:
    cluster.add(built)
    assert cluster.filter(pod("a").asking(mib=8192), "n1") == FilterResult([], {}, {reason: ["n1"]})


def test_a_node_whose_inventory_changes_keeps_its_pods_allocations(cluster: FilteredState) -> None:
    before = node("n1").with_gpus(2)
    cluster.add(before)
    cluster.see(pod("a").asking(mib=8192).on("n1").assigned(share(gpu(1), 8192)))
    for after in (before.with_text("{"), before.with_inventory(gpu(0)), before.with_inventory(gpu(1), gpu(0)), before):
        WatchIntake(cluster.state).node_changed(before.build(), after.build())
        before = after
    assert cluster.free_mib("n1") == [FULL_MIB, FULL_MIB - 8192]
    WatchIntake(cluster.state).node_changed(before.build(), None)
    assert cluster.filter(pod("b").asking(mib=8192), "n1").unresolvable == {UNKNOWN_NODE: ["n1"]}
    cluster.add(before)
    assert cluster.free_mib("n1") == [FULL_MIB, FULL_MIB - 8192]


def test_a_pod_that_does_not_request_ours_may_go_anywhere(cluster: FilteredState) -> None:
    assert cluster.filter(pod("a"), "n1", "nowhere") == FilterResult(("n1", "nowhere"))


def test_a_request_that_is_wrong_is_reported_on_every_node_and_causes_no_eviction(cluster: FilteredState) -> None:
    cluster.add(node("n1").with_gpus(1))
    result = cluster.filter(pod("a").asking(core=30), "n1", "n2")
    ((sentence, nodes),) = result.unresolvable.items()
    assert "gpu-core without" in sentence
    assert nodes == ["n1", "n2"]


def test_a_scheduler_that_sends_no_names_is_reported_how_to_configure_it(cluster: FilteredState) -> None:
    assert filter_nodes(cluster.state, FilterArgs(pod("a").asking(mib=1).build(), None)).error == NO_NAMES


# --- same-size pods with devices from Allocate ---


def test_a_pod_of_the_same_size_goes_to_the_same_gpu_while_the_other_is_starting(cluster: FilteredState) -> None:
    cluster.add(node("n1").with_gpus(2).with_access("cdi"))
    first = pod("a").asking(mib=8192)
    cluster.see(first.on("n1").assigned(share(gpu(1), 8192)))
    for name in ("b", "c"):
        cluster.filter(pod(name).asking(mib=8192), "n1")
        assert cluster.reserved_for(pod(name)).uuids("main") == (gpu(1).uuid,)
    cluster.filter(pod("d").asking(mib=4096), "n1")
    assert cluster.state.allocations.get("uid-default-d") is not None, "a pod of another size may have any GPU"


def test_a_gpu_too_full_for_the_same_size_makes_the_pod_wait_until_the_other_has_started(
    cluster: FilteredState,
) -> None:
    cluster.add(node("n1").with_gpus(2).with_access("cdi"))
    first = pod("a").asking(mib=FULL_MIB)
    bound = first.on("n1").assigned(share(gpu(0), FULL_MIB))
    cluster.see(bound)
    assert cluster.filter(pod("b").asking(mib=FULL_MIB), "n1") == FilterResult([], {}, {SWAP_RISK: ["n1"]})
    cluster.see(bound.with_phase("Running"))
    assert cluster.filter(pod("b").asking(mib=FULL_MIB), "n1").node_names == ["n1"]


def test_a_reserved_pod_of_the_same_size_counts_as_starting_too(cluster: FilteredState) -> None:
    cluster.add(node("n1").with_gpus(2).with_access("cdi"))
    assert cluster.filter(pod("a").asking(gpus=1), "n1").node_names == ["n1"]
    assert cluster.filter(pod("b").asking(gpus=1), "n1").unresolvable == {SWAP_RISK: ["n1"]}
    cluster.gone(pod("a"))
    assert cluster.filter(pod("b").asking(gpus=1), "n1").node_names == ["n1"]


@pytest.mark.parametrize("access", ["nvidia", "cdi"])
def test_mig_instances_of_one_profile_start_one_at_a_time(cluster: FilteredState, access: AccessMode) -> None:
    cluster.add(node("n1").with_inventory(mig_gpu(0, "1g.10gb", "1g.10gb")).with_access(access))
    assert cluster.filter(pod("a").asking(mig="1g.10gb"), "n1").node_names == ["n1"]
    assert cluster.filter(pod("b").asking(mig="1g.10gb"), "n1").unresolvable == {SWAP_RISK: ["n1"]}


@pytest.mark.parametrize("access", ["nvidia", "cdi"])
def test_slots_on_demand_of_one_profile_are_taken_one_at_a_time_and_of_two_profiles_at_once(
    cluster: FilteredState, access: AccessMode
) -> None:
    cluster.add(node("n1").with_inventory(replace(gpu(0), mig=True, on_demand=True)).with_access(access))
    first = pod("a").asking(mig="1g.10gb")
    assert cluster.filter(first, "n1").node_names == ["n1"]
    assert cluster.filter(pod("b").asking(mig="1g.10gb"), "n1").unresolvable == {SWAP_RISK: ["n1"]}
    assert cluster.filter(pod("c").asking(mig="2g.20gb"), "n1").node_names == ["n1"]
    allocation = cluster.state.allocations.get(first.build().uid)
    assert allocation is not None
    started = first.on("n1").assigned(text=assignment_to_json(allocation.assignment)).with_phase("Running")
    cluster.see(started)
    assert cluster.filter(pod("b").asking(mig="1g.10gb"), "n1").node_names == ["n1"]


def test_the_same_size_over_another_number_of_gpus_waits(cluster: FilteredState) -> None:
    cluster.add(node("n1").with_gpus(2).with_access("cdi"))
    cluster.see(pod("a").asking(mib=8192).on("n1").assigned(share(gpu(0), 4096), share(gpu(1), 4096)))
    assert cluster.filter(pod("b").asking(mib=8192), "n1").unresolvable == {SWAP_RISK: ["n1"]}


def test_a_pod_for_the_emptiest_gpu_is_not_restricted_to_where_its_size_is_starting(cluster: FilteredState) -> None:
    cluster.add(node("n1").with_gpus(2).with_access("cdi"))
    for name in ("a", "b", "c", "d"):
        cluster.filter(pod(name).asking(mib=8192).annotated(placement="spread"), "n1")
    assert cluster.free_mib("n1") == [FULL_MIB - 16_384, FULL_MIB - 16_384]


def test_with_nvidias_runtime_the_same_size_is_no_matter(cluster: FilteredState) -> None:
    cluster.add(node("n1").with_gpus(2).with_access("nvidia"))
    for name in ("a", "b"):
        assert cluster.filter(pod(name).asking(gpus=1), "n1").node_names == ["n1"]


# --- housekeeping ---


def test_free_capacity_that_is_wrong_is_repaired_and_counted(cluster: FilteredState) -> None:
    cluster.add(node("n1").with_gpus(2), node("n2").with_inventory(mig_gpu(0, "1g.10gb", node="n2")))
    cluster.see(pod("a").asking(mib=8192).on("n1").assigned(share(gpu(0), 8192)))
    assert cluster.state.allocations.recount("n1")
    assert cluster.state.allocations.recount("n2")
    cluster.state.fleet.free_mib[1, cluster.state.fleet.column["n1"]] = 7
    cluster.state.fleet.mig_containers["n2"]["MIG-x"] = 1
    assert not cluster.state.allocations.recount("n1")
    assert not cluster.state.allocations.recount("n2")
    assert cluster.state.allocations.recount("n1")
    assert cluster.free_mib("n1") == [FULL_MIB - 8192, FULL_MIB]
    assert cluster.state.allocations.repaired == 2
    assert cluster.state.allocations.recount("n9"), "a node that is not offered has no records"
