"""What a node says of bursts: the sums, against an obvious count, and the words about its host pool."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.burst import BurstLimits
from vgpu.api.burst_summary import WHY_LIMIT, PoolState, quantity, summary_of, text_of
from vgpu.api.grant import AssignedGpu, Assignment, GrantGpu
from vgpu.api.inventory import Gpu, Inventory

GIB = 1024
NODE = Inventory((Gpu("GPU-0", 0, "H100", 80 * GIB), Gpu("GPU-1", 1, "H100", 80 * GIB), Gpu("GPU-2", 2, "H100", 40, mig=True)))  # fmt: skip
READY = PoolState("64Gi", "")


def part(uuid: str, mib: int) -> AssignedGpu:
    return AssignedGpu(uuid, int(uuid[-1]), mib)


def limit(uuid: str, mib: int) -> BurstLimits:
    return BurstLimits((GrantGpu(uuid, mib),))


def test_a_node_shows_its_pool_and_of_each_gpu_what_is_guaranteed_and_what_the_limits_add_up_to() -> None:
    first = Assignment({"a": (part("GPU-0", 8 * GIB),), "b": (part("GPU-0", 2 * GIB),)})
    second = Assignment({"main": (part("GPU-0", 4 * GIB),)})
    pods = [(first, {"a": limit("GPU-0", 70 * GIB)}), (second, {"main": limit("GPU-0", 40 * GIB)})]
    assert json.loads(text_of(summary_of(NODE, pods, READY))) == {
        "v": 1,
        "hostPool": "64Gi",
        "ready": True,
        "why": "",
        "gpus": [
            {"uuid": "GPU-0", "memory": "80Gi", "guaranteed": "14Gi", "limits": "112Gi"},
            {"uuid": "GPU-1", "memory": "80Gi", "guaranteed": "0", "limits": "0"},
        ],
    }


def test_a_pool_that_is_missing_has_its_reason_cut_to_one_line() -> None:
    found = summary_of(NODE, [], PoolState("0", "x" * 1000))
    assert (found.ready, found.host_pool, len(found.why)) == (False, "0", WHY_LIMIT)


def test_an_init_container_that_bursts_counts_at_the_peak_and_not_beside_the_others() -> None:
    one = Assignment({"setup": (part("GPU-0", GIB),), "main": (part("GPU-0", 4 * GIB),)}, frozenset({"setup"}))
    (gpu, _) = summary_of(NODE, [(one, {"main": limit("GPU-0", 10 * GIB)})], READY).gpus
    assert (gpu.guaranteed, gpu.limits) == ("4Gi", "10Gi")


def test_limits_that_were_settled_and_do_not_apply_any_more_are_not_counted() -> None:
    settled = AssignedGpu("GPU-0", 0, 4 * GIB, limit_mib=40 * GIB)
    assert summary_of(NODE, [(Assignment({"main": (settled,)}), {})], READY).gpus[0].limits == "4Gi"


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 1)), max_size=5))
def test_sums_are_those_of_containers_that_run_side_by_side(containers: list[tuple[int, int, int]]) -> None:
    pods = [
        (
            Assignment({"main": (part(f"GPU-{gpu}", mib),)}),
            {"main": limit(f"GPU-{gpu}", mib + more)} if more else {},
        )
        for mib, more, gpu in containers
    ]
    for at, shown in enumerate(summary_of(NODE, pods, READY).gpus):
        mine = [(mib, more) for mib, more, gpu in containers if gpu == at]
        assert shown.guaranteed == quantity(sum(mib for mib, _ in mine))
        assert shown.limits == quantity(sum(mib + more for mib, more in mine))


@pytest.mark.parametrize(("mib", "text"), [(0, "0"), (1, "1Mi"), (1024, "1Gi"), (1536, "1536Mi"), (81920, "80Gi")])
def test_sizes_are_quantities_of_kubernetes(mib: int, text: str) -> None:
    assert quantity(mib) == text
