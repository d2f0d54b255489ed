"""Placement against the obvious slow version: every node, every way to assign the GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.inventory import Gpu, Inventory, MigInstance
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import (
    NO_INVENTORY,
    NO_MIG,
    NO_MIG_EVER,
    NO_SINGLE_GPU,
    NO_WHOLE,
    SWAP_RISK,
    TOO_FEW,
    TOO_LARGE,
    NoFit,
    Placement,
    explain,
    place,
)


def gpu(uuid: str, index: int = 0, mib: int = 100, **facts: object) -> Gpu:
    return Gpu(uuid, index, str(facts.pop("model", "t4")), mib, **facts)  # type: ignore[arg-type]


def fleet_of(**nodes: list[int]) -> Fleet:
    """Nodes by name, each with the memory of its GPUs."""
    fleet = Fleet()
    for name, sizes in nodes.items():
        fleet.set_node(name, Inventory(tuple(gpu(f"{name}-{row}", row, mib) for row, mib in enumerate(sizes))))
    return fleet


def share(name: str, mib: int, percent: int = 0, gpus: int = 1, *, init: bool = False) -> GpuRequest:
    return GpuRequest(name, "share", gpus, units=mib, mib=mib, core_percent=percent, init=init)


def whole(name: str, gpus: int = 1, *, init: bool = False) -> GpuRequest:
    return GpuRequest(name, "whole", gpus, core_percent=100, init=init)


def mig(name: str, gpus: int = 1, profile: str = "1g.10gb", *, init: bool = False) -> GpuRequest:
    return GpuRequest(name, "mig", gpus, profile=profile, init=init)


def mig_node(counts: list[int], first_index: int = 0) -> Inventory:
    gpus = []
    for row, count in enumerate(counts):
        instances = tuple(MigInstance(f"m{row}-{i}", "1g.10gb", 10, i, 0) for i in range(count))
        gpus.append(gpu(f"c{row}", first_index + row, mig=True, instances=instances))
    return Inventory(tuple(gpus))


def placed(result: Placement | NoFit) -> Placement:
    assert isinstance(result, Placement), result
    return result


def ways(fleet: Fleet, node: str, request: PodRequest) -> Iterator[Assignment]:
    """Every assignment of shares and whole GPUs on a node, fitting or not."""
    gpus = fleet.inventory[node].gpus
    for choice in product(*(combinations(gpus, part.gpus) for part in request.containers)):
        yield Assignment(
            {
                part.container: tuple(
                    AssignedGpu(
                        c.uuid, c.index, c.mib if part.kind == "whole" else part.mib, part.core_percent, part.kind
                    )
                    for c in chosen
                )
                for part, chosen in zip(request.containers, choice, strict=True)
            },
            frozenset(part.container for part in request.containers if part.init),
        )


def has_room(fleet: Fleet, node: str, assignment: Assignment) -> bool:
    """Do the node's records stay sound with this assignment?"""
    at = fleet.column[node]
    row_of = {c.uuid: row for row, c in enumerate(fleet.inventory[node].gpus)}
    whole_gpus = [p.uuid for gpus in assignment.containers.values() for p in gpus if p.kind == "whole"]
    all_gpus = [p.uuid for gpus in assignment.containers.values() for p in gpus]
    for assigned in assignment.held():
        row = row_of[assigned.uuid]
        if not fleet.shareable[row, at]:
            return False
        if assigned.uuid in whole_gpus:
            if fleet.containers[row, at] or all_gpus.count(assigned.uuid) > 1:
                return False
        elif assigned.mib > fleet.free_mib[row, at] or assigned.core_percent > fleet.free_percent[row, at]:
            return False
    return True


def fits_somehow(fleet: Fleet, node: str, request: PodRequest) -> bool:
    return any(has_room(fleet, node, way) for way in ways(fleet, node, request))


@st.composite
def used_fleets(draw: st.DrawFn) -> Fleet:
    """Up to three nodes with up to four GPUs, some in use, some sick, their indices other than their rows."""
    fleet = Fleet()
    for node in draw(st.lists(st.sampled_from(["a", "b", "c"]), unique=True, min_size=1)):
        count = draw(st.integers(0, 4))
        first = draw(st.integers(0, 3))
        gpus = [
            gpu(f"{node}{row}", first + row, draw(st.integers(4, 10)), healthy=draw(st.integers(0, 9)) > 0)
            for row in range(count)
        ]
        held = [
            AssignedGpu(c.uuid, c.index, draw(st.integers(1, c.mib)), draw(st.sampled_from([0, 30, 60, 100])))
            for c in gpus
            if draw(st.booleans())
        ]
        fleet.set_node(node, Inventory(tuple(gpus)), held)
    return fleet


