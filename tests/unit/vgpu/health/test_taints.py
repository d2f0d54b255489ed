"""The taint of a node with an unhealthy GPU: when it is wanted, and that no taint of others changes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import cordoned
from vgpu.api.inventory import WITHDRAWN, Gpu, GpuCondition, Inventory, Withdrawal, withdraw
from vgpu.api.names import DEFAULT
from vgpu.health.taints import is_usable, wanted_effect, with_taint

KEY = "tangram.sh/gpu-unhealthy"
EFFECTS = ["NoSchedule", "PreferNoSchedule", "NoExecute"]
TAINTS = st.lists(
    st.fixed_dictionaries({"key": st.sampled_from([KEY, "a", KEY + "2"]), "effect": st.sampled_from(EFFECTS)}),
    unique_by=lambda one: (one["key"], one["effect"]),
)


def gpu(state: str = "", cordon: str = "") -> Gpu:
    conditions = (GpuCondition("XidError", state, 1),) if state else ()
    made = Gpu("GPU-1", 0, "H100", 1024, healthy=state in ("", "degraded"), conditions=conditions)
    return cordoned(made, cordon)


@pytest.mark.parametrize(
    ("one", "present", "wanted"),
    [
        (gpu(), True, False),
        (gpu("degraded"), True, False),
        (gpu("unmonitored"), True, False),
        (gpu("unhealthy"), False, True),
        (gpu(cordon="cordoned"), True, False),
        *((gpu("unhealthy", cordon), True, False) for cordon in ("cordoned", "not-released", "released")),
        (gpu("unhealthy", "testing"), False, True),
        (gpu(cordon="testing"), True, True),
        (gpu(cordon="testing"), False, False),
        (withdraw(gpu("unhealthy"), GpuCondition(Withdrawal.NOT_SELECTED, WITHDRAWN, 1)), True, False),
        (withdraw(gpu("unhealthy"), GpuCondition(Withdrawal.CLASH, WITHDRAWN, 1)), False, True),
    ],
)
def test_only_an_unhealthy_gpu_taints_its_node_until_it_is_tried(one: Gpu, *, present: bool, wanted: bool) -> None:
    inventory = Inventory((gpu(), one))
    assert wanted_effect(inventory, "NoSchedule", present=present) == ("NoSchedule" if wanted else None)
    assert wanted_effect(inventory, None, present=present) is None


@given(TAINTS, st.sampled_from(["NoSchedule", "PreferNoSchedule", None]))
def test_ours_is_there_once_as_wanted_and_others_stay_in_their_order(taints: list[dict[str, Any]], effect: Any) -> None:
    found = with_taint(taints, KEY, effect)
    assert [one for one in found if one["key"] != KEY] == [one for one in taints if one["key"] != KEY]
    assert [one["effect"] for one in found if one["key"] == KEY] == ([effect] if effect else [])
    assert with_taint(found, KEY, effect) == found


@pytest.mark.parametrize(
    ("one", "allocatable", "usable"),
    [
        (gpu(), {DEFAULT.gpu: "1"}, True),
        (gpu("degraded"), {DEFAULT.mig("1g.10gb"): "7", "cpu": "8"}, True),
        (gpu(), {DEFAULT.gpu: "0", "cpu": "8"}, False),
        (gpu(), {"nvidia.com/gpu": "1"}, False),
        (gpu(), {}, False),
        (gpu("unhealthy"), {DEFAULT.gpu: "1"}, False),
        (gpu(cordon="cordoned"), {DEFAULT.gpu: "1"}, False),
    ],
    ids=["healthy", "degraded", "no device is left", "another plugin's", "not registered", "unhealthy", "cordoned"],
)
def test_a_node_is_usable_when_pods_get_a_gpu_and_the_kubelet_has_its_devices(
    one: Gpu, allocatable: dict[str, str | int | float], usable: bool
) -> None:
    assert is_usable(Inventory(gpus=(one,)), allocatable, DEFAULT) == usable
