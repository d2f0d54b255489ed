"""Shares and whole GPUs on nodes whose GPUs are in MIG mode: the pod does not get them, and the reason says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from extender.reasons import NO_EVICTION_HELPS
from tests.builders import cordoned, gpu, mig_gpu
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import IN_MIG_MODE, NO_MIG_EVER, TOO_LARGE, WITHDRAWN, Placement, explain, place

SHARE = GpuRequest("main", "share", 1, units=8, mib=8_192)
WHOLE = GpuRequest("main", "whole", 1)
INSTANCE = GpuRequest("main", "mig", 1, profile="1g.10gb")


def fleet(*gpus: Gpu) -> Fleet:
    made = Fleet()
    made.set_node("n1", Inventory(gpus))
    return made


def why(made: Fleet, *requests: GpuRequest) -> str:
    return explain(made, PodRequest(requests), ["n1"]).get("n1", "")


@pytest.mark.parametrize("request_", [SHARE, WHOLE], ids=["share", "whole"])
@pytest.mark.parametrize("on_demand", [False, True])
def test_a_gpu_in_mig_mode_is_the_reason_and_no_eviction_helps(request_: GpuRequest, on_demand: bool) -> None:
    made = fleet(replace(mig_gpu(0, "1g.10gb"), on_demand=on_demand))
    assert why(made, request_) == IN_MIG_MODE
    assert IN_MIG_MODE in NO_EVICTION_HELPS
    assert not isinstance(place(made, PodRequest((request_,)), ["n1"]), Placement)


def test_it_is_no_reason_where_another_gpu_serves_the_pod() -> None:
    made = fleet(mig_gpu(0, "1g.10gb"), gpu(1))
    assert why(made, SHARE) == why(made, WHOLE) == why(made, INSTANCE) == ""
    assert why(made, replace(WHOLE, gpus=2)) == IN_MIG_MODE


def test_others_reasons_stay() -> None:
    assert why(fleet(gpu(0)), replace(SHARE, mib=10**6)) == TOO_LARGE
    assert why(fleet(gpu(0), mig_gpu(1, "1g.10gb")), replace(SHARE, mib=10**6)) == TOO_LARGE
    assert why(fleet(gpu(0)), INSTANCE) == NO_MIG_EVER
    assert why(fleet(mig_gpu(0, "2g.20gb")), INSTANCE) == NO_MIG_EVER
    assert why(fleet(replace(mig_gpu(0, "1g.10gb"), healthy=False)), SHARE) == TOO_LARGE
    assert why(fleet(cordoned(gpu(0), "cordoned")), SHARE) == WITHDRAWN
    assert why(fleet(cordoned(mig_gpu(0, "1g.10gb"), "cordoned")), SHARE) == WITHDRAWN


def test_the_reason_goes_with_the_mode_and_with_the_node() -> None:
    made = fleet(mig_gpu(0, "1g.10gb"))
    made.set_node("n1", Inventory((gpu(0),)))
    assert why(made, SHARE) == ""
    made.set_node("n1", Inventory((mig_gpu(0, "1g.10gb"),)))
    made.remove_node("n1")
    assert not made.in_mig_mode
