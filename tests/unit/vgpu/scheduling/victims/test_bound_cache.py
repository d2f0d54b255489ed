"""Bounds that are kept with a node, and terms that are counted late, change no answer: against a search without any cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.victims.bound_cache import KEPT, CachedBounds
from vgpu.scheduling.victims.bounds import EvictionRules, EvictionTerms, lower_bounds
from vgpu.scheduling.victims.eligibility import UNSTARTED, AllocatedPod
from vgpu.scheduling.victims.node import NodeView
from vgpu.scheduling.victims.victim_search import VictimSearch, least_eviction

NODES = tuple(f"n{at}" for at in range(5))
GPUS, GPU_MIB = 2, 100
BUDGETS = ("tight", "loose", "unknown")

REQUESTS = (
    *(PodRequest((GpuRequest("main", "share", gpus, units=mib, mib=mib),)) for mib in (30, 60, 100) for gpus in (1, 2)),
    PodRequest((GpuRequest("main", "whole", 1, core_percent=100),)),
    PodRequest((GpuRequest("a", "share", 1, units=40, mib=40), GpuRequest("b", "share", 1, units=70, mib=70))),
)


@dataclass
class NodeViews:
    """Views as they are kept, and what they are made of."""

    allocated_pods: dict[str, list[AllocatedPod]] = field(default_factory=dict)
    views: dict[str, NodeView] = field(default_factory=dict)

    def change(self, node: str, allocated_pods: list[AllocatedPod]) -> None:
        self.allocated_pods[node], self.views[node] = allocated_pods, view(node, allocated_pods)

    def anew(self) -> dict[str, NodeView]:
        return {name: view(name, allocated_pods) for name, allocated_pods in self.allocated_pods.items()}


def view(node: str, allocated_pods: list[AllocatedPod]) -> NodeView:
    return NodeView(
        node, Inventory(tuple(Gpu(f"{node}-{row}", row, "t4", GPU_MIB) for row in range(GPUS))), allocated_pods
    )


@st.composite
def allocated_pods_of(draw: st.DrawFn, node: str) -> list[AllocatedPod]:
    free, pods = [GPU_MIB] * GPUS, list[AllocatedPod]()
    for at in range(draw(st.integers(0, 5))):
        row, mib = draw(st.integers(0, GPUS - 1)), draw(st.sampled_from((20, 40, 50)))
        if free[row] < mib:
            continue
        free[row] -= mib
        budgets = frozenset(draw(st.lists(st.sampled_from(BUDGETS), max_size=1)))
        pods.append(
            AllocatedPod(
                f"{node}-p{at}", (AssignedGpu(f"{node}-{row}", row, mib, 0),), draw(st.integers(0, 3)),
                draw(st.sampled_from(("latency-critical", "standard", "best-effort"))),
                draw(st.sampled_from((UNSTARTED, 10, 20))), budgets, draw(st.integers(0, 6)) == 0,
                {"cpu": draw(st.integers(0, 3))},
            )
        )  # fmt: skip
    return pods


@st.composite
def terms_of(draw: st.DrawFn, node: str) -> EvictionTerms | None:
    kind = draw(st.sampled_from(("none", "none", "cpu", "must", "aside", "beside", "refused")))
    uid = frozenset({f"{node}-p{draw(st.integers(0, 2))}"})
    return {
        "none": EvictionTerms(), "cpu": EvictionTerms(frees={"cpu": draw(st.integers(1, 6))}), "must": EvictionTerms(must_go=uid),
        "aside": EvictionTerms(aside=uid), "beside": EvictionTerms(beside_violations=1, beside_highest=2, beside=1), "refused": None,
    }[kind]  # fmt: skip


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_a_search_with_kept_bounds_finds_what_one_without_finds_after_any_changes(data: st.DataObject) -> None:
    cluster = NodeViews()
    for name in NODES:
        cluster.change(name, data.draw(allocated_pods_of(name)))
    for _ in range(data.draw(st.integers(2, 6))):
        for name in data.draw(st.sets(st.sampled_from(NODES), max_size=2)):
            cluster.change(name, data.draw(allocated_pods_of(name)))
        request, terms = data.draw(st.sampled_from(REQUESTS)), {name: data.draw(terms_of(name)) for name in NODES}
        headroom = {"tight": data.draw(st.integers(0, 2)), "loose": data.draw(st.integers(0, 9))}
        rules = EvictionRules(data.draw(st.integers(1, 4)), headroom, data.draw(st.booleans()), may_be_nobody=False)
        only = {"n0": {"n0-1"}} if data.draw(st.booleans()) else {}
        apart = {name for name, one in terms.items() if one is not None and one.aside}

        kept = VictimSearch(request, NODES, cluster.views.get, rules, only, terms=terms.get, apart=apart)
        known = {name: one for name, one in terms.items() if one is not None}
        anew = least_eviction(request, known, cluster.anew().get, replace(rules, terms=known), only)
        assert kept.whole() == anew
        assert anew is None or kept.best is not None
        if kept.best is not None and anew is not None:
            assert kept.best.cost == anew.cost
            assert kept.rules.on(anew.node) == terms[anew.node]


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_kept_bounds_are_those_worked_out_anew(data: st.DataObject) -> None:
    cluster = NodeViews()
    for name in NODES:
        cluster.change(name, data.draw(allocated_pods_of(name)))
    for _ in range(6):
        name = data.draw(st.sampled_from(NODES))
        cluster.change(name, data.draw(allocated_pods_of(name)))
        request = data.draw(st.sampled_from(REQUESTS))
        headroom = {"tight": data.draw(st.integers(0, 1)), "loose": data.draw(st.integers(0, 1))}
        rules = EvictionRules(data.draw(st.integers(1, 4)), headroom, data.draw(st.booleans()))
        found = {view.name: bound for bound, view in CachedBounds(request, rules).of(cluster.views.values())}
        anew = {view.name: bound for bound, view in lower_bounds(list(cluster.anew().values()), request, rules, {})}
        assert found == anew
        assert all(len(view.bounds) <= KEPT for view in cluster.views.values())


def test_terms_are_counted_only_of_nodes_with_a_bound_below_the_best() -> None:
    cluster = NodeViews()
    for at in range(200):
        name = f"n{at:03}"
        pods = [
            AllocatedPod(f"{name}-p{row}", (AssignedGpu(f"{name}-{row}", row, GPU_MIB, 0),), at % 50, started=10)
            for row in (0, 1)
        ]
        cluster.change(name, pods)
    counted = list[str]()

    def terms(name: str) -> EvictionTerms:
        counted.append(name)
        return EvictionTerms()

    search = VictimSearch(REQUESTS[0], list(cluster.views), cluster.views.get, EvictionRules(100), terms=terms)
    best = search.whole()
    assert best is not None
    assert (best.node, best.cost[3]) == ("n000", 0)
    assert len(counted) <= 16
    assert search.searched == 1


def test_a_node_where_pods_end_by_themselves_is_not_judged_as_if_they_stayed() -> None:
    cluster = NodeViews()
    for name in ("n0", "n1"):
        pods = [AllocatedPod(f"{name}-{row}", (AssignedGpu(f"{name}-{row}", row, GPU_MIB, 0),)) for row in (0, 1)]
        cluster.change(name, [AllocatedPod(one.uid, one.held, protected=name == "n0") for one in pods])
    terms = {"n0": EvictionTerms(aside=frozenset({"n0-0"})), "n1": EvictionTerms()}
    found = VictimSearch(
        REQUESTS[0], cluster.views, cluster.views.get, EvictionRules(1), terms=terms.get, apart={"n0"}
    ).whole()
    assert found is not None
    assert (found.node, found.victims) == ("n0", ())
