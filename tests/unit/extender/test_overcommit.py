"""`burst.overcommit` in the extender: filter refuses with figures, bind writes what was settled, and evictions suffice."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extender.bind import Binder
from extender.filter import filter_nodes
from extender.protocol import FilterArgs, FilterResult
from extender.reasons import NO_EVICTION_HELPS
from extender.settings import Settings
from extender.snapshot import snapshot_of
from tests.builders import PodBuilder, gpu, pod
from tests.unit.extender.extender_parts import ExtenderParts
from tests.unit.vgpu.scheduling.test_overcommit import SMALL, Cluster, crowds, limits
from tests.unit.vgpu.scheduling.test_overcommit import bursting as bursting_pod
from vgpu.api.codec import assignment_from_json, assignment_to_json
from vgpu.api.errors import BadDocument
from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.scheduling.bursts import place_with_room, with_limits_guaranteed
from vgpu.scheduling.placement import LIMITS, NoFit, Placement
from vgpu.scheduling.snapshot import drift, fleet_of, snapshot_from_json, snapshot_to_json
from vgpu.scheduling.victims.bounds import EvictionRules
from vgpu.scheduling.victims.eligibility import AllocatedPod
from vgpu.scheduling.victims.node import NodeView
from vgpu.scheduling.victims.victim_search import least_eviction

GIB = 1024


def parts(overcommit: float | None, **gpus_by_node: int) -> ExtenderParts:
    chosen = Settings(burst_enabled=True, burst_overcommit=overcommit, _cli_parse_args=False)  # type: ignore[call-arg]
    return ExtenderParts(chosen, **gpus_by_node)


def bursting(name: str, text: str, gib: int = 8) -> PodBuilder:
    return pod(name).asking(mib=gib * GIB).annotated(gpu_mem_burst=text)


def filtered(extender: ExtenderParts, one: PodBuilder, *nodes: str) -> FilterResult:
    return filter_nodes(extender.state, FilterArgs(one.build(), nodes or ("n1",)))


def test_filter_refuses_with_figures_and_counts_the_same_reason_of_many_nodes() -> None:
    names = [f"n{at}" for at in range(5)]
    extender = parts(1.0, **dict.fromkeys(names, 1))
    for at, name in enumerate(names):
        assert filtered(extender, bursting(f"p{at}", "60Gi"), name).node_names == [name]
    answer = filtered(extender, bursting("late", "40Gi"), *names)
    assert answer.node_names == []
    assert LIMITS not in NO_EVICTION_HELPS
    assert answer.failed.pop(LIMITS) == names[3:]
    assert [reason.partition(" add up to ")[2] for reason in answer.failed] == [
        "102400 MiB with this pod: 81920 MiB at most (burst.overcommit 1)"
    ] * 3
    assert filtered(parts(None, n1=1), bursting("late", "40Gi")).node_names == ["n1"]


@pytest.mark.parametrize("policy", ["binpack", "spread", "scheduler"])
def test_max_is_cut_to_what_is_left_and_a_pod_without_a_burst_is_refused_then(policy: str) -> None:
    extender = parts(1.0, n1=1, n2=1)
    for name in ("n1", "n2"):
        assert filtered(extender, bursting(f"{name}-a", "60Gi"), name).node_names == [name]
        assert filtered(extender, bursting(f"{name}-b", "max"), name).node_names == [name]
        allocation = extender.state.allocations.get(bursting(f"{name}-b", "max").build().uid)
        assert allocation is not None
        assert [one.limit_mib for one in allocation.assignment.held()] == [20 * GIB]
    plain = pod("c").asking(mib=8 * GIB).annotated(placement=policy)
    answer = filtered(extender, plain, "n1", "n2")
    assert (answer.node_names, len(answer.failed)) == ([], 2)


async def test_bind_writes_what_was_settled_and_the_watch_counts_it() -> None:
    extender = parts(1.5, n1=1)
    one = bursting("a", "max")
    assert filtered(extender, one).node_names == ["n1"]
    bodies = list[dict[str, dict[str, dict[str, str]]]]()

    def answer(_method: str, _path: str, body: dict[str, dict[str, dict[str, str]]]) -> bytes:
        bodies.append(body)
        return b"{}"

    extender.server.answer = answer
    binder = Binder(extender.state, extender.server, timeout_s=1, lifted=extender.preemption.lifted)
    assert await binder.bind(extender.binding(one, "n1")) == "bound"
    text = bodies[0]["metadata"]["annotations"]["tangram.sh/assignment"]
    assert assignment_from_json(text).containers["main"] == (AssignedGpu(gpu(0).uuid, 0, 8 * GIB, limit_mib=80 * GIB),)
    again = parts(1.5, n1=1)  # an extender that was restarted
    again.report(one.on("n1").assigned(text=text))
    for state in (extender.state, again.state):
        assert int(state.fleet.free_mib[0, state.fleet.column["n1"]]) == 40 * GIB
        assert list(drift(snapshot_of(state).whole())) == []
        read = snapshot_from_json(snapshot_to_json(snapshot_of(state).whole()))
        assert read.overcommit == 1.5
        assert (fleet_of(read).free_mib == state.fleet.free_mib).all()
    again.end("a")
    assert int(again.state.fleet.free_mib[0, again.state.fleet.column["n1"]]) == 80 * GIB


def test_a_snapshot_without_a_bound_is_one_that_an_earlier_reader_reads() -> None:
    document = msgspec.json.decode(snapshot_to_json(snapshot_of(parts(None, n1=1).state).whole()))
    assert document["v"] == 2
    assert "overcommit" not in document
    bounded = msgspec.json.decode(snapshot_to_json(snapshot_of(parts(2.0, n1=1).state).whole()))
    assert (bounded["v"], bounded["overcommit"]) == (5, 2.0)
    with pytest.raises(BadDocument, match=r"overcommit is 0.5: it must be 1 to 100"):
        snapshot_from_json(msgspec.json.encode(bounded | {"overcommit": 0.5}))


@pytest.mark.parametrize("limit", [1, 8192, 2**24])
def test_a_limit_in_an_assignment_is_more_than_its_guarantee(limit: int) -> None:
    text = assignment_to_json(Assignment({"main": (AssignedGpu(gpu(0).uuid, 0, 8192, limit_mib=limit),)}))
    with pytest.raises(BadDocument, match=f"limit is {limit}"):
        assignment_from_json(text)


def test_capacity_is_freed_for_the_limit_of_a_pod_as_if_it_were_guaranteed() -> None:
    one = bursting("a", "60Gi").build()
    for overcommit, mib in ((1.0, 60 * GIB), (None, 8 * GIB)):
        assert parts(overcommit, n1=1).state.request_to_set_aside(one).containers[0].mib == mib


@settings(max_examples=200)
@given(st.sampled_from([1.0, 1.5, 2.5]), crowds, crowds, st.integers(1, 80), limits)
def test_whoever_is_evicted_for_a_pod_it_fits_then(
    overcommit: float, staying: list[tuple[int, int]], leaving: list[tuple[int, int]], mib: int, more: int
) -> None:
    cluster = Cluster(overcommit, SMALL)
    for one in staying[:2]:
        cluster.place(*bursting_pod(*one))
    important = set(cluster.pods)
    for one in leaving:
        cluster.place(*bursting_pod(*one))
    request, bursts = bursting_pod(mib, more)

    def view(node: str) -> NodeView:
        there = [
            AllocatedPod(str(number), one.held(), priority=2000 if number in important else 0)
            for number, (_, one, _) in cluster.pods.items()
        ]
        return NodeView(node, cluster.fleet.inventory[node], there, overcommit)

    rules, roomy = EvictionRules(1000, {}), with_limits_guaranteed(request, bursts)
    found = least_eviction(roomy, SMALL, view, rules)
    for number in map(int, found.victims) if found else ():
        cluster.end(number)
    fits = isinstance(place_with_room(cluster.fleet, request, bursts, tuple(SMALL)), Placement)
    assert fits or found is None
    if overcommit == 1.0 and found is None:  # else whoever leaves may free less than limits show
        for number in set(cluster.pods) - important:
            cluster.end(number)
        assert isinstance(place_with_room(cluster.fleet, roomy, {}, tuple(SMALL)), NoFit)
