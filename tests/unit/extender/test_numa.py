"""Pods on nodes whose kubelet aligns them to NUMA nodes or refuses them: filter, bind, and what the watch shows in between."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.bind import BindOrder
from extender.compact import small_node
from extender.filter import filter_nodes
from extender.numa import COUNTED_S, Judgement
from extender.protocol import FilterArgs, FilterResult
from extender.reasons import NUMA, eviction_may_help
from extender.state import State
from extender.watch_intake import WatchIntake
from kube.objects import Node
from tests.builders import PodBuilder, gpu, node, pod, share
from tests.unit.vgpu.scheduling.slow_numa import SlowKubelet, Things
from vgpu.api.codec import assignment_to_json
from vgpu.api.contract import devices
from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.inventory import Gpu, Orphan
from vgpu.api.mig import MigSlot
from vgpu.api.mig_device import slot_device
from vgpu.api.names import DEFAULT
from vgpu.api.numa import NumaFacts, NumaNode, facts_to_json
from vgpu.scheduling.numa import as_one

GIB = 1024


class Cluster:
    """One extender and its nodes; each has two GPUs, on two NUMA nodes."""

    def __init__(self, *names: str, gpus: tuple[Gpu, ...] | None = None, **facts: Any) -> None:
        self.now_s = 0.0
        self.state = State(lambda: self.now_s, names=DEFAULT)
        self.intake = WatchIntake(self.state)
        self.nodes: dict[str, Node] = {}
        self.gpus = {
            name: gpus or tuple(gpu(at, 8 * GIB, name, numa=at) for at in range(2)) for name in names or ("n1",)
        }
        for name in self.gpus:
            self.publish(name, **facts)

    def publish(self, name: str = "n1", free: tuple[int, ...] = (4, 4), text: str | None = None, **more: Any) -> None:
        known = {"policy": "single-numa-node", "scope": "container", "exclusive_cpus": True, **more}
        facts = NumaFacts(1, nodes=tuple(NumaNode(at, 4, left) for at, left in enumerate(free)), **known)
        made = node(name).with_inventory(*self.gpus[name]).with_access("cdi").plain()
        made["metadata"]["annotations"][DEFAULT.numa] = facts_to_json(facts) if text is None else text
        new = small_node(DEFAULT)(msgspec.convert(made, Node))
        self.intake.node_changed(self.nodes.get(name), new)
        self.nodes[name] = new

    def filter(self, one: PodBuilder, *names: str) -> FilterResult:
        return filter_nodes(self.state, FilterArgs(one.build(), names or tuple(self.gpus)))

    def gpu_of(self, one: PodBuilder) -> tuple[str, int]:
        """Node, and index of the GPU."""
        allocation = self.state.allocations.get(one.build().uid)
        assert allocation is not None
        (index,) = {part.index for part in allocation.assignment.held()}
        return allocation.node, index

    def bound(self, one: PodBuilder) -> PodBuilder:
        allocation = self.state.allocations.get(one.build().uid)
        assert allocation is not None
        built = one.on(allocation.node).assigned(text=assignment_to_json(allocation.assignment))
        self.intake.pod_changed(None, built.build())
        return built

    def started(self, one: PodBuilder) -> PodBuilder:
        built = one.with_phase("Running")
        self.intake.pod_changed(one.build(), built.build())
        return built


def wanting(name: str, gib: int = 2, cpus: int = 0, **more: str) -> PodBuilder:
    compute = {"cpu": str(cpus), "memory": "1Gi"} if cpus else {}
    return pod(name).asking(mib=gib * GIB, **compute, **more)


def test_the_gpu_is_the_one_at_which_the_kubelet_arrives() -> None:
    """Packing alone would choose GPU 1, which has less free."""
    cluster = Cluster(gpus=(gpu(0, 8 * GIB, numa=0), gpu(1, 4 * GIB, numa=1)))
    assert cluster.filter(wanting("a")).node_names == ["n1"]
    assert cluster.gpu_of(wanting("a")) == ("n1", 0)


def test_free_cpus_lead_to_the_other_gpu() -> None:
    cluster = Cluster(free=(1, 4))
    cluster.filter(wanting("a", cpus=2))
    assert cluster.gpu_of(wanting("a")) == ("n1", 1)


def test_a_node_at_whose_wrong_gpu_the_kubelet_would_arrive_is_refused() -> None:
    """GPU 0 has 2 GiB free of each half: as IDs that is 4, on no single GPU."""
    gpus = (gpu(0, 4 * GIB, numa=0), gpu(1, 4 * GIB, numa=0), gpu(2, 8 * GIB, numa=1))
    cluster = Cluster(gpus=gpus)
    for name in "abc":
        cluster.started(cluster.bound(_placed(cluster, wanting(name, 2))))
    assert {cluster.gpu_of(wanting(name))[1] for name in "abc"} == {0, 1}
    cluster.state.forget_pod(wanting("b").build().uid)
    cluster.state.forget_pod(wanting("c").build().uid)
    cluster.started(cluster.bound(_placed(cluster, wanting("d", 2).annotated(gpu_uuid=gpus[1].uuid))))
    answer = cluster.filter(wanting("e", 4))
    (reason,) = answer.unresolvable
    assert reason == f"{NUMA} (single-numa-node): it would align the pod to NUMA node 0, where no GPU has room for it"
    assert not eviction_may_help(reason)


def _placed(cluster: Cluster, one: PodBuilder) -> PodBuilder:
    assert cluster.filter(one).node_names == ["n1"]
    return one


def test_another_node_is_taken_where_the_best_one_is_refused() -> None:
    cluster = Cluster("n1", "n2")
    cluster.publish("n1", free=(1, 1))
    cluster.filter(wanting("a", cpus=2))
    assert cluster.gpu_of(wanting("a"))[0] == "n2"
    cluster.publish("n2", free=(0, 0))
    (reason,) = cluster.filter(wanting("b", cpus=2)).unresolvable
    assert reason.startswith(
        f"{NUMA} (single-numa-node): it would refuse the pod, since it finds no NUMA nodes with 2 cpu"
    )


def test_cpus_of_a_placed_pod_count_until_the_node_counts_them() -> None:
    cluster, first = Cluster(), wanting("a", 2, cpus=3)
    cluster.filter(first)
    assert cluster.gpu_of(first) == ("n1", 0)
    cluster.filter(wanting("b", 4, cpus=3))
    assert cluster.gpu_of(wanting("b")) == ("n1", 1)
    seen = cluster.started(cluster.bound(first))
    cluster.filter(wanting("c", 1, cpus=1))
    assert cluster.gpu_of(wanting("c")) == ("n1", 0)
    cluster.publish(free=(1, 4), counted=(seen.build().uid,))
    cluster.state.forget_pod(wanting("c").build().uid)
    cluster.filter(wanting("d", 3, cpus=1))
    assert cluster.gpu_of(wanting("d")) == ("n1", 0)


def test_a_pod_is_bound_when_those_before_it_have_started_and_are_counted() -> None:
    cluster, first, second = Cluster(), wanting("a", 2, cpus=3), wanting("b", 4, cpus=3)
    order = BindOrder(cluster.state, 0)
    for one in (first, second):
        cluster.filter(one)
    uid = second.build().uid
    assert "would align the pod to NUMA node 0" in order.why(uid)  # as the kubelet has nothing yet
    assert not order.why(first.build().uid)
    seen = cluster.bound(first)
    assert order.why(uid) == f"{NUMA} yet: it aligns one pod after another, and pod default/a is starting on the node"
    seen = cluster.started(seen)
    assert "default/a is starting" in order.why(uid)
    cluster.publish(free=(1, 4), counted=(seen.build().uid,))
    assert order.why(uid) == ""


def test_a_node_counts_no_cpus_of_another_nodes_pods() -> None:
    """Else a node's account could have pods placed elsewhere on CPUs that are taken."""
    cluster = Cluster("n1", "n2")
    first = _placed(cluster, wanting("a", cpus=3))
    where = cluster.gpu_of(first)[0]
    cluster.publish(next(name for name in cluster.gpus if name != where), counted=(first.build().uid,))
    allocation = cluster.state.allocations.get(first.build().uid)
    assert allocation is not None
    assert allocation.aligned is not None
    cluster.publish(where, counted=(first.build().uid,))
    allocation = cluster.state.allocations.get(first.build().uid)
    assert allocation is not None
    assert allocation.aligned is None


