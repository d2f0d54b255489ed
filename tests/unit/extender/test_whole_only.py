"""Nodes with GPUs whose memory is coherent: pods get them whole, and no share of them, and the reason says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.reasons import NO_EVICTION_HELPS
from tests.builders import gpu, share
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import TOO_FEW, TOO_LARGE, WHOLE_ONLY, WITHDRAWN, Placement, explain, place
from vgpu.scheduling.victims.node import NodeView

SHARE = GpuRequest("main", "share", 1, units=8, mib=8_192)
WHOLE = GpuRequest("main", "whole", 1)
BOTH = (SHARE, replace(WHOLE, container="other"))
NODE = "n1"


def fleet(*gpus: Gpu) -> Fleet:
    made = Fleet()
    made.set_node(NODE, Inventory(gpus))
    return made


def coherent(index: int, kind: str = "numa") -> Gpu:
    return gpu(index, model="NVIDIA GH200 480GB", coherent=kind)


def why(made: Fleet, *requests: GpuRequest) -> str:
    return explain(made, PodRequest(requests), [NODE]).get(NODE, "")


def rows(made: Fleet, *requests: GpuRequest) -> dict[str, int]:
    found = place(made, PodRequest(requests), [NODE])
    assert isinstance(found, Placement)
    return {name: gpus[0].index for name, gpus in found.assignment.containers.items()}


@pytest.mark.parametrize("kind", ["numa", "unified", "unknown", "a later one"])
def test_pods_get_it_whole_and_no_share_of_it(kind: str) -> None:
    made = fleet(coherent(0, kind))
    assert rows(made, WHOLE) == {"main": 0}
    assert why(made, SHARE) == WHOLE_ONLY
    assert WHOLE_ONLY in NO_EVICTION_HELPS
    assert not isinstance(place(made, PodRequest((SHARE,)), [NODE]), Placement)


def test_memory_that_the_driver_alone_allocates_is_shared() -> None:
    assert rows(fleet(coherent(0, "driver")), SHARE) == {"main": 0}


def test_a_share_takes_another_gpu_and_a_whole_one_beside_it_the_coherent_one() -> None:
    made = fleet(coherent(0), gpu(1))
    assert rows(made, SHARE) == {"main": 1}
    assert rows(made, *BOTH) == {"main": 1, "other": 0}
    assert why(fleet(coherent(0)), *BOTH) == WHOLE_ONLY


def test_others_reasons_stay() -> None:
    assert why(fleet(coherent(0)), replace(WHOLE, gpus=2)) == TOO_FEW
    assert why(fleet(coherent(0)), replace(SHARE, mib=10**6)) == TOO_LARGE
    assert why(fleet(replace(coherent(0), healthy=False)), SHARE) == TOO_LARGE
    assert WITHDRAWN not in why(fleet(coherent(0)), SHARE)


def test_the_reason_goes_with_the_gpu_and_with_the_node() -> None:
    made = fleet(coherent(0))
    made.set_node(NODE, Inventory((gpu(0),)))
    assert why(made, SHARE) == ""
    made.set_node(NODE, Inventory((coherent(0),)))
    assert why(made, SHARE) == WHOLE_ONLY
    made.remove_node(NODE)
    assert not made.unshared
    assert not made.whole_only.any()


def test_no_pod_is_evicted_for_a_share_of_it() -> None:
    view = NodeView(NODE, Inventory((coherent(0), gpu(1))), [])
    assert view.allowed(PodRequest((SHARE,)), None, "share").tolist() == [False, True]
    assert view.allowed(PodRequest((WHOLE,)), None, "whole").tolist() == [True, True]
    named = PodRequest((SHARE,), uuids=frozenset({coherent(0).uuid}))
    assert view.allowed(named, None, "share").tolist() == [False, False]


@given(
    st.lists(st.tuples(st.sampled_from(["", "driver", "numa"]), st.integers(0, 8)), min_size=1, max_size=4),
    st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=3),
)
def test_pods_are_placed_as_if_each_way_of_giving_gpus_out_was_tried(
    there: list[tuple[str, int]], wanted: list[tuple[bool, int]]
) -> None:
    """`there`: kind and GiB in use of each GPU of 8 GiB. `wanted`: whole or a share, and GiB."""
    gpus = [gpu(at, mib=8_192, coherent=kind) for at, (kind, _) in enumerate(there)]
    made = Fleet()
    made.set_node(
        NODE, Inventory(tuple(gpus)), [share(one, gib * 1024) for one, (_, gib) in zip(gpus, there, strict=True) if gib]
    )
    request = PodRequest(
        tuple(
            GpuRequest(f"c{at}", "whole", 1) if whole else GpuRequest(f"c{at}", "share", 1, units=gib, mib=gib * 1024)
            for at, (whole, gib) in enumerate(wanted)
        )
    )

    def possible(left: list[int], rest: list[tuple[bool, int]]) -> bool:
        if not rest:
            return True
        (whole, gib), *others = rest
        for at, free in enumerate(left):
            if (free == 8) if whole else (gib <= free and there[at][0] != "numa"):
                after = [*left]
                after[at] = -1 if whole else free - gib
                if possible(after, others):
                    return True
        return False

    found = place(made, request, [NODE])
    assert isinstance(found, Placement) == possible([8 - gib for _, gib in there], wanted)
    if isinstance(found, Placement):
        by_uuid = {one.uuid: one for one in gpus}
        assert not any(by_uuid[part.uuid].whole_only for part in found.assignment.held() if part.kind == "share")
