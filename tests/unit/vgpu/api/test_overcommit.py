"""Limits that are settled at placement keep to the bound, and those that a node enforces do so whatever was settled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.burst import Burst
from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.overcommit import GpuRoom, bound_mib, enforced, limit_of, settle
from vgpu.api.quantity import LARGEST_GPU_MIB

GPUS = {"GPU-a": 80, "GPU-b": 100}

overcommits = st.sampled_from([1.0, 1.1, 1.5, 2.0, 4.0])
wanted = st.one_of(st.none(), st.integers(0, 90), st.just(LARGEST_GPU_MIB))


@st.composite
def pods(draw: st.DrawFn, most: int = 3) -> tuple[Assignment, dict[str, Burst]]:
    """Containers on one GPU or on both, of which some run to completion first."""
    containers: dict[str, tuple[AssignedGpu, ...]] = {}
    bursts: dict[str, Burst] = {}
    for name in "abc"[: draw(st.integers(1, most))]:
        uuids = draw(st.sampled_from([("GPU-a",), ("GPU-b",), ("GPU-a", "GPU-b")]))
        mib = draw(st.integers(1, 12))
        containers[name] = tuple(AssignedGpu(uuid, list(GPUS).index(uuid), mib) for uuid in uuids)
        more = draw(wanted)
        if more is not None:
            bursts[name] = Burst(LARGEST_GPU_MIB if more == LARGEST_GPU_MIB else mib + more, 0)
    init = frozenset(name for name in list(containers)[:-1] if draw(st.booleans()))
    return Assignment(containers, init), bursts


def slow_peak(assignment: Assignment, uuid: str, *, limits: bool) -> int:
    """MiB that containers have together at the worst moment: each init container with those before it that keep running, or all of those."""
    names = list(assignment.containers)
    lasting = [name for name in names if name not in assignment.init]
    moments = [lasting]
    for at, name in enumerate(names):
        if name in assignment.init:
            moments.append([one for one in names[:at] if one in lasting] + [name])
    return max(
        sum(
            (limit_of(gpu) if limits else gpu.mib)
            for name in moment
            for gpu in assignment.containers[name]
            if gpu.uuid == uuid
        )
        for moment in moments
    )


@given(pods(), st.data())
def test_what_a_pod_may_have_at_its_peak_is_the_worst_moment(
    pod: tuple[Assignment, object], data: st.DataObject
) -> None:
    containers = {
        name: tuple(replace(gpu, limit_mib=gpu.mib + extra if extra else 0) for gpu in gpus)
        for name, gpus in pod[0].containers.items()
        for extra in [data.draw(st.integers(0, 20))]
    }
    assignment = replace(pod[0], containers=containers)
    for gpu in assignment.held():
        assert gpu.mib == slow_peak(assignment, gpu.uuid, limits=False)
        assert limit_of(gpu) == slow_peak(assignment, gpu.uuid, limits=True)


def settled(assignment: Assignment, bursts: Mapping[str, Burst], left: Mapping[str, int]) -> Assignment:
    return settle(assignment, bursts, {uuid: GpuRoom(GPUS[uuid], left[uuid]) for uuid in GPUS})


@given(pods(), st.integers(0, 200), st.integers(0, 200))
def test_settled_limits_keep_to_what_is_left_and_none_could_be_higher(
    pod: tuple[Assignment, dict[str, Burst]], left_a: int, left_b: int
) -> None:
    assignment, bursts = pod
    left = {"GPU-a": left_a, "GPU-b": left_b}
    for gpu in assignment.held():  # the guarantees fit, else the pod would not be there
        left[gpu.uuid] = max(left[gpu.uuid], gpu.mib)
    found = settled(assignment, bursts, left)
    assert all(
        slow_peak(found, uuid, limits=True) <= left[uuid] for uuid in GPUS if any(g.uuid == uuid for g in found.held())
    )
    for name, gpus in found.containers.items():
        burst = bursts.get(name)
        assert len({bool(gpu.limit_mib) for gpu in gpus}) == 1, "above the guarantee on all GPUs or on none"
        for at, gpu in enumerate(gpus):
            assert gpu.mib <= limit_of(gpu) <= (burst.mib if burst else gpu.mib)
            if burst is None or not gpu.limit_mib:
                continue
            higher = (*gpus[:at], replace(gpu, limit_mib=gpu.limit_mib + 1), *gpus[at + 1 :])
            more = replace(found, containers={**found.containers, name: higher})
            held = {one.uuid: one.mib for one in found.held()}
            full = gpu.limit_mib == min(burst.mib, GPUS[gpu.uuid] - held[gpu.uuid] + gpu.mib)
            assert full or slow_peak(more, gpu.uuid, limits=True) > left[gpu.uuid]


def test_numbers_come_before_max() -> None:
    gpu = AssignedGpu("GPU-a", 0, 10)
    found = settled(
        Assignment({"a": (gpu,), "b": (gpu,)}),
        {"a": Burst(LARGEST_GPU_MIB, 0), "b": Burst(60, 0)},
        {"GPU-a": 80, "GPU-b": 0},
    )
    assert [limit_of(found.containers[name][0]) for name in "ab"] == [20, 60]


@given(st.lists(pods(), min_size=1, max_size=5), overcommits, st.data())
def test_a_node_keeps_to_the_bound_whatever_was_settled_and_lowers_no_guarantee(
    found: list[tuple[Assignment, dict[str, Burst]]], overcommit: float, data: st.DataObject
) -> None:
    assignments = list[Assignment]()
    used = dict.fromkeys(GPUS, 0)
    for assignment, _ in found:
        if any(used[gpu.uuid] + gpu.mib > GPUS[gpu.uuid] for gpu in assignment.held()):
            continue  # guarantees always fit
        for gpu in assignment.held():
            used[gpu.uuid] += gpu.mib
        containers = {
            name: tuple(replace(gpu, limit_mib=gpu.mib + more if more else 0) for gpu in gpus)
            for name, gpus in assignment.containers.items()
            for more in [data.draw(st.integers(0, 150))]
        }
        assignments.append(replace(assignment, containers=containers))
    most = enforced(assignments, GPUS, overcommit)
    for uuid, mib in GPUS.items():
        total = 0
        for assignment, by_container in zip(assignments, most, strict=True):
            limits = {
                name: tuple(replace(gpu, limit_mib=by_container[name][gpu.uuid]) for gpu in gpus)
                for name, gpus in assignment.containers.items()
            }
            total += slow_peak(replace(assignment, containers=limits), uuid, limits=True)
        assert total <= bound_mib(mib, overcommit)
    for assignment, by_container in zip(assignments, most, strict=True):
        for name, gpus in assignment.containers.items():
            assert all(gpu.mib <= by_container[name][gpu.uuid] <= limit_of(gpu) for gpu in gpus)


@given(st.sampled_from([24_576, 40_960, 81_920, 146_432, 183_359]), st.lists(overcommits, min_size=2, max_size=2))
def test_the_bound_is_whole_mib_and_grows_with_the_value(mib: int, values: list[float]) -> None:
    bounds = [bound_mib(mib, value) for value in sorted(values)]
    assert all(one <= other for one, other in pairwise(bounds))
    assert bound_mib(mib, 1.0) == mib
