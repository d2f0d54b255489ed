"""Victims against the obvious slow version: every set of pods on every node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory, MigInstance
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import Placement, place
from vgpu.scheduling.victims.bounds import EvictionRules, EvictionTerms, is_sum_of_one_gpu, lower_bounds
from vgpu.scheduling.victims.eligibility import UNSTARTED, AllocatedPod
from vgpu.scheduling.victims.node import NodeView
from vgpu.scheduling.victims.node_search import Eviction
from vgpu.scheduling.victims.sets import EXACT
from vgpu.scheduling.victims.victim_search import least_eviction

HEADROOM = {"tight": 0, "one": 1}
RANK = {"latency-critical": 0, "standard": 1, "best-effort": 2}


def part_of(node: str, row: int, mib: int, percent: int = 0) -> AssignedGpu:
    return AssignedGpu(f"{node}-{row}", row, mib, percent)


def allocated_pod(
    uid: str, *held: AssignedGpu, priority: int = 0, service_class: str = "standard", **more: object
) -> AllocatedPod:
    return AllocatedPod(uid, held, priority, service_class, **more)  # type: ignore[arg-type]


def share(mib: int, percent: int = 0, gpus: int = 1) -> PodRequest:
    return PodRequest((GpuRequest("main", "share", gpus, units=mib, mib=mib, core_percent=percent),))


def whole(gpus: int) -> PodRequest:
    return PodRequest((GpuRequest("main", "whole", gpus, core_percent=100),))


def inventory(node: str, gpus: int, mib: int = 100) -> Inventory:
    return Inventory(tuple(Gpu(f"{node}-{row}", row, "t4", mib) for row in range(gpus)))


def fleet_of(
    nodes: Mapping[str, int], allocated_pods: Mapping[str, Sequence[AllocatedPod]], gone: frozenset[str] = frozenset()
) -> Fleet:
    fleet = Fleet()
    for name, gpus in nodes.items():
        stay = [held for one in allocated_pods.get(name, ()) if one.uid not in gone for held in one.held]
        fleet.set_node(name, inventory(name, gpus), stay)
    return fleet


def least(
    nodes: Mapping[str, int],
    allocated_pods: Mapping[str, Sequence[AllocatedPod]],
    request: PodRequest,
    rules: EvictionRules,
) -> Eviction | None:
    return least_eviction(request, list(nodes), views(nodes, allocated_pods).get, rules)


def views(nodes: Mapping[str, int], allocated_pods: Mapping[str, Sequence[AllocatedPod]]) -> dict[str, NodeView]:
    return {name: NodeView(name, inventory(name, gpus), allocated_pods.get(name, ())) for name, gpus in nodes.items()}


def names_of(found: Eviction | None) -> tuple[str, ...] | None:
    return None if found is None else found.victims


# --- the slow version ---


def slow_cost(node: str, some: Sequence[AllocatedPod]) -> tuple[object, ...]:
    over = 0
    for budget in {name for one in some for name in one.budgets}:
        over += max(0, sum(budget in one.budgets for one in some) - HEADROOM.get(budget, 0))
    critical = sum(one.service_class == "latency-critical" for one in some)
    standard = sum(one.service_class == "standard" for one in some)
    highest = max([one.priority for one in some], default=-(2**31))
    ages = tuple(-one.started for one in sorted(some, key=lambda one: one.started))
    return over, critical, standard, highest, len(some), ages, node, tuple(sorted(one.uid for one in some))


def slow_frees(name: str, some: Sequence[AllocatedPod], rules: EvictionRules) -> bool:
    terms = rules.on(name)
    freed = {resource: sum(one.requests.get(resource, 0) for one in some) for resource in terms.frees}
    return terms.must_go <= {one.uid for one in some} and all(freed[one] >= terms.frees[one] for one in terms.frees)


def slow(
    nodes: Mapping[str, int],
    allocated_pods: Mapping[str, Sequence[AllocatedPod]],
    request: PodRequest,
    rules: EvictionRules,
) -> tuple[object, ...] | None:
    found = [best for name in nodes if (best := slow_on(name, nodes, allocated_pods, request, rules)) is not None]
    return min((one for one in found if one[7] or rules.may_be_nobody), default=None)


def slow_on(
    name: str,
    nodes: Mapping[str, int],
    allocated_pods: Mapping[str, Sequence[AllocatedPod]],
    request: PodRequest,
    rules: EvictionRules,
) -> tuple[object, ...] | None:
    best, terms = None, rules.on(name)
    may_go = [
        one
        for one in allocated_pods[name]
        if one.priority < rules.priority and not one.protected and one.uid not in terms.aside
    ]
    for size in range(len(may_go) + 1):
        for some in combinations(may_go, size):
            gone = frozenset(one.uid for one in some) | terms.aside
            if slow_frees(name, some, rules) and isinstance(
                place(fleet_of(nodes, allocated_pods, gone), request, [name]), Placement
            ):
                cost = slow_cost(name, some)
                if (rules.violate or not cost[0]) and (best is None or cost < best):
                    best = cost
    return best


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, list[AllocatedPod]]]:
    nodes = {f"n{at}": draw(st.integers(1, 3)) for at in range(draw(st.integers(1, 2)))}
    allocated_pods: dict[str, list[AllocatedPod]] = {name: [] for name in nodes}
    for at in range(draw(st.integers(0, 6))):
        name = draw(st.sampled_from(sorted(nodes)))
        requested = share(draw(st.integers(1, 6)) * 10, draw(st.sampled_from([0, 30, 60])), draw(st.integers(1, 2)))
        found = place(fleet_of(nodes, allocated_pods), requested, [name])
        if isinstance(found, Placement):
            allocated_pods[name].append(
                AllocatedPod(
                    f"p{at}", found.assignment.held(), draw(st.integers(0, 3)), draw(st.sampled_from(sorted(RANK))),
                    draw(st.sampled_from([UNSTARTED, 10, 20, 30])),
                    draw(st.sampled_from([frozenset(), frozenset({"tight"}), frozenset({"one"}), frozenset({"tight", "one"})])),
                    draw(st.integers(0, 5)) == 0,
                    {"cpu": draw(st.integers(0, 3))},
                )
            )  # fmt: skip
    return nodes, allocated_pods


requests = st.one_of(
    st.builds(share, st.integers(1, 10).map(lambda tens: 10 * tens), st.sampled_from([0, 50, 100]), st.integers(1, 2)),
    st.builds(whole, st.integers(1, 2)),
    st.builds(
        lambda one, two: PodRequest((GpuRequest("a", "share", 1, mib=one, units=one), GpuRequest("b", "share", 1, mib=two, units=two))),
        st.integers(10, 90), st.integers(10, 90),
    ),
)  # fmt: skip


@st.composite
def terms(draw: st.DrawFn) -> EvictionTerms:
    uids = st.frozensets(st.sampled_from([f"p{at}" for at in range(6)]), max_size=2)
    must_go = draw(st.one_of(st.just(frozenset[str]()), uids))
    return EvictionTerms(must_go, draw(st.sampled_from([{}, {}, {"cpu": 2}, {"cpu": 4}])), draw(uids) - must_go)


@settings(max_examples=examples(400), deadline=None)
@given(clusters(), requests, st.integers(0, 4), st.booleans(), terms(), st.booleans())
def test_the_least_set_is_the_least_of_all_sets(
    cluster: tuple[dict[str, int], dict[str, list[AllocatedPod]]],
    request: PodRequest,
    priority: int,
    violate: bool,
    on_n0: EvictionTerms,
    may_be_nobody: bool,
) -> None:
    nodes, allocated_pods = cluster
    rules = EvictionRules(priority, HEADROOM, violate, {"n0": on_n0}, may_be_nobody)
    if on_n0.frees and is_sum_of_one_gpu(request):
        for one in allocated_pods["n0"]:  # which pods of other GPUs join is not the least choice: here all lie on one
            assume(all(part.index == 0 for part in one.held))
        assume(nodes["n0"] == 1)
    found, best = least(nodes, allocated_pods, request, rules), slow(nodes, allocated_pods, request, rules)
    for bound, view in lower_bounds(list(views(nodes, allocated_pods).values()), request, rules, {}):
        alone = slow({view.name: nodes[view.name]}, {view.name: allocated_pods[view.name]}, request, rules)
        assert alone is None or bound <= alone[:7], "a bound is never above the cost"
    bounded = {view.name for _, view in lower_bounds(list(views(nodes, allocated_pods).values()), request, rules, {})}
    if best is None:
        assert found is None
    else:
        assert found is not None
        assert (found.violations, found.node, found.victims) == (best[0], best[6], best[7])
        assert found.cost == best
        assert found.node in bounded
        left = fleet_of(nodes, allocated_pods, frozenset(found.victims) | rules.on(found.node).aside)
        for taken in found.assignment.held():
            left.debit(found.node, taken)
        assert left.overcommitted() == [], "no pod is evicted for one that then does not fit"


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 3), st.booleans()), min_size=EXACT + 1, max_size=20),
    st.integers(1, 100),
)
def test_where_there_are_too_many_to_try_them_all_no_victim_could_stay(
    pods: list[tuple[int, int, bool]], mib: int
) -> None:
    allocated_pods: dict[str, list[AllocatedPod]] = {"n": []}
    for at, (size, priority, protected) in enumerate(pods):
        if sum(one.held[0].mib for one in allocated_pods["n"]) + size <= 100:
            allocated_pods["n"].append(
                allocated_pod(f"p{at:02}", part_of("n", 0, size), priority=priority, protected=protected)
            )
    request, rules = share(mib), EvictionRules(3)
    found = least({"n": 1}, allocated_pods, request, rules)
    gone = (
        frozenset(found.victims)
        if found
        else frozenset(o.uid for o in allocated_pods["n"] if o.priority < 3 and not o.protected)
    )
    fits = isinstance(place(fleet_of({"n": 1}, allocated_pods, gone), request, ["n"]), Placement)
    assert fits == (found is not None)
    for uid in found.victims if found else ():
        kept = fleet_of({"n": 1}, allocated_pods, gone - {uid})
        assert not isinstance(place(kept, request, ["n"]), Placement)


# --- the order, one by one ---


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"budgets": frozenset({"tight"})}),
        ({"service_class": "best-effort", "priority": 9}, {"service_class": "standard"}),
        ({"service_class": "standard", "priority": 9}, {"service_class": "latency-critical"}),
        ({"priority": 1}, {"priority": 2}),
        ({"started": 20260102}, {"started": 20260101}),
        ({"started": UNSTARTED}, {"started": 20260101}),
    ],
)
def test_of_two_pods_the_lesser_goes(first: dict[str, object], second: dict[str, object]) -> None:
    allocated_pods = {
        "n": [allocated_pod("b", part_of("n", 0, 60), **first), allocated_pod("a", part_of("n", 1, 60), **second)]  # type: ignore[arg-type]
    }
    assert names_of(least({"n": 2}, allocated_pods, share(50), EvictionRules(10, HEADROOM))) == ("b",)


def test_fewer_go_rather_than_more() -> None:
    allocated_pods = {
        "n": [
            allocated_pod("a", part_of("n", 0, 50)),
            allocated_pod("b", part_of("n", 0, 50)),
            allocated_pod("c", part_of("n", 1, 100)),
        ]
    }
    assert names_of(least({"n": 2}, allocated_pods, share(100), EvictionRules(10))) == ("c",)


@pytest.mark.parametrize("kept", [{"priority": 10}, {"protected": True}])
def test_a_pod_that_is_not_lower_or_not_evictable_stays(kept: dict[str, object]) -> None:
    allocated_pods = {"n": [allocated_pod("a", part_of("n", 0, 60), **kept)]}  # type: ignore[arg-type]
    assert least({"n": 1}, allocated_pods, share(50), EvictionRules(10)) is None


def test_for_a_gpu_that_is_too_small_when_empty_no_pod_is_evicted() -> None:
    allocated_pods = {"n": [allocated_pod("a", part_of("n", 0, 60))]}
    assert least({"n": 1}, allocated_pods, share(101), EvictionRules(10)) is None


def test_a_pod_that_fits_as_it_is_evicts_no_pod() -> None:
    allocated_pods = {"n": [allocated_pod("a", part_of("n", 0, 60))]}
    assert names_of(least({"n": 1}, allocated_pods, share(40), EvictionRules(10))) == ()


def test_compute_time_is_a_reason_as_memory_is() -> None:
    allocated_pods = {"n": [allocated_pod("a", part_of("n", 0, 10, 60)), allocated_pod("b", part_of("n", 0, 80))]}
    assert names_of(least({"n": 1}, allocated_pods, share(10, 50), EvictionRules(10))) == ("a",)


def test_a_set_must_meet_the_callers_own_condition() -> None:
    allocated_pods = {"n": [allocated_pod("a", part_of("n", 0, 60)), allocated_pod("b", part_of("n", 1, 60))]}
    rules = EvictionRules(10, terms={"n": EvictionTerms(must_go=frozenset("b"))})
    assert names_of(least({"n": 2}, allocated_pods, share(50), rules)) == ("b",)
    rules = EvictionRules(10, terms={"n": EvictionTerms(must_go=frozenset("c"))})
    assert least({"n": 2}, allocated_pods, share(50), rules) is None, "no pod of that name is there"


def test_the_pod_with_the_mig_instance_is_evicted() -> None:
    instances = tuple(MigInstance(f"m{at}", "1g.10gb", 10, at, 0) for at in range(2))
    held = [AssignedGpu(f"m{at}", 0, 10, 100, "mig", "1g.10gb") for at in range(2)]
    there = Inventory((Gpu("c", 0, "a100", 80, mig=True, instances=instances),))
    view = NodeView("n", there, [allocated_pod("a", held[0], priority=2), allocated_pod("b", held[1], priority=1)])
    request = PodRequest((GpuRequest("main", "mig", 1, profile="1g.10gb"),))
    found = least_eviction(request, ["n", "no-such-node"], {"n": view}.get, EvictionRules(10))
    assert names_of(found) == ("b",)
