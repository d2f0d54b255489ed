"""What nodes have left beside GPUs, and what policies read of that and of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extender.compact import small_node, small_pod_of
from extender.filter import filter_nodes
from extender.node_resources import NodeResources, cpu_milli_of
from extender.protocol import FilterArgs
from extender.state import State
from extender.watch_intake import SAMPLE, WatchIntake
from kube.objects import Node, Pod
from kube.pod_requests import milli, requests_of
from tests.builders import PodBuilder, gpu, node, pod, share
from vgpu.api.names import DEFAULT
from vgpu.scheduling.fleet import UNKNOWN_CPU


def container(cpu: str | None, **more: Any) -> dict[str, Any]:
    requests = {} if cpu is None else {"cpu": cpu}
    return {"name": f"c{cpu}", "resources": {"requests": requests}, **more}


@pytest.mark.parametrize(
    ("text", "expected"), [("2", 2000), ("250m", 250), ("0.5", 500), (1, 1000), ("1n", 1), ("2k", 2_000_000), ("x", 0)]
)
def test_quantities_of_cpu(text: str | int, expected: int) -> None:
    assert milli(text) == expected


@pytest.mark.parametrize(
    ("containers", "init", "expected"),
    [
        ([container("1"), container("500m"), container(None)], [], 1500),
        ([container("1")], [container("3"), container("2")], 3000),
        ([container("1")], [container("2", restartPolicy="Always"), container("3")], 5000),
        ([container("4")], [container("2", restartPolicy="Always"), container("3")], 6000),
    ],
)
def test_a_pod_requests_what_it_requests_at_its_peak(
    containers: list[dict[str, Any]], init: list[dict[str, Any]], expected: int
) -> None:
    plain = {"metadata": {"name": "a"}, "spec": {"containers": containers, "initContainers": init}}
    whole = msgspec.convert(plain, Pod)
    assert cpu_milli_of(requests_of(whole)) == expected
    small = small_pod_of(DEFAULT)(whole)
    assert small.spec.containers == ()
    assert cpu_milli_of(requests_of(small)) == expected, "also when it is kept small"


AMOUNTS = st.dictionaries(st.sampled_from(["cpu", "memory", "nic"]), st.integers(0, 9))
STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["n1", "n2", None]), AMOUNTS), max_size=12)
THERE = {"cpu": 10, "memory": 12, "pods": 2}


@example(
    [("a", "n1", {"memory": 0}), ("b", "n1", {"memory": 0}), ("c", "n1", {}), ("a", None, {}), ("b", None, {})], {}
)
@given(STEPS, AMOUNTS)
def test_what_is_free_is_what_no_pod_has(
    steps: list[tuple[str, str | None, dict[str, int]]], requested: dict[str, int]
) -> None:
    resources, nodes = NodeResources(), ("n1", "n2")
    held: dict[str, tuple[str, dict[str, int]]] = {}
    for name in nodes:
        resources.set_node(name, THERE)
    for uid, where, wanted in steps:
        before = {name: resources.free_cpu_milli(name) for name in nodes}
        if where is None:
            changed = resources.release(uid)
            held.pop(uid, None)
        else:
            changed = resources.allocate(uid, where, wanted)
            held[uid] = where, wanted
        after = {name: resources.free_cpu_milli(name) for name in nodes}
        pods = {name: [wants for on, wants in held.values() if on == name] for name in nodes}
        assert after == {name: 10 - sum(one.get("cpu", 0) for one in pods[name]) for name in nodes}
        assert {name for name in after if after[name] != before[name]} <= changed
        for name in nodes:
            more = {"pods": 1} | {resource: amount for resource, amount in requested.items() if resource != "nic"}
            short = {
                resource: amount + sum(one.get(resource, 0) for one in pods[name]) - THERE[resource]
                for resource, amount in more.items()
                if amount
            }
            short["pods"] = 1 + len(pods[name]) - THERE["pods"]
            wanted_short = {resource: amount for resource, amount in short.items() if amount > 0}
            assert resources.lacking(name, requested) == wanted_short
    assert resources.lacking("n3", requested) == {}


def test_a_node_is_kept_with_what_it_has_beside_our_resources() -> None:
    there = {"cpu": "8", "memory": "64Gi", "pods": "110", "example.com/nic": "2", DEFAULT.gpu_mem: "80"}
    plain = node("n1").with_gpus(1).plain() | {"status": {"allocatable": there}}
    del there[DEFAULT.gpu_mem]
    assert small_node(DEFAULT)(msgspec.convert(plain, Node)).status.allocatable == there


def test_a_pod_without_a_gpu_is_kept_with_all_that_it_requests() -> None:
    requests = {"cpu": "2", "memory": "1Gi", "example.com/nic": "1"}
    plain = {"metadata": {"name": "a"}, "spec": {"containers": [{"name": "c", "resources": {"requests": requests}}]}}
    small = small_pod_of(DEFAULT)(msgspec.convert(plain, Pod))
    assert requests_of(small) == {"cpu": 2000, "memory": 2**30, "example.com/nic": 1}


@dataclass
class FedState:
    """A state fed with small objects, as the cache feeds it."""

    state: State = field(default_factory=lambda: State(lambda: 0.0, names=DEFAULT))

    def node(self, name: str, cpu: str | None, before: str | None = "none") -> None:
        def made(of: str | None) -> Node:
            plain = node(name).with_gpus(1).plain() | {"status": {"allocatable": {} if of is None else {"cpu": of}}}
            return small_node(DEFAULT)(msgspec.convert(plain, Node))

        WatchIntake(self.state).node_changed(None if before == "none" else made(before), made(cpu))

    def small(self, built: PodBuilder, cpu: str) -> Pod:
        plain = built.plain()
        plain["spec"]["containers"][0] = plain["spec"]["containers"][0] | {
            "resources": (plain["spec"]["containers"][0].get("resources") or {"limits": {}})
        }
        resources = plain["spec"]["containers"][0]["resources"]
        resources["requests"] = dict(resources.get("requests") or {}) | {"cpu": cpu}
        return small_pod_of(DEFAULT)(msgspec.convert(plain, Pod))

    def free(self, name: str = "n1") -> int:
        return int(self.state.fleet.free_cpu_milli[self.state.fleet.column[name]])


def test_the_fleet_has_the_free_cpu_of_nodes() -> None:
    cluster = FedState()
    state = cluster.state
    cluster.node("n1", "8")
    assert cluster.free() == 8000
    plain_pod = cluster.small(pod("no-gpu").on("n1"), "1500m")
    WatchIntake(state).pod_changed(None, plain_pod)
    assert cluster.free() == 6500
    asking = cluster.small(pod("a").asking(mib=8192), "2")
    assert filter_nodes(state, FilterArgs(asking, ("n1",))).node_names == ["n1"]
    assert cluster.free() == 4500, "a reservation counts"
    state.end_reservation(asking.uid)
    assert cluster.free() == 6500
    bound = cluster.small(pod("a").asking(mib=8192).on("n1").assigned(share(gpu(0), 8192)), "2")
    WatchIntake(state).pod_changed(None, bound)
    assert cluster.free() == 4500
    cluster.node("n1", "4", before="8")
    assert cluster.free() == 500, "also where the inventory stays"
    WatchIntake(state).node_changed(None, node("n1").with_text("{").build())
    cluster.node("n1", "4")
    assert cluster.free() == 500, "also when its GPUs are offered again"
    WatchIntake(state).pod_changed(bound, None)
    WatchIntake(state).pod_changed(plain_pod, None)
    assert cluster.free() == 4000
    cluster.node("n1", None, before="4")
    assert cluster.free() == UNKNOWN_CPU


def test_a_request_carries_the_cpu_of_its_pod_and_is_learnt_from_once() -> None:
    cluster = FedState()
    asking = cluster.small(pod("a").asking(mib=8192), "2")
    WatchIntake(cluster.state).pod_changed(None, asking)
    WatchIntake(cluster.state).pod_changed(asking, asking)
    ((seen, times),) = cluster.state.fleet.distribution.seen.items()
    assert (seen.mib, seen.cpu_milli, times) == (8192, 2000, 1)


def test_pods_without_a_gpu_or_with_a_wrong_request_are_not_learnt_from() -> None:
    cluster = FedState()
    WatchIntake(cluster.state).pod_changed(None, cluster.small(pod("a"), "2"))
    WatchIntake(cluster.state).pod_changed(None, cluster.small(pod("b").asking(core=10), "2"))
    assert not cluster.state.fleet.distribution.seen


def test_of_pods_that_ran_before_the_extender_started_a_sample_is_counted() -> None:
    cluster = FedState()
    intake = WatchIntake(cluster.state)
    for number in range(4 * SAMPLE):
        built = pod(f"p{number}").asking(mib=1024).on("n1").assigned(share(gpu(0), 1024)).with_phase("Running")
        intake.pod_changed(None, cluster.small(built, "1"))
    assert cluster.state.fleet.distribution.pods == 4