@st.composite
def pods(draw: st.DrawFn) -> PodRequest:
    gpus = draw(st.sampled_from([1, 1, 1, 2, 3]))
    parts = []
    for number in range(draw(st.integers(1, 4))):
        if draw(st.integers(0, 4)):
            parts.append(share(f"c{number}", draw(st.integers(1, 7)), draw(st.sampled_from([0, 10, 40, 70])), gpus))
        else:
            parts.append(whole(f"c{number}", draw(st.integers(1, 2))))
    return PodRequest(tuple(parts))


@settings(max_examples=examples(300), deadline=None)
@given(used_fleets(), pods())
def test_a_pod_of_up_to_four_containers_fits_exactly_where_some_assignment_fits(
    fleet: Fleet, request: PodRequest
) -> None:
    nodes = sorted(fleet.column)
    fitting = [node for node in nodes if fits_somehow(fleet, node, request)]
    assert sorted(set(nodes) - set(explain(fleet, request, nodes))) == fitting
    result = place(fleet, request, nodes)
    if not fitting:
        assert isinstance(result, NoFit)
        assert sorted(result.reasons) == nodes
    else:
        assert placed(result).node in fitting
        assert has_room(fleet, placed(result).node, placed(result).assignment)


@settings(max_examples=examples(200), deadline=None)
@given(used_fleets(), st.integers(1, 8), st.sampled_from([0, 20, 50]), st.integers(1, 3))
def test_one_share_goes_to_the_tightest_gpus_then_the_fullest_node_then_the_smallest_name(
    fleet: Fleet, mib: int, percent: int, gpus: int
) -> None:
    request = PodRequest((share("main", mib, percent, gpus),))
    best: tuple[int, int, str] | None = None
    for node in fleet.column:
        at, found = fleet.column[node], fleet.inventory[node].gpus
        usable = [row for row in range(len(found)) if fleet.shareable[row, at]]
        left = sorted(
            int(fleet.free_mib[row, at]) - mib
            for row in usable
            if fleet.free_mib[row, at] >= mib and fleet.free_percent[row, at] >= percent
        )
        if len(left) >= gpus:
            score = left[gpus - 1], sum(int(fleet.free_mib[row, at]) for row in usable) - mib * gpus, node
            best = score if best is None else min(best, score)
    result = place(fleet, request, sorted(fleet.column, reverse=True))
    assert (result.node if isinstance(result, Placement) else None) == (best[2] if best else None)


@settings(max_examples=examples(100), deadline=None)
@given(used_fleets(), st.lists(pods(), max_size=6))
def test_placing_and_debiting_never_takes_more_than_a_gpu_has(fleet: Fleet, requests: list[PodRequest]) -> None:
    before = fleet.snapshot()
    given_out = []
    for request in requests:
        result = place(fleet, request, list(fleet.column))
        if isinstance(result, Placement):
            for assigned in result.assignment.held():
                fleet.debit(result.node, assigned)
                given_out.append((result.node, assigned))
            assert fleet.overcommitted() == []
    for node, assigned in given_out:
        fleet.credit(node, assigned)
    for name, array in fleet.snapshot().items():
        assert (array == before[name]).all(), name


@settings(max_examples=examples(150), deadline=None)
@given(
    st.permutations([("s", "sidecar"), ("i", "init"), ("j", "init")]),
    st.lists(st.integers(1, 8), min_size=4, max_size=4),
)
def test_init_containers_and_sidecars_share_a_gpu_with_enough_free_for_their_peak(
    order: list[tuple[str, str]], sizes: list[int]
) -> None:
    kinds = [*order, ("app", "app")]
    request = PodRequest(
        tuple(share(name, mib, init=kind == "init") for (name, kind), mib in zip(kinds, sizes, strict=True))
    )
    running = most = 0
    for (_, kind), mib in zip(kinds, sizes, strict=True):
        most = max(most, running + mib)
        running += 0 if kind == "init" else mib
    assert isinstance(place(fleet_of(n=[most - 1]), request, ["n"]), NoFit)
    (assigned,) = placed(place(fleet_of(n=[most]), request, ["n"])).assignment.held()
    assert assigned.mib == most