def test_cpus_that_are_never_counted_block_no_pod_for_ever() -> None:
    cluster, first, second = Cluster(), wanting("a", 2, cpus=1), wanting("b", 4, cpus=1)
    order = BindOrder(cluster.state, 0)
    for one in (first, second):
        cluster.filter(one)
    cluster.started(cluster.bound(first))
    assert order.blocked(second.build().uid)
    cluster.now_s = COUNTED_S
    assert not order.blocked(second.build().uid)


def test_a_node_whose_gpus_are_no_longer_known_when_the_pod_is_bound_is_refused() -> None:
    cluster, one = Cluster(), wanting("a")
    cluster.filter(one)
    cluster.state.allocations.set_node("n1", None)
    assert "its GPUs are not known" in BindOrder(cluster.state, 0).why(one.build().uid)


def test_nothing_is_kept_of_a_pod_that_goes_before_its_cpus_are_counted() -> None:
    cluster, one = Cluster(), wanting("a", cpus=1)
    cluster.filter(one)
    seen = cluster.started(cluster.bound(one))
    cluster.filter(wanting("b", cpus=1))
    assert set(cluster.state.numa._since_s) == {seen.build().uid}
    cluster.intake.pod_changed(seen.build(), None)
    assert not cluster.state.numa._since_s


