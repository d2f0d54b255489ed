"""Where only the sum of a node's GPUs is enough, against the obvious slow version."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.explain import Scattered, scattered
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import NO_SINGLE_GPU, explain

Used = tuple[int, int]
"""MiB and percent that are taken of a GPU of 100 MiB."""


def fleet_of(nodes: dict[str, list[Used]]) -> Fleet:
    fleet = Fleet()
    for name, used in nodes.items():
        gpus = tuple(Gpu(f"{name}-{row}", row, "t4" if row % 2 else "a100", 100) for row in range(len(used)))
        held = [AssignedGpu(gpu.uuid, gpu.index, *some) for gpu, some in zip(gpus, used, strict=True) if some != (0, 0)]
        fleet.set_node(name, Inventory(gpus), held)
    return fleet


def share(mib: int, percent: int = 0, gpus: int = 1, **conditions: frozenset[str]) -> PodRequest:
    return PodRequest((GpuRequest("main", "share", gpus, units=mib, mib=mib, core_percent=percent),), **conditions)  # type: ignore[arg-type]


def slow(fleet: Fleet, request: PodRequest, names: list[str]) -> Scattered | None:
    part, found = request.containers[0], []
    for name in sorted(names):
        free = [
            (int(fleet.free_mib[row, fleet.column[name]]), int(fleet.free_percent[row, fleet.column[name]]))
            for row, gpu in enumerate(fleet.inventory[name].gpus)
            if not request.models or gpu.model in request.models
        ]
        mib, percent = sum(mib for mib, _ in free), sum(percent for _, percent in free)
        if free and mib >= part.mib * part.gpus and percent >= part.core_percent * part.gpus:
            lack, best = min(
                (max(0, part.mib - one[0]) / part.mib + max(0, part.core_percent - one[1]) / 100, at)
                for at, one in enumerate(free)
            )
            gpus = sum(mib > 0 for mib, _ in free)
            found.append((lack, name, Scattered(name, gpus, mib, percent, *free[best])))
    return min(found)[2] if found else None


used = st.tuples(st.integers(0, 100), st.integers(0, 100)).filter(lambda some: some[0] > 0 or some == (0, 0))


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c"]), st.lists(used, min_size=1, max_size=4)),
    st.integers(1, 120), st.integers(0, 100), st.integers(1, 3), st.sampled_from([frozenset(), frozenset({"t4"})]),
)  # fmt: skip
@settings(max_examples=examples(300))
def test_the_node_named_has_enough_in_sum_and_the_best_gpu_of_all(
    nodes: dict[str, list[Used]], mib: int, percent: int, gpus: int, models: frozenset[str]
) -> None:
    fleet, request = fleet_of(nodes), share(mib, percent, gpus, models=models)
    reasons = explain(fleet, request, list(nodes))
    names = [name for name in nodes if reasons.get(name) == NO_SINGLE_GPU]
    assert scattered(fleet, request, names) == slow(fleet, request, names)


def test_a_sum_is_reported_with_what_the_best_gpu_has() -> None:
    fleet = fleet_of({"n1": [(50, 10), (40, 0)], "n2": [(90, 0), (90, 0)]})
    assert scattered(fleet, share(70), ["n1", "n2"]) == Scattered("n1", 2, 110, 190, 60, 100)


def test_where_no_sum_is_enough_and_for_whole_gpus_there_is_none() -> None:
    fleet = fleet_of({"n1": [(50, 0), (40, 0)]})
    assert scattered(fleet, share(120), ["n1"]) is None
    assert scattered(fleet, PodRequest((GpuRequest("main", "whole", 1, core_percent=100),)), ["n1"]) is None
