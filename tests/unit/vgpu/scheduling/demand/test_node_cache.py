"""What is kept between pods is what all the work would give, to the last digit; and it is kept for few kinds of pods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import gpu, mig_gpu
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Inventory
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.arrays import GpuArrays
from vgpu.scheduling.demand.node_cache import KINDS, NodeCache
from vgpu.scheduling.demand.request_distribution import RequestDistribution
from vgpu.scheduling.feasibility import FeasibilityTable
from vgpu.scheduling.fleet import CandidateNodes, Fleet
from vgpu.scheduling.policies.fragmentation import fragmentation

MIB = 16_384
REQUESTS = [
    PodRequest((GpuRequest("a", "share", 1, 4, 4096, 30),), cpu_milli=1000, policy="fragmentation"),
    PodRequest((GpuRequest("a", "share", 2, 12, 6144),), cpu_milli=3000, policy="fragmentation"),
    PodRequest((GpuRequest("a", "whole", 1, core_percent=100),), cpu_milli=8000, policy="fragmentation"),
    PodRequest((GpuRequest("a", "share", 1, 16, 16_384),), models=frozenset({"small"}), policy="fragmentation"),
]
NODES = st.integers(0, 5)
STEPS = st.one_of(
    st.tuples(st.just("request"), st.integers(0, len(REQUESTS) - 1), NODES),
    st.tuples(st.just("debit"), NODES, st.integers(1, 3)),
    st.tuples(st.just("cpu"), NODES, st.integers(0, 20)),
    st.tuples(st.just("node"), NODES, st.integers(0, 3)),
    st.tuples(st.just("gone"), NODES, st.just(0)),
    st.tuples(st.just("record"), st.integers(0, len(REQUESTS) - 1), st.just(0)),
)


def inventory(name: str, kind: int) -> Inventory:
    if kind == 3:
        return Inventory((mig_gpu(0, "1g.10gb", node=name, mib=MIB), gpu(1, MIB, name)))
    return Inventory(tuple(gpu(row, MIB << (row % 2), name, ["large", "small"][kind % 2]) for row in range(kind + 1)))


def scores(fleet: Fleet, request: PodRequest, columns: list[int]) -> tuple[Any, Any]:
    table = FeasibilityTable(fleet, request, CandidateNodes(np.array(columns, np.intp), ()))
    return table.fits, fragmentation(table.outcome())


@given(steps=st.lists(STEPS, min_size=5, max_size=60))
def test_whatever_changes_the_scores_are_those_of_a_fresh_table(steps: list[tuple[str, int, int]]) -> None:
    fleet = Fleet()
    for number in range(4):
        fleet.set_node(f"n{number}", inventory(f"n{number}", number % 3))
    for request in REQUESTS:
        fleet.record(request)
    for what, one, other in steps:
        name = f"n{other if what == 'request' else one}"
        if what == "node":
            fleet.set_node(name, inventory(name, other))
        elif what == "gone":
            fleet.remove_node(name)
        elif what == "record":
            fleet.record(REQUESTS[one])
        elif name in fleet:
            first = fleet.inventory[name].gpus[0]
            if what == "debit":
                fleet.debit(name, AssignedGpu(first.uuid, 0, other * 2048, 10 * other))
            elif what == "cpu":
                fleet.set_cpu(name, other * 1000)
        if what != "request" or not len(fleet):
            continue
        columns = sorted(fleet.column.values())
        for some in (columns, columns[:1]):  # all, and few: other columns of other arrays
            fits, reported = scores(fleet, REQUESTS[one], some)
            fleet.distribution._recall.forget()
            _, fresh = scores(fleet, REQUESTS[one], some)
            for key, expected in zip(reported, fresh, strict=True):
                assert key[fits].tolist() == expected[fits].tolist()
            scores(fleet, REQUESTS[one], some)  # to be remembered by the next


def gpus(*free_mib: int) -> GpuArrays:
    free = np.array([free_mib], np.int32)
    full = np.full_like(free, MIB)
    return GpuArrays(free, np.full_like(free, 100), full, np.zeros_like(free), np.full(free.shape[1], 1000, np.int32))


class CountedWork:
    """Work that counts how many nodes it was done for."""

    def __init__(self) -> None:
        self.nodes: list[int] = []

    def __call__(self, those: GpuArrays) -> Any:
        self.nodes.append(those.free_mib.shape[1])
        return those.free_mib.sum(axis=0).astype(np.float32)


def test_the_work_is_done_again_for_the_nodes_that_changed_alone() -> None:
    recall, work = NodeCache(), CountedWork()
    for seen in (gpus(1, 2, 3, 4), gpus(1, 2, 3, 4), gpus(1, 2, 9, 4), gpus(5, 6, 7, 4), gpus(5, 6)):
        assert recall.of("a", seen, work).tolist() == seen.free_mib[0].tolist()
    assert work.nodes == [4, 1, 4, 2], "none, one, most and others of them"


def _free_percent(one: GpuArrays) -> None:
    one.free_percent[0, 1] = 7


def _total(one: GpuArrays) -> None:
    one.total_mib[0, 1] = 7


def _model(one: GpuArrays) -> None:
    one.model[0, 1] = 7


def _cpu(one: GpuArrays) -> None:
    one.cpu_milli[1] = 7


@pytest.mark.parametrize("change", [_free_percent, _total, _model, _cpu])
def test_every_array_counts(change: Callable[[GpuArrays], None]) -> None:
    recall, work = NodeCache(), CountedWork()
    recall.of("a", gpus(1, 2, 3), work)
    other = gpus(1, 2, 3)
    change(other)
    recall.of("a", other, work)
    assert work.nodes == [3, 1]


@pytest.mark.parametrize("change", [_free_percent, _model, _cpu])
def test_an_array_of_the_fleet_that_is_written_to_later_is_no_memory(change: Callable[[GpuArrays], None]) -> None:
    """Models, compute time and processors are read where the fleet keeps them."""
    recall, work, seen = NodeCache(), CountedWork(), gpus(1, 2, 3)
    recall.of("a", seen, work)
    change(seen)
    recall.of("a", seen, work)
    assert work.nodes == [3, 1]


def test_a_pod_that_takes_the_place_of_one_with_as_much_memory_and_less_compute_time_is_noticed() -> None:
    fleet = Fleet()
    for number in range(3):
        fleet.set_node(f"n{number}", inventory(f"n{number}", 1))
    for request in REQUESTS:
        fleet.record(request)
    columns = sorted(fleet.column.values())
    first = fleet.inventory["n1"].gpus[0]
    fleet.debit("n1", AssignedGpu(first.uuid, 0, 4096, 10))
    scores(fleet, REQUESTS[0], columns)
    fleet.credit("n1", AssignedGpu(first.uuid, 0, 4096, 10))
    fleet.debit("n1", AssignedGpu(first.uuid, 0, 4096, 90))
    _, reported = scores(fleet, REQUESTS[1], columns)
    fleet.distribution._recall.forget()
    _, fresh = scores(fleet, REQUESTS[1], columns)
    assert reported[0].tolist() == fresh[0].tolist()


def test_few_kinds_are_kept_and_equal_arrays_once() -> None:
    recall, work = NodeCache(), CountedWork()
    for kind in range(KINDS + 3):
        recall.of(kind, gpus(1, kind), work)
    assert len(recall) == KINDS
    assert len({id(kept.gpus.total_mib) for kept in recall._kept.values()}) == 1
    recall.of(KINDS + 2, gpus(1, KINDS + 2), work)
    assert len(work.nodes) == KINDS + 3, "it was kept"
    recall.of(0, gpus(1, 0), work)
    assert len(work.nodes) == KINDS + 4, "it was not"


def test_tables_that_are_made_anew_end_what_was_kept() -> None:
    distribution = RequestDistribution()
    for request in REQUESTS:
        distribution.record(request, {"large": 0})
    first = distribution.unusable(gpus(4096, 8192, MIB)).tolist()
    for _ in range(200):
        distribution.record(REQUESTS[2], {"large": 0})
    assert distribution.unusable(gpus(4096, 8192, MIB)).tolist() != first