def test_pods_without_cpus_of_their_own_wait_for_the_start_alone() -> None:
    cluster, first, second = Cluster(), wanting("a", 2), wanting("b", 4)
    order = BindOrder(cluster.state, 0)
    for one in (first, second):
        cluster.filter(one)
    seen = cluster.bound(first)
    assert order.blocked(second.build().uid)
    cluster.started(seen)
    assert not order.blocked(second.build().uid)


def test_a_node_without_the_annotation_places_as_ever() -> None:
    cluster = Cluster(gpus=(gpu(0, 8 * GIB, numa=0), gpu(1, 4 * GIB, numa=1)))
    plain = node("n1").with_inventory(*cluster.gpus["n1"]).build()
    cluster.intake.node_changed(cluster.nodes["n1"], plain)
    cluster.filter(wanting("a"))
    assert cluster.gpu_of(wanting("a")) == ("n1", 1)
    assert len(cluster.state.numa) == 0


@pytest.mark.parametrize("text", ["{", '{"v":9,"policy":"restricted","scope":"pod","nodes":[{"id":0}]}'])
def test_an_annotation_that_cannot_be_read_takes_no_pods(text: str) -> None:
    cluster = Cluster()
    cluster.publish(text=text)
    assert list(cluster.filter(wanting("a")).unresolvable) == ["node's NUMA facts cannot be read"]


def test_what_cannot_be_predicted_is_refused_with_the_reason() -> None:
    cluster = Cluster(unpredictable="the memory manager's policy is Static")
    (reason,) = cluster.filter(wanting("a")).unresolvable
    assert reason == f"{NUMA} (single-numa-node): it would refuse the pod, since the memory manager's policy is Static"


def test_pods_that_are_gone_from_the_api_are_free_for_the_kubelet() -> None:
    """Their processes run on, so the GPU is not free; the kubelet would arrive there all the same."""
    cluster, first = Cluster(policy="restricted"), wanting("a", 7)
    cluster.filter(first)
    assert cluster.gpu_of(first) == ("n1", 0)
    orphan = Orphan(first.build().uid, "default", "a", (share(cluster.gpus["n1"][0], 7 * GIB),))
    cluster.state.forget_pod(orphan.uid)
    cluster.state.orphans.reported("n1", [orphan])
    (reason,) = cluster.filter(wanting("b", 8)).unresolvable
    assert "would align the pod to NUMA node 0, where" in reason


