"""Of each node that does not fit, the nearest GPU and what it lacks."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.builders import gpu, pod
from tests.unit.tangramctl.explained import cluster, request_of
from vgpu.api.inventory import Inventory
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.explain import explain_nodes
from vgpu.scheduling.placement import (
    NO_INVENTORY,
    NO_MIG_EVER,
    NO_SINGLE_GPU,
    NO_WHOLE,
    TOO_FEW,
    TOO_LARGE,
    Placement,
    place,
)
from vgpu.scheduling.snapshot import NodeRecord, Snapshot, fleet_of


def test_of_each_node_the_nearest_gpu_and_what_it_lacks_nearest_first() -> None:
    rows = explain_nodes(cluster(), request_of(pod("p").asking(mib=35 * 1024, core=30)))
    reported = [(row.node, row.reason) for row in rows]
    assert reported == [("n1", NO_SINGLE_GPU), ("n2", NO_SINGLE_GPU), ("small", TOO_LARGE), ("plain", NO_INVENTORY)]
    first, second, third = (row.nearest for row in rows[:3])
    assert first
    assert second
    assert third
    assert (first.index, first.free_mib, first.lacks_mib, first.lacks_percent) == (1, 30 * 1024, 5 * 1024, 0)
    assert (second.free_percent, second.lacks_mib, second.lacks_percent) == (10, 0, 20)
    assert third.lacks_mib == 19 * 1024
    assert rows[3].nearest is None


def test_a_gpu_that_the_pod_may_not_have_is_not_the_nearest() -> None:
    asking = pod("p").asking(mib=35 * 1024).annotated(not_gpu_uuid=gpu(1, node="n1").uuid)
    (row,) = [row for row in explain_nodes(cluster(), request_of(asking)) if row.node == "n1"]
    assert row.nearest
    assert row.nearest.index == 0


def test_whole_gpus_lack_what_others_use_of_them_and_mig_has_no_nearest() -> None:
    rows = {row.node: row for row in explain_nodes(cluster(), request_of(pod("p").asking(gpus=1)))}
    assert rows["n1"].reason == NO_WHOLE
    assert rows["n1"].nearest
    assert rows["n1"].nearest.lacks_mib == 50 * 1024
    assert rows["small"].reason == ""
    mig = {row.node: row for row in explain_nodes(cluster(), request_of(pod("p").asking(mig="1g.10gb")))}
    assert (mig["n1"].reason, mig["n1"].nearest) == (NO_MIG_EVER, None)


def test_of_several_gpus_the_last_that_would_be_taken_and_how_many_are_missing() -> None:
    rows = {
        row.node: row
        for row in explain_nodes(cluster(), request_of(pod("p").asking(mib=48 * 1024).annotated(gpu_count="2")))
    }
    two, one = rows["n1"], rows["n2"]
    assert (two.reason, two.nearest and two.nearest.index, two.lacks_gpus) == (NO_SINGLE_GPU, 0, 0)
    assert two.nearest
    assert two.nearest.lacks_mib == 4 * 1024
    assert (one.reason, one.lacks_gpus) == (TOO_FEW, 1)
    wholes = {row.node: row for row in explain_nodes(cluster(), request_of(pod("p").asking(gpus=4)))}
    assert (wholes["n1"].reason, wholes["n1"].lacks_gpus, wholes["plain"].lacks_gpus) == (TOO_FEW, 2, 0)


def test_a_node_without_an_allowed_gpu_lists_what_it_has() -> None:
    asking = pod("p").asking(mib=1024).annotated(gpu_model="H200")
    rows = {row.node: row for row in explain_nodes(cluster(), request_of(asking))}
    assert (rows["n1"].nearest, rows["n1"].models) == (None, (gpu(0).model,))
    assert rows["plain"].models == ()


@given(st.lists(st.lists(st.integers(1, 100), max_size=3), max_size=4), st.integers(1, 110), st.integers(1, 2))
def test_a_node_fits_by_placement(sizes: list[list[int]], mib: int, gpus: int) -> None:
    nodes = tuple(
        NodeRecord(f"n{at}", Inventory(tuple(gpu(row, size, f"n{at}") for row, size in enumerate(row_sizes))))
        for at, row_sizes in enumerate(sizes)
    )
    known = Snapshot("tangram.sh", 1, nodes, ())
    request = PodRequest((GpuRequest("main", "share", gpus, units=mib, mib=mib),))
    for row in explain_nodes(known, request):
        assert (row.reason == "") == isinstance(place(fleet_of(known), request, [row.node]), Placement)
        if row.reason and row.nearest and gpus == 1:
            assert row.nearest.lacks_mib == mib - max(one.mib for one in _gpus(known, row.node)) > 0


def _gpus(known: Snapshot, name: str) -> tuple[Any, ...]:
    (inventory,) = [one.inventory for one in known.nodes if one.name == name]
    assert inventory
    return inventory.gpus