def test_a_pod_that_the_tightest_gpus_lead_into_a_corner_is_still_placed() -> None:
    fleet = fleet_of(n=[60, 40])
    request = PodRequest((share("a", 30), share("b", 40), share("c", 30)))
    assert placed(place(fleet, request, ["n"])).assignment.held() == (
        AssignedGpu("n-0", 0, 60),
        AssignedGpu("n-1", 1, 40),
    )


def test_compute_rules_a_tight_gpu_out_and_another_is_found() -> None:
    fleet = fleet_of(n=[50, 100])
    fleet.debit("n", AssignedGpu("n-0", 0, 1, 60))
    request = PodRequest((share("big", 49, 10), share("busy", 45, 40), share("also", 45, 60)))
    assert has_room(fleet, "n", placed(place(fleet, request, ["n"])).assignment)


def test_ties_go_to_the_smallest_name_in_whatever_order_the_nodes_come() -> None:
    fleet = fleet_of(b=[10], a=[10], c=[10])
    for order in (["a", "b", "c"], ["c", "b", "a"]):
        assert placed(place(fleet, PodRequest((share("m", 1),)), order)).node == "a"


def test_candidates_may_come_as_a_generator_and_with_unknown_names() -> None:
    result = place(fleet_of(a=[10]), PodRequest((share("m", 20),)), (name for name in ["a", "ghost"]))
    assert isinstance(result, NoFit)
    assert result.reasons == {"a": TOO_LARGE, "ghost": NO_INVENTORY}


def test_a_node_without_a_gpu_has_its_own_reason() -> None:
    assert explain(fleet_of(a=[]), PodRequest((share("m", 1),)), ["a"]) == {"a": NO_INVENTORY}


def test_a_share_larger_than_any_number_of_the_fleet_is_refused_and_not_wrapped() -> None:
    request = PodRequest(tuple(share(f"c{i}", 2**24 - 1, init=i == 0) for i in range(200)))
    assert explain(fleet_of(a=[2**24 - 1]), request, ["a"]) == {"a": TOO_LARGE}


def test_a_reason_that_eviction_cannot_help_is_reported_from_one_that_it_can() -> None:
    fleet = fleet_of(full=[10], small=[5])
    fleet.debit("full", AssignedGpu("full-0", 0, 8))
    assert explain(fleet, PodRequest((share("m", 8),)), ["full", "small"]) == {
        "full": NO_SINGLE_GPU,
        "small": TOO_LARGE,
    }
    assert explain(fleet, PodRequest((whole("m"),)), ["full"]) == {"full": NO_WHOLE}
    assert explain(fleet, PodRequest((whole("m", 2),)), ["full"]) == {"full": TOO_FEW}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((share("m", 10, gpus=2),), ""),
        ((share("m", 10, gpus=3),), TOO_FEW),
        ((share("m", 11, gpus=3),), TOO_LARGE),
        ((whole("m", 3),), TOO_FEW),
        ((whole("a"), whole("b"), whole("c")), TOO_FEW),
        ((share("a", 10), share("b", 10), share("c", 10)), TOO_FEW),
        ((share("a", 10), share("b", 11)), TOO_LARGE),
        ((share("a", 6, gpus=1, init=True), share("b", 10, gpus=3)), TOO_FEW),
        ((whole("a", 2), share("b", 10)), TOO_FEW),
        ((whole("a", 2), share("b", 11)), TOO_LARGE),
    ],
)
def test_too_few_gpus_are_reported_from_too_small_ones(parts: tuple[GpuRequest, ...], reason: str) -> None:
    assert explain(fleet_of(n=[10, 10]), PodRequest(parts), ["n"]) == ({"n": reason} if reason else {})


def test_containers_that_must_lie_on_one_gpu_are_too_large_for_it_together() -> None:
    request = PodRequest((share("sidecar", 6), share("setup", 6, init=True)))
    assert explain(fleet_of(n=[10, 10]), request, ["n"]) == {"n": TOO_LARGE}


def test_gpus_of_a_model_that_is_not_allowed_are_none_and_not_too_few() -> None:
    request = PodRequest((share("m", 1, gpus=2),), models=frozenset({"no such"}))
    assert explain(fleet_of(n=[10, 10]), request, ["n"]) == {"n": TOO_LARGE}


