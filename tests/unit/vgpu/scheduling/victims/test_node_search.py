"""The least set on one node with more pods than all sets of which are tried, against the obvious slow version: every set."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from tests.examples import examples
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.victims.bounds import EvictionRules, EvictionTerms
from vgpu.scheduling.victims.eligibility import AllocatedPod
from vgpu.scheduling.victims.eviction_cost import Cost, cost_of
from vgpu.scheduling.victims.node import NodeView
from vgpu.scheduling.victims.node_search import Eviction
from vgpu.scheduling.victims.sets import EXACT
from vgpu.scheduling.victims.victim_search import least_eviction

GPUS, GPU_MIB = 4, 100
SEED = 21


def node(random_: random.Random) -> NodeView:
    """More than `EXACT` pods on four GPUs, one in eight of them on two of these."""
    gpus = tuple(Gpu(f"c{row}", row, "t4", GPU_MIB) for row in range(GPUS))
    free, pods = dict.fromkeys(range(GPUS), GPU_MIB), list[AllocatedPod]()
    priorities, spans = random_.choice((1, 3)), random_.random() < 0.3
    while len(pods) < EXACT + 3:
        rows = random_.sample(range(GPUS), 2 if spans and random_.random() < 0.25 else 1)
        size = random_.choice((10, 15, 20, 25))
        if any(free[row] < size for row in rows):
            if max(free.values()) < 25:
                break
            continue
        for row in rows:
            free[row] -= size
        service_class = random_.choice(("standard", "standard", "best-effort", "latency-critical"))
        held = tuple(AssignedGpu(f"c{row}", row, size) for row in rows)
        started = random_.choice((10, 20, 30))
        requests = {"cpu": random_.randint(0, 4)}
        pods.append(
            AllocatedPod(
                f"p{len(pods):02}",
                held,
                random_.randrange(priorities),
                service_class,
                started,
                frozenset(),
                False,
                requests,
            )
        )
    return NodeView("n", Inventory(gpus), pods)


def slow(view: NodeView, part: GpuRequest, cpu: int) -> Cost | None:
    """By sums over the GPUs: which sets free enough of them."""
    pods = view.pods
    held = np.zeros((len(pods), GPUS), np.int64)
    for at, one in enumerate(pods):
        for assigned in one.held:
            held[at, assigned.index] += assigned.mib
    free = GPU_MIB - held.sum(axis=0)
    needs = np.full(GPUS, GPU_MIB if part.kind == "whole" else part.mib)
    sets = (np.arange(1 << len(pods))[:, np.newaxis] >> np.arange(len(pods))) & 1
    enough = ((sets @ held + free >= needs).sum(axis=1) >= part.gpus) & (cpu_of(view, sets) >= cpu)
    least = {tuple(row) for row in sets[enough].tolist()}
    spare_none = [row for row in least if not any(fewer in least for fewer in without_one(row))]
    costs = [cost_of("n", [one for one, goes in zip(pods, row, strict=True) if goes], {}) for row in spare_none]
    return min(costs, default=None)


def without_one(row: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [(*row[:at], 0, *row[at + 1 :]) for at, goes in enumerate(row) if goes]


def cpu_of(view: NodeView, sets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    total: npt.NDArray[np.int64] = sets @ np.array([one.requests["cpu"] for one in view.pods])
    return total


def searched(view: NodeView, part: GpuRequest, cpu: int) -> Eviction | None:
    terms = {"n": EvictionTerms(frees={"cpu": cpu} if cpu else {})}
    return least_eviction(PodRequest((part,)), ["n"], {"n": view}.get, EvictionRules(10, terms=terms))


def test_for_several_gpus_of_a_node_with_many_pods_hardly_more_go_than_in_the_least_set() -> None:
    random_ = random.Random(SEED)
    cases, same, more = examples(20), 0, 0
    for _ in range(cases):
        view = node(random_)
        part = GpuRequest("main", "share", 2, units=50, mib=random_.choice((25, 40, 50)))
        found, best = searched(view, part, 0), slow(view, part, 0)
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            assert best <= found.cost
            same += found.cost == best
            more += found.cost[:4] != best[:4] or found.cost[4] > best[4] + 1
    assert same >= 0.8 * cases
    assert more <= 0.05 * cases


def test_pods_of_other_gpus_join_where_those_on_one_free_too_little_beside_it() -> None:
    random_ = random.Random(SEED)
    joined = 0
    for _ in range(examples(20)):
        view = node(random_)
        part = GpuRequest("main", "share", 1, units=50, mib=50)
        cpu = random_.choice((8, 12, 16))
        found, best = searched(view, part, cpu), slow(view, part, cpu)
        assert (found is None) == (best is None)
        if found is None or best is None:
            continue
        assert best <= found.cost
        gone = [one for one in view.pods if one.uid in found.victims]
        assert sum(one.requests["cpu"] for one in gone) >= cpu
        for one in gone:
            fewer = tuple(other for other in gone if other is not one)
            assert not suffices(view, fewer, cpu), "no victim could stay"
        joined += len({assigned.index for one in gone for assigned in one.held}) > 1
    assert joined


def suffices(view: NodeView, gone: tuple[AllocatedPod, ...], cpu: int) -> bool:
    left = [GPU_MIB] * GPUS
    for one in view.pods:
        for assigned in () if one in gone else one.held:
            left[assigned.index] -= assigned.mib
    return max(left) >= 50 and sum(one.requests["cpu"] for one in gone) >= cpu
