"""Pods that may burst go where there is room for their limits, if there is any such place; all others go where they went."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.vgpu.scheduling.test_placement import fleet_of, share
from vgpu.api.burst import Burst
from vgpu.api.grant import AssignedGpu
from vgpu.api.quantity import LARGEST_GPU_MIB
from vgpu.api.request import PodRequest
from vgpu.scheduling.bursts import place_with_room
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import Placement, place
from vgpu.scheduling.policies.registry import POLICIES

NAMES = ("n0", "n1", "n2")

sizes = st.lists(st.sampled_from([40, 80, 100]), min_size=1, max_size=3)
used = st.lists(st.integers(0, 80), min_size=9, max_size=9)


def clusters(nodes: list[list[int]], mib: list[int]) -> Fleet:
    """Nodes with these GPUs, of each of which something is used."""
    fleet = fleet_of(**dict(zip(NAMES, nodes, strict=False)))
    amounts = iter(mib)
    for name in fleet.inventory:
        for gpu in fleet.inventory[name].gpus:
            fleet.debit(name, AssignedGpu(gpu.uuid, gpu.index, min(next(amounts), gpu.mib)))
    return fleet


def has_free(fleet: Fleet, node: str, mib: int, gpus: int) -> bool:
    """Have so many GPUs of the node so much free?"""
    return (
        sum(int(free) >= mib for free in fleet.free_mib[: len(fleet.inventory[node].gpus), fleet.column[node]]) >= gpus
    )


@given(
    st.lists(sizes, min_size=1, max_size=3),
    used,
    st.integers(1, 60),
    st.integers(0, 60),
    st.integers(1, 2),
    st.sampled_from(list(POLICIES)),
)
def test_a_share_that_bursts_has_room_for_its_limit_wherever_any_node_has_it_and_gets_its_guarantee(
    nodes: list[list[int]], mib: list[int], guarantee: int, more: int, gpus: int, policy: str
) -> None:
    fleet, limit = clusters(nodes, mib), guarantee + more
    request = PodRequest((share("main", guarantee, 10, gpus),), policy=policy)
    found = place_with_room(fleet, request, {"main": Burst(limit, 0)}, NAMES)
    roomy = [node for node in fleet.inventory if has_free(fleet, node, limit, gpus)]
    if not roomy:
        assert found == place(fleet, request, NAMES)
        return
    assert isinstance(found, Placement)
    pieces = found.assignment.containers["main"]
    rows = {gpu.uuid: row for row, gpu in enumerate(fleet.inventory[found.node].gpus)}
    assert all(fleet.free_mib[rows[one.uuid], fleet.column[found.node]] >= limit for one in pieces)
    assert [(one.mib, one.core_percent) for one in pieces] == [(guarantee, 10)] * gpus
    assert found.assignment.service_class == request.service_class


@given(st.lists(sizes, min_size=1, max_size=3), used, st.integers(1, 60), st.sampled_from(list(POLICIES)))
def test_without_a_burst_or_with_one_that_names_no_limit_the_placement_is_what_it_was(
    nodes: list[list[int]], mib: list[int], guarantee: int, policy: str
) -> None:
    fleet = clusters(nodes, mib)
    request = PodRequest((share("main", guarantee), share("side", 5)), policy=policy)
    was = place(fleet, request, NAMES)
    for bursts in ({}, {"main": Burst(LARGEST_GPU_MIB, 0)}, {"main": Burst(guarantee, 50)}, {"other": Burst(90, 0)}):
        assert place_with_room(fleet, request, bursts, NAMES) == was


def test_the_policy_chooses_among_those_that_have_room() -> None:
    fleet = clusters([[40], [80], [100]], [30, 20, 0] + [0] * 6)
    request = PodRequest((share("main", 8),))
    plain = place_with_room(fleet, request, {}, NAMES)
    roomy = place_with_room(fleet, request, {"main": Burst(50, 0)}, NAMES)
    spread = place_with_room(fleet, replace(request, policy="spread"), {"main": Burst(50, 0)}, NAMES)
    assert [one.node for one in (plain, roomy, spread) if isinstance(one, Placement)] == ["n0", "n1", "n2"]