def test_a_pod_of_the_same_size_that_is_starting_keeps_the_others_on_its_gpu() -> None:
    fleet, request = fleet_of(n=[10, 10]), PodRequest((share("m", 6),))
    assert placed(place(fleet, request, ["n"], {"n": {"n-1"}})).assignment.uuids("m") == ("n-1",)
    fleet.debit("n", AssignedGpu("n-1", 1, 6))
    assert explain(fleet, request, ["n"], {"n": {"n-1"}}) == {"n": SWAP_RISK}
    fleet.debit("n", AssignedGpu("n-0", 0, 6))
    assert explain(fleet, request, ["n"], {"n": {"n-1"}}) == {"n": NO_SINGLE_GPU}


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({"models": frozenset({"h100"})}, "n-1"),
        ({"not_models": frozenset({"t4"})}, "n-1"),
        ({"uuids": frozenset({"n-1"})}, "n-1"),
        ({"not_uuids": frozenset({"n-1"})}, "n-0"),
    ],
)
def test_a_condition_on_model_or_uuid_is_kept(conditions: dict[str, frozenset[str]], expected: str) -> None:
    fleet = Fleet()
    fleet.set_node("n", Inventory((gpu("n-0", 7), gpu("n-1", 9, model="h100"))))
    request = PodRequest((share("m", 1),), **conditions)  # type: ignore[arg-type]
    (assigned,) = placed(place(fleet, request, ["n"])).assignment.containers["m"]
    assert assigned == AssignedGpu(expected, 7 if expected == "n-0" else 9, 1)


def test_whole_gpus_of_an_init_container_are_handed_on_but_not_those_of_a_running_sidecar() -> None:
    request = PodRequest((whole("sidecar"), whole("init", 2, init=True), whole("app")))
    result = placed(place(fleet_of(n=[10, 10, 10]), request, ["n"])).assignment
    assert not set(result.uuids("sidecar")) & set(result.uuids("init"))
    assert set(result.uuids("app")) < set(result.uuids("init"))
    assert isinstance(place(fleet_of(n=[10, 10]), request, ["n"]), NoFit)


def test_a_whole_gpu_is_an_unused_one_and_the_smallest_of_those() -> None:
    fleet = fleet_of(n=[10, 40, 20])
    fleet.debit("n", AssignedGpu("n-0", 0, 1))
    assert placed(place(fleet, PodRequest((whole("m"),)), ["n"])).assignment.uuids("m") == ("n-2",)


def test_a_share_leaves_the_whole_gpu_that_the_same_pod_needs() -> None:
    fleet = fleet_of(n=[10, 40])
    fleet.debit("n", AssignedGpu("n-1", 1, 10))
    request = PodRequest((share("s", 8), whole("w")))
    assert placed(place(fleet, request, ["n"])).assignment.containers["w"][0].uuid == "n-0"


def test_mig_instances_come_from_the_gpu_with_fewest_free_though_its_index_is_not_its_row() -> None:
    fleet = Fleet()
    fleet.set_node("n", mig_node([3, 2], first_index=4))
    request = PodRequest((mig("init", 2, init=True), mig("app")))
    result = placed(place(fleet, request, ["n"])).assignment
    assert result.uuids("init") == ("m1-0", "m1-1")
    assert result.uuids("app") == ("m1-0",)
    assert result.containers["app"][0].index == 5


def test_mig_instances_run_out_and_are_never_given_twice() -> None:
    fleet = Fleet()
    fleet.set_node("n", mig_node([2]))
    request = PodRequest((mig("m"),))
    seen = set()
    for _ in range(2):
        for assigned in placed(place(fleet, request, ["n"])).assignment.held():
            seen.add(assigned.uuid)
            fleet.debit("n", assigned)
    assert seen == {"m0-0", "m0-1"}
    assert explain(fleet, request, ["n"]) == {"n": NO_MIG}
    assert explain(fleet, PodRequest((mig("m", 3),)), ["n"]) == {"n": NO_MIG_EVER}


def test_a_gpu_in_mig_mode_takes_no_share_and_a_sick_one_gives_no_instance() -> None:
    fleet = Fleet()
    instance = MigInstance("m", "1g.10gb", 10, 1, 0)
    fleet.set_node("n", Inventory((gpu("c", mig=True, healthy=False, instances=(instance,)),)))
    assert explain(fleet, PodRequest((share("s", 1),)), ["n"]) == {"n": TOO_LARGE}
    assert explain(fleet, PodRequest((mig("m"),)), ["n"]) == {"n": NO_MIG_EVER}
