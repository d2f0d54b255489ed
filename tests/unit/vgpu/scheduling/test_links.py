"""The best-linked set of GPUs, for shares and for whole GPUs, against the obvious slow choice: every set of every node."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.links import SETS_LIMIT, nearest, nearest_of_kinds, pair
from vgpu.scheduling.placement import Placement, place
from vgpu.scheduling.policies.registry import POLICIES

MIB = 100
sizes = st.integers(2, 8)


@st.composite
def costs(draw: st.DrawFn, gpus: st.SearchStrategy[int] = sizes) -> np.ndarray:
    """(GPUs, GPUs) of a node."""
    count = draw(gpus)
    drawn = draw(st.lists(st.integers(0, 3), min_size=count**2, max_size=count**2))
    one_way = np.triu(np.array(drawn).reshape(count, count), 1)
    return (one_way + one_way.T).astype(np.int32)


def cost_of(of: np.ndarray, rows: tuple[int, ...] | list[int]) -> int:
    return sum(int(of[pair_of]) for pair_of in combinations(sorted(rows), 2))


@settings(max_examples=examples(200), deadline=None)
@given(costs(), st.data())
def test_no_set_is_nearer_than_the_one_that_is_chosen(of: np.ndarray, data: st.DataObject) -> None:
    can = np.array(data.draw(st.lists(st.booleans(), min_size=len(of), max_size=len(of))))
    gpus = data.draw(st.integers(2, len(of)))
    every = list(combinations(np.flatnonzero(can).tolist(), gpus))
    rows, cost = nearest(of[:, :, np.newaxis], can[:, np.newaxis], gpus)
    if every:
        assert can[rows[:, 0]].all()
        assert len(set(rows[:, 0].tolist())) == gpus
        assert cost_of(of, rows[:, 0].tolist()) == cost[0] == min(cost_of(of, some) for some in every)


def test_the_nearest_set_is_found_where_the_nearest_gpu_of_each_step_leads_elsewhere() -> None:
    of = np.array([[0, 3, 0, 3, 3], [3, 0, 2, 2, 3], [0, 2, 0, 3, 2], [3, 2, 3, 0, 0], [3, 3, 2, 0, 0]], np.int32)
    rows, cost = nearest(of[:, :, np.newaxis], np.ones((5, 1), np.bool_), 4)
    assert cost[0] == cost_of(of, rows[:, 0].tolist()) == min(cost_of(of, some) for some in combinations(range(5), 4))


@settings(max_examples=examples(20), deadline=None)
@given(costs(st.just(16)), st.integers(4, 8))
def test_of_too_many_sets_one_of_real_gpus_is_chosen(of: np.ndarray, gpus: int) -> None:
    can = np.arange(16) % 3 > 0
    rows, cost = nearest(of[:, :, np.newaxis], can[:, np.newaxis], gpus)
    assert can[rows[:, 0]].all()
    assert len(set(rows[:, 0].tolist())) == gpus
    assert cost[0] == cost_of(of, rows[:, 0].tolist())


@settings(max_examples=examples(200), deadline=None)
@given(costs(), st.data())
def test_of_gpus_that_are_alike_the_nearest_set_is_chosen(of: np.ndarray, data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(["a", "b", None]), min_size=len(of), max_size=len(of)))
    usable = [row for row, kind in enumerate(kinds) if kind is not None]
    if not usable:
        return
    taken = data.draw(st.lists(st.sampled_from(usable), min_size=1, unique=True))
    found = nearest_of_kinds(of, kinds, taken)
    assert sorted(str(kinds[row]) for row in found) == sorted(str(kinds[row]) for row in taken)
    alike = [
        some
        for some in combinations(usable, len(taken))
        if sorted(str(kinds[row]) for row in some) == sorted(str(kinds[row]) for row in taken)
    ]
    assert cost_of(of, found) == (min(cost_of(of, some) for some in alike) if len(taken) > 1 else 0)


def test_too_many_sets_that_are_alike_leave_the_set_as_it_was() -> None:
    of = np.zeros((16, 16), np.int32)
    assert len(list(combinations(range(16), 4))) > SETS_LIMIT
    assert nearest_of_kinds(of, ["h100"] * 16, [3, 2, 5, 7]) == [3, 2, 5, 7]


@st.composite
def nodes(draw: st.DrawFn) -> dict[str, Inventory]:
    """Up to three nodes of up to five GPUs, with links and NUMA nodes."""
    made = {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        count = draw(st.integers(1, 5))
        linked = {pair_of for pair_of in combinations(range(count), 2) if draw(st.integers(0, 2)) == 0}
        gpus = []
        for row in range(count):
            peers = {f"{name}-{other}": 4 for pair_of in linked if row in pair_of for other in pair_of if other != row}
            gpus.append(Gpu(f"{name}-{row}", row, "h100", MIB, numa=draw(st.sampled_from([-1, 0, 1])), nvlinks=peers))
        made[name] = Inventory(tuple(gpus))
    return made


used_of_gpus = st.lists(st.sampled_from([0, 0, 40, 70]), min_size=15, max_size=15)


def fleet_with(of: dict[str, Inventory], used: list[int]) -> tuple[Fleet, dict[str, dict[int, int]]]:
    """The fleet, and by node the free MiB of each GPU."""
    fleet, free, left = Fleet(), {}, iter(used)
    for name, inventory in of.items():
        fleet.set_node(name, inventory)
        free[name] = {gpu.index: MIB for gpu in inventory.gpus}
        for gpu in inventory.gpus:
            if mib := next(left):
                fleet.debit(name, AssignedGpu(gpu.uuid, gpu.index, mib))
                free[name][gpu.index] -= mib
    return fleet, free


def links_of(inventory: Inventory, rows: tuple[int, ...] | list[int]) -> int:
    return sum(pair(inventory.gpus[one], inventory.gpus[other]) for one, other in combinations(rows, 2))


@pytest.mark.parametrize("kind", ["share", "whole"])
@settings(max_examples=examples(150), deadline=None)
@given(nodes(), used_of_gpus, st.integers(2, 4), st.sampled_from(sorted(POLICIES)))
def test_a_container_with_several_gpus_gets_the_best_linked_set_with_room(
    kind: str, of: dict[str, Inventory], used: list[int], gpus: int, policy: str
) -> None:
    """`topology`: of all sets. Each other policy: of the sets on the chosen node that are alike to it."""
    fleet, free = fleet_with(of, used)
    need = MIB if kind == "whole" else 30
    one = GpuRequest("main", "share", gpus, units=30, mib=30) if kind == "share" else GpuRequest("main", "whole", gpus)
    found = place(fleet, PodRequest((one,), policy=policy), of)
    sets = [
        (name, some)
        for name in of
        for some in combinations([row for row, mib in free[name].items() if mib >= need], gpus)
    ]
    assert isinstance(found, Placement) is bool(sets)
    if not isinstance(found, Placement):
        return
    rows = sorted(gpu.index for gpu in found.assignment.containers["main"])
    assert (found.node, tuple(rows)) in sets
    here = sorted(free[found.node][row] for row in rows)
    alike = [
        (name, some)
        for name, some in sets
        if policy == "topology" or (name == found.node and sorted(free[name][row] for row in some) == here)
    ]
    assert links_of(of[found.node], rows) == min(links_of(of[name], some) for name, some in alike)


def test_whole_gpus_beside_shares_stay_off_the_gpus_of_the_shares() -> None:
    fleet = Fleet()
    gpus = [Gpu(f"a-{row}", row, "h100", MIB, nvlinks={f"a-{row ^ 1}": 4}) for row in range(4)]
    fleet.set_node("a", Inventory(tuple(gpus)))
    one = GpuRequest("whole", "whole", 2)
    other = GpuRequest("share", "share", 2, units=30, mib=30)
    found = place(fleet, PodRequest((one, other)), ["a"])
    assert isinstance(found, Placement)
    wholes = {gpu.index for gpu in found.assignment.containers["whole"]}
    assert wholes in ({0, 1}, {2, 3})
    assert wholes.isdisjoint(gpu.index for gpu in found.assignment.containers["share"])