def test_of_many_nodes_that_are_refused_one_that_is_not_aligned_is_found() -> None:
    names = tuple(f"n{at:03d}" for at in range(40))
    cluster = Cluster(*names, free=(0, 0))
    cluster.gpus["zz"] = (gpu(0, 8 * GIB, "zz"),)
    cluster.intake.node_changed(None, node("zz").with_inventory(*cluster.gpus["zz"]).build())
    assert cluster.filter(wanting("a", cpus=1)).node_names == ["zz"]
    assert sum(map(len, cluster.filter(wanting("b", cpus=1), *names).unresolvable.values())) == 40


pods = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.booleans()), min_size=1, max_size=7)


@given(
    drawn=pods, policy=st.sampled_from(("restricted", "single-numa-node")), scope=st.sampled_from(("container", "pod"))
)
def test_the_kubelet_admits_every_pod_that_is_bound_and_gives_it_its_gpu(
    drawn: list[Any], policy: str, scope: str
) -> None:
    """Pods come, some go; what filter and the order of bindings let through goes to the whole kubelet."""
    cluster = Cluster(policy=policy, scope=scope)
    order = BindOrder(cluster.state, 0)
    kubelet = SlowKubelet(policy, frozenset({0, 1}), {}, sorted, lambda _: 0.0)
    kubelet.things["cpu"] = Things({f"cpu{at}": at // 4 for at in range(8)}, {f"cpu{at}" for at in range(8)})
    inventory = cluster.state.fleet.inventory["n1"]
    for resource in (DEFAULT.gpu_mem, DEFAULT.gpu):
        ids = {one.id: one.numa for one in devices(inventory, DEFAULT)[resource]}
        kubelet.things[resource] = Things(ids, set(ids))
    had: dict[str, tuple[PodBuilder, dict[str, set[str]]]] = {}
    for at, (gib, cpus, one_goes) in enumerate(drawn):
        if one_goes and had:
            _, (gone, things) = had.popitem()
            cluster.intake.pod_changed(gone.build(), None)
            for resource, ids in things.items():
                kubelet.things[resource].free |= ids
            _recount(cluster, kubelet, had, policy, scope)
        one = wanting(f"p{at}", gib, cpus)
        if not cluster.filter(one).node_names:
            continue
        assert not order.blocked(one.build().uid)
        before = {resource: set(things.free) for resource, things in kubelet.things.items()}
        needs = cluster.state.request_of(one.build()).needs
        masks = kubelet.admit(needs, scope, as_one(needs))
        assert masks is not None
        assert cluster.gpu_of(one)[1] in masks["main"]  # GPU and NUMA node have the same number
        taken = {resource: before[resource] - things.free for resource, things in kubelet.things.items()}
        had[one.name] = (cluster.started(cluster.bound(one)), taken)
        _recount(cluster, kubelet, had, policy, scope)


def _recount(cluster: Cluster, kubelet: SlowKubelet, had: dict[str, Any], policy: str, scope: str) -> None:
    cpus = kubelet.things["cpu"]
    free = tuple(sum(cpus.node_of[one] == at for one in cpus.free) for at in range(2))
    cluster.publish(
        free=free, policy=policy, scope=scope, counted=tuple(built.build().uid for built, _ in had.values())
    )


def test_a_slot_on_demand_is_allowed_where_its_gpu_is() -> None:
    slot = AssignedGpu(slot_device(gpu(0).uuid, MigSlot(0, "1g.10gb")), 0, 9728, kind="mig", profile="1g.10gb")
    for allowed, answer in ((gpu(0).uuid, True), (gpu(1).uuid, False)):
        assert Judgement({"main": frozenset({allowed})}, "").allows(Assignment({"main": (slot,)})) is answer
