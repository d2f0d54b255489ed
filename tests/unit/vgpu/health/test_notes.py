"""Sentences about what changed, and which pods follow from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.inventory import WITHDRAWN, Gpu, GpuCondition, Inventory, MigInstance, Withdrawal, withdraw
from vgpu.health.notes import changes
from vgpu.health.pod_policy import PodPolicy, UnfitGpu, affected, due, policy_from_text, unfit_gpus

ONE = Gpu("GPU-1", 0, "NVIDIA H200", 143_771, pci="00000000:17:00.0")
TWO = Gpu("GPU-2", 1, "NVIDIA H200", 143_771, pci="00000000:29:00.0")
HOT = GpuCondition("ThermalSlowdown", "degraded", 50, "too hot")
LOST = GpuCondition("OffTheBus", "unhealthy", 60, "the driver reported XID 79")


def noted(before: Inventory | None, *gpus: Gpu) -> list[tuple[str, str]]:
    return [(note.uuid, note.reason) for note in changes(before, Inventory(gpus))]


def test_at_the_start_only_what_is_wrong_is_noted() -> None:
    assert noted(None, ONE, replace(TWO, conditions=(HOT,))) == [("GPU-2", "GpuDegraded")]


def test_each_change_is_noted_once() -> None:
    before = Inventory((ONE, TWO))
    assert noted(before, ONE, TWO) == []
    assert noted(before, ONE) == [("GPU-2", "GpuRemoved")]
    assert noted(Inventory((ONE,)), ONE, TWO) == [("GPU-2", "GpuAdded")]
    assert noted(before, ONE, replace(TWO, pci="00000000:81:00.0")) == [("GPU-2", "GpuMoved")]
    assert noted(before, replace(ONE, index=1), replace(TWO, index=0)) == []
    ill = replace(ONE, healthy=False, conditions=(LOST, HOT))
    assert noted(before, ill, TWO) == [("GPU-1", "GpuUnhealthy")]
    assert noted(Inventory((replace(ill, conditions=(LOST,)),)), ill) == [("GPU-1", "GpuUnhealthy")]
    assert noted(Inventory((ill,)), replace(ONE, conditions=(HOT,))) == [("GPU-1", "GpuDegraded")]
    assert noted(Inventory((ill,)), ONE) == [("GPU-1", "GpuHealthy")]
    assert noted(before, replace(ONE, healthy=False), TWO) == [("GPU-1", "GpuUnhealthy")]


def test_a_gpu_whose_mig_layout_changes_is_no_trouble_also_while_it_is_closed() -> None:
    one = ONE
    out = withdraw(one, GpuCondition(Withdrawal.MIG_CONFIG, WITHDRAWN, 0, "its MIG layout is to change"))
    (note,) = changes(Inventory((one,)), Inventory((out,)))
    assert (note.reason, note.level) == ("GpuWithdrawn", "Normal")
    closed = replace(out, healthy=False)
    assert list(changes(Inventory((out,)), Inventory((closed,)))) == []
    assert list(changes(Inventory((closed,)), Inventory((out,)))) == []
    assert [note.reason for note in changes(Inventory((out,)), Inventory((one,)))] == ["GpuOffered"]
    broken = replace(out, healthy=False, conditions=(*out.conditions, GpuCondition("XidError", "unhealthy", 1)))
    assert [note.reason for note in changes(Inventory((out,)), Inventory((broken,)))] == ["GpuUnhealthy"]


def test_a_gpu_that_is_given_whole_only_is_noted_once_with_the_reason() -> None:
    numa = replace(ONE, coherent="numa")
    (note,) = changes(None, Inventory((numa,)))
    assert (note.reason, note.level) == ("GpuWholeOnly", "Warning")
    assert note.text == (
        "GPU 0 (GPU-1, NVIDIA H200, 00000000:17:00.0) is given whole only, and not shared: its memory is a NUMA node of the kernel, "
        "so no memory limit is enforced on it. In the driver's CDMM mode it is shared"
    )
    assert noted(Inventory((numa,)), numa) == []
    assert noted(Inventory((numa,)), replace(ONE, coherent="unified")) == [("GPU-1", "GpuWholeOnly")]
    assert noted(None, replace(ONE, coherent="driver")) == []


def test_a_note_names_the_gpu_and_the_reason() -> None:
    (note,) = changes(None, Inventory((replace(ONE, healthy=False, conditions=(LOST,)),)))
    assert note.text == (
        "GPU 0 (GPU-1, NVIDIA H200, 00000000:17:00.0) is unhealthy: OffTheBus: the driver reported XID 79"
    )


@pytest.mark.parametrize(
    ("text", "after_s"),
    [("leave", None), ("evict", 0), ("evict-after: 5m", 300), ("evict-after:90s", 90), ("evict-after: 2h", 7200)],
)
def test_a_policy_reads_as_it_is_written(text: str, after_s: int | None) -> None:
    assert policy_from_text(text) == PodPolicy(after_s)


@pytest.mark.parametrize(
    "text", ["", "Evict", "evict-after", "evict-after: 5", "evict-after: 0m", "evict-after: -5m", "evict-after: 5m "]
)
def test_any_other_policy_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be leave, evict or evict-after: N"):
        policy_from_text(text)


def test_pods_of_degraded_and_unmonitored_gpus_are_left_and_those_of_unhealthy_and_vanished_ones_are_not() -> None:
    instance = MigInstance("MIG-1", "1g.18gb", 16_384, 1, 0)
    away = GpuCondition("NvmlAway", "unmonitored", 10, "no child")
    inventory = Inventory(
        (
            replace(ONE, healthy=False, conditions=(LOST,), mig=True, instances=(instance,)),
            replace(TWO, conditions=(away, HOT)),
        )
    )
    unfit = unfit_gpus(inventory, {"GPU-9": 40})
    assert {uuid: gpu.since_s for uuid, gpu in unfit.items()} == {"GPU-9": 40, "GPU-1": 60, "MIG-1": 60}
    pods = affected(unfit, [("a", ["GPU-2"]), ("b", ["MIG-1"]), ("c", ["GPU-1", "GPU-9"]), ("d", [])])
    assert {uid: gpu.since_s for uid, gpu in pods.items()} == {"b": 60, "c": 40}
    assert due(PodPolicy(), pods, 10_000) == {}
    assert list(due(PodPolicy(300), pods, 340)) == ["c"]


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1000)), st.integers(0, 1000), st.integers(0, 2000))
def test_a_pod_is_evicted_when_its_gpu_was_unfit_for_long_enough_and_stays_due(
    since: dict[str, int], after_s: int, now_s: int
) -> None:
    pods = {uid: UnfitGpu(at_s, "why") for uid, at_s in since.items()}
    now = due(PodPolicy(after_s), pods, now_s)
    assert now.keys() == {uid for uid, at_s in since.items() if at_s + after_s <= now_s}
    assert now.keys() <= due(PodPolicy(after_s), pods, now_s + 1).keys()
