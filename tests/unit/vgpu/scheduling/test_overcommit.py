"""Placements, edits and ends of pods in any order never take the limits on a GPU above `burst.overcommit` times its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.vgpu.api.test_overcommit import slow_peak
from tests.unit.vgpu.scheduling.test_placement import fleet_of, share
from vgpu.api.burst import Burst, limits_on_gpus
from vgpu.api.grant import Assignment
from vgpu.api.overcommit import bound_mib, enforced
from vgpu.api.quantity import LARGEST_GPU_MIB
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.bursts import explain_with_limits, fitting_with_limits, place_with_room
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import LIMITS, NoFit, Placement
from vgpu.scheduling.policies.registry import POLICIES

NODES = {"n0": [40, 80], "n1": [100]}
NAMES = tuple(NODES)

overcommits = st.sampled_from([1.0, 1.25, 2.0, 3.0])
limits = st.one_of(st.just(0), st.integers(1, 100), st.just(LARGEST_GPU_MIB))


@st.composite
def requests(draw: st.DrawFn) -> tuple[PodRequest, dict[str, Burst]]:
    """One to three containers, of which some burst, some run to completion first, and some have two GPUs."""
    parts: list[GpuRequest] = []
    bursts: dict[str, Burst] = {}
    for name in "abc"[: draw(st.sampled_from([1, 1, 1, 2, 3]))]:
        mib, more = draw(st.integers(1, 40)), draw(limits)
        parts.append(replace(share(name, mib, 0, draw(st.sampled_from([1, 1, 2]))), init=draw(st.booleans())))
        if more:
            bursts[name] = Burst(more if more == LARGEST_GPU_MIB else mib + more, 0)
    parts[-1] = replace(parts[-1], init=False)
    return PodRequest(tuple(parts), policy=draw(st.sampled_from(list(POLICIES)))), bursts


crowds = st.lists(st.tuples(st.integers(1, 12), st.one_of(st.just(0), st.integers(20, 90))), min_size=1, max_size=5)
"""(guarantee, more) of small pods that burst far, so that limits are scarcer than guarantees."""
SMALL = {"n0": [80]}


def bursting(mib: int, more: int) -> tuple[PodRequest, dict[str, Burst]]:
    """A pod with one container."""
    limit = more if more == LARGEST_GPU_MIB else mib + more
    return PodRequest((share("main", mib),)), {"main": Burst(limit, 0)} if more else {}


@dataclass
class Cluster:
    """A fleet, and the same counted slowly from the assignments."""

    overcommit: float
    nodes: Mapping[str, list[int]] = field(default_factory=lambda: NODES)
    fleet: Fleet = field(init=False)
    pods: dict[int, tuple[str, Assignment, Mapping[str, Burst]]] = field(default_factory=dict)
    placed: int = 0

    def __post_init__(self) -> None:
        self.fleet = Fleet(self.overcommit)
        for name, inventory in fleet_of(**self.nodes).inventory.items():
            self.fleet.set_node(name, inventory)

    def gpus(self) -> list[tuple[str, int, str, int]]:
        return [(n, row, gpu.uuid, gpu.mib) for n, i in self.fleet.inventory.items() for row, gpu in enumerate(i.gpus)]

    def summed(self, node: str, uuid: str, *, limits: bool) -> int:
        there = [one for at, one, _ in self.pods.values() if at == node]
        return sum(slow_peak(one, uuid, limits=limits) for one in there)

    def place(self, request: PodRequest, bursts: Mapping[str, Burst]) -> Placement | NoFit:
        found = place_with_room(self.fleet, request, bursts, tuple(self.nodes))
        if isinstance(found, Placement):
            for gpu in found.assignment.held():
                self.fleet.debit(found.node, gpu)
            self.placed += 1
            self.pods[self.placed] = found.node, found.assignment, bursts
        return found

    def end(self, number: int) -> None:
        node, assignment, _ = self.pods.pop(number)
        for gpu in assignment.held():
            self.fleet.credit(node, gpu)

    def check(self) -> None:
        """The bound is kept, and the arrays are what the assignments say."""
        for node, row, uuid, mib in self.gpus():
            at, total = self.fleet.column[node], self.summed(node, uuid, limits=True)
            guaranteed = self.summed(node, uuid, limits=False)
            assert total <= bound_mib(mib, self.overcommit)
            assert self.fleet.limits.excess_mib[row, at] == total - guaranteed
            free = min(mib - guaranteed, bound_mib(mib, self.overcommit) - total)
            assert self.fleet.free_mib[row, at] == free >= 0
        before = self.fleet.snapshot()
        for node in self.nodes:  # counted anew it is the same
            held = [gpu for at, one, _ in self.pods.values() if at == node for gpu in one.held()]
            self.fleet.set_node(node, self.fleet.inventory[node], held)
        assert all((before[name] == array).all() for name, array in self.fleet.snapshot().items())

    def check_node(self, node: str, edited: Mapping[int, Mapping[str, Burst]]) -> None:
        """What the node gives, with the annotations as they are now: within the bound, and what was settled as far as it is requested."""
        there = {number: one for number, one in self.pods.items() if one[0] == node}
        total_mib = {uuid: mib for at, _, uuid, mib in self.gpus() if at == node}
        assignments = [one for _, one, _ in there.values()]
        given_limits = list[Assignment]()
        for number, most in zip(there, enforced(assignments, total_mib, self.overcommit), strict=True):
            _, assignment, placed = there[number]
            containers = dict(assignment.containers)
            for name, burst in edited.get(number, placed).items():
                gpus = containers[name]
                assert most[name] == {gpu.uuid: gpu.limit_mib or gpu.mib for gpu in gpus}, "extender and node agree"
                found, _ = limits_on_gpus(burst, gpus, total_mib, most[name])
                now = {gpu.uuid: gpu.mib for gpu in found.gpus} if found else {}
                containers[name] = tuple(replace(gpu, limit_mib=now.get(gpu.uuid, 0)) for gpu in gpus)
            given_limits.append(replace(assignment, containers=containers))
        for uuid, mib in total_mib.items():
            assert sum(slow_peak(one, uuid, limits=True) for one in given_limits) <= bound_mib(mib, self.overcommit)


@settings(max_examples=60)
@given(overcommits, st.lists(requests(), min_size=1, max_size=14), st.data())
def test_no_order_of_placements_edits_and_ends_exceeds_the_bound(
    overcommit: float, wanted: list[tuple[PodRequest, dict[str, Burst]]], data: st.DataObject
) -> None:
    cluster = Cluster(overcommit)
    edited: dict[int, Mapping[str, Burst]] = {}
    for request, bursts in wanted:
        fit = fitting_with_limits(cluster.fleet, request, bursts, NAMES)
        reasons = explain_with_limits(cluster.fleet, request, bursts, NAMES)
        assert set(fit) | set(reasons) == set(NAMES)
        assert not set(fit) & set(reasons)
        found = cluster.place(request, bursts)
        assert isinstance(found, Placement) == bool(fit)
        if isinstance(found, Placement):
            assert found.node in fit
        cluster.check()
        if cluster.pods and data.draw(st.booleans()):
            number = data.draw(st.sampled_from(sorted(cluster.pods)))
            names = list(cluster.pods[number][1].containers)
            edited[number] = {name: Burst(more, 0) for name in names if (more := data.draw(limits)) > 0}
            for name, burst in list(edited[number].items()):
                least = max(gpu.mib for gpu in cluster.pods[number][1].containers[name])
                edited[number] = {**edited[number], name: replace(burst, mib=max(burst.mib, least))}
        if cluster.pods and data.draw(st.booleans()):
            cluster.end(data.draw(st.sampled_from(sorted(cluster.pods))))
            cluster.check()
        for node in NAMES:
            cluster.check_node(node, edited)


@settings(max_examples=150)
@given(overcommits, crowds, st.sampled_from([SMALL, NODES]), st.integers(1, 60), limits)
def test_a_pod_of_one_container_is_refused_only_where_no_gpu_keeps_to_the_bound(
    overcommit: float, crowd: list[tuple[int, int]], nodes: dict[str, list[int]], mib: int, more: int
) -> None:
    cluster = Cluster(overcommit, nodes)
    for one in crowd:
        cluster.place(*bursting(*one))
    request, bursts = bursting(mib, more)
    roomy = set[tuple[str, str]]()
    for node, _, uuid, total in cluster.gpus():
        free = total - cluster.summed(node, uuid, limits=False)
        left = bound_mib(total, overcommit) - cluster.summed(node, uuid, limits=True)
        counted = mib if more in (0, LARGEST_GPU_MIB) else min(mib + more, max(free, mib))
        if free >= mib and left >= counted:
            roomy.add((node, uuid))
    found = cluster.place(request, bursts)
    assert isinstance(found, Placement) == bool(roomy)
    if isinstance(found, Placement):
        (gpu,) = found.assignment.containers["main"]
        assert (found.node, gpu.uuid) in roomy
    cluster.check()


def test_the_reason_has_figures() -> None:
    cluster = Cluster(1.0)
    cluster.place(PodRequest((share("main", 8),)), {"main": Burst(60, 0)})
    big = PodRequest((share("main", 50),))
    placed = {name: explain_with_limits(cluster.fleet, big, {"main": Burst(70, 0)}, [name]) for name in NAMES}
    (node,) = [one for one, _, _ in cluster.pods.values()]
    total = {"n0": 80, "n1": 100}[node]
    assert placed[node][node].endswith(
        f"add up to {60 + min(70, total - 8)} MiB with this pod: {total} MiB at most (burst.overcommit 1)"
    )


def test_a_pod_without_a_burst_is_refused_where_limits_left_no_room() -> None:
    cluster = Cluster(1.0)
    for _ in range(3):
        cluster.place(PodRequest((share("main", 1),)), {"main": Burst(LARGEST_GPU_MIB, 0)})
    found = cluster.place(PodRequest((share("main", 30),)), {})
    assert isinstance(found, NoFit)
    assert found.reasons == dict.fromkeys(NAMES, LIMITS)
    for number in list(cluster.pods):
        cluster.end(number)
    assert isinstance(cluster.place(PodRequest((share("main", 30),)), {}), Placement)


@given(st.lists(requests(), max_size=8))
def test_without_a_bound_settled_limits_count_for_nothing(wanted: list[tuple[PodRequest, dict[str, Burst]]]) -> None:
    bounded = Cluster(3.0)
    for request, bursts in wanted:
        bounded.place(request, bursts)
    plain, same = fleet_of(**NODES), fleet_of(**NODES)
    for node, assignment, _ in bounded.pods.values():
        for gpu in assignment.held():
            same.debit(node, gpu)
            plain.debit(node, replace(gpu, limit_mib=0))
    for request, bursts in wanted:
        found = place_with_room(same, request, bursts, NAMES)
        assert found == place_with_room(plain, request, bursts, NAMES)
        if isinstance(found, Placement):
            assert not any(gpu.limit_mib for gpus in found.assignment.containers.values() for gpu in gpus)
