"""What becomes of a cordoned GPU, over every combination of what is known of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest

from tests.builders import cordoned
from vgpu.api.cordon import Cordon
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import CORDON_STATES, WITHDRAWN, Gpu, GpuCondition, Inventory, MigInstance, Withdrawal, withdraw
from vgpu.health.cordons import Opened, held_gpus, plan, recovered
from vgpu.health.notes import changes

GPU = Gpu("GPU-1", 0, "NVIDIA H200", 143_771, pci="00000000:17:00.0")
LOST = GpuCondition("OffTheBus", "unhealthy", 60, "the driver reported XID 79")
OPENED = {"open": Opened(), "closed": Opened(closed=frozenset({"GPU-1"})), "stuck": Opened(stuck=frozenset({"GPU-1"}))}
CASES = list(product(("", *CORDON_STATES), (False, True), (False, True), OPENED, (False, True)))


@pytest.mark.parametrize(("before", "ordered", "held", "opened", "known"), CASES)
def test_a_gpu_is_released_only_if_it_is_ordered_and_nobody_has_it(
    before: str, *, ordered: bool, held: bool, opened: str, known: bool
) -> None:
    cordons = {"GPU-1": Cordon("fan", 1)} if ordered else {}
    users = {"GPU-1"} if held else set()
    found = plan(Inventory((cordoned(GPU, before),)), cordons, users, OPENED[opened], known=known)
    free = known and not held
    expected = {"open": "cordoned", "closed": "released", "stuck": "not-released"}[opened] if free else "cordoned"
    if not ordered:
        expected = "testing" if before else ""
    assert found.states.get("GPU-1", "") == expected
    assert found.withheld == (frozenset({"GPU-1"}) if ordered and free else frozenset())


@pytest.mark.parametrize("before", CORDON_STATES)
def test_a_gpu_that_is_not_selected_is_not_tried(before: str) -> None:
    left = withdraw(cordoned(GPU, before), GpuCondition(Withdrawal.NOT_SELECTED, WITHDRAWN, 1))
    assert not plan(Inventory((left,)), {}, (), Opened(), known=True).states
    ordered = plan(Inventory((left,)), {"GPU-1": Cordon()}, (), Opened(), known=True)
    assert ordered.states == {"GPU-1": "cordoned"}, "it can be cordoned all the same"


def test_a_gpu_that_is_away_is_withdrawn_when_it_comes_back() -> None:
    found = plan(
        Inventory((GPU,)), {"GPU-2": Cordon()}, (), Opened(), known=True, withdrawn=("GPU-1", "GPU-2", "GPU-3")
    )
    assert (found.states, found.withheld) == ({"GPU-2": "cordoned", "GPU-3": "testing"}, frozenset())


def test_who_has_an_instance_has_its_gpu() -> None:
    cut = replace(GPU, mig=True, instances=(MigInstance("MIG-1", "1g.18gb", 16_384, 1, 0),))
    parts = [AssignedGpu("MIG-1", 0, 16_384, kind="mig"), AssignedGpu("GPU-elsewhere", 1, 1024)]
    assert held_gpus(Inventory((cut,)), parts) == {"GPU-1"}


@pytest.mark.parametrize(
    ("before", "after", "again"),
    [
        ((LOST,), (), True),
        ((LOST,), (LOST,), False),
        ((), (), False),
        ((replace(LOST, state="degraded"),), (), False),
        ((replace(LOST, state="unmonitored"),), (), False),
    ],
)
def test_only_a_gpu_that_was_unhealthy_has_recovered(
    before: tuple[GpuCondition, ...], after: tuple[GpuCondition, ...], *, again: bool
) -> None:
    was, now = (
        Inventory((replace(GPU, conditions=those, healthy=all(one.state == "degraded" for one in those)),))
        for those in (before, after)
    )
    assert recovered(was, now) == ({"GPU-1"} if again else frozenset())


def test_a_gpu_that_leaves_unhealthy_is_tried_when_it_is_back() -> None:
    ill = replace(GPU, conditions=(LOST,), healthy=False)
    assert recovered(Inventory((ill,)), Inventory(())) == {"GPU-1"}
    assert recovered(Inventory((GPU,)), Inventory(())) == frozenset()


def reasons(*steps: Gpu) -> list[str]:
    inventories = [Inventory((one,)) for one in steps]
    return [note.reason for before, after in pairwise(inventories) for note in changes(before, after)]


def test_a_gpu_that_is_cordoned_released_tried_and_back_is_never_called_unhealthy() -> None:
    closed = replace(GPU, healthy=False)
    steps = [
        GPU, cordoned(GPU, "cordoned"), cordoned(closed, "cordoned"), cordoned(closed, "released"),
        cordoned(closed, "testing"), cordoned(GPU, "testing"), GPU,
    ]  # fmt: skip
    assert reasons(*steps) == ["GpuCordoned", "GpuReleased", "GpuSelfTest", "GpuUncordoned"]
    assert {one.state for one in steps} == {"healthy", "unmonitored"}


def test_a_gpu_that_recovers_is_called_healthy_and_tried_and_one_that_fails_its_test_unhealthy() -> None:
    ill, tried = replace(GPU, healthy=False, conditions=(LOST,)), cordoned(GPU, "testing")
    failed = replace(ill, conditions=(GpuCondition("SelfTestFailed", "unhealthy", 70, "the self-test failed"),))
    assert reasons(GPU, ill, tried, GPU) == ["GpuUnhealthy", "GpuSelfTest", "GpuHealthy", "GpuUncordoned"]
    assert reasons(tried, cordoned(failed, "testing"), failed) == ["GpuUnhealthy"], "it may not be used again"
    assert reasons(tried, failed) == ["GpuUnhealthy"]


def test_a_gpu_that_cannot_be_released_is_a_warning() -> None:
    before, after = (Inventory((cordoned(GPU, state),)) for state in ("cordoned", "not-released"))
    (note,) = changes(before, after)
    assert (note.reason, note.level) == ("GpuNotReleased", "Warning")
    assert "does not show the PCI addresses" in note.text
