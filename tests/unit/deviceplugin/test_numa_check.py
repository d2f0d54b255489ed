"""Devices of another NUMA node than the pod's GPUs: Allocate and PreStartContainer say so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deviceplugin.admission import DevicesMisaligned, DevicesSwapped, PreStart, StartingPod
from deviceplugin.device_ledger import DeviceLedger
from deviceplugin.numa_check import misaligned
from tests.builders import pod
from tests.unit.deviceplugin.builders import KnownPods, inventory, node_pod, share, uuid
from vgpu.api.errors import Refused
from vgpu.api.inventory import Inventory
from vgpu.api.mig import MigSlot
from vgpu.api.mig_device import slot_device
from vgpu.api.names import DEFAULT

MEM = DEFAULT.gpu_mem
OTHER_NODE = "aligned the container to NUMA node 1, and what it was assigned is of NUMA node 0"


def on_numa_nodes(*nodes: int, access: str = "cdi") -> Inventory:
    made = inventory(len(nodes), access=access)
    return replace(made, gpus=tuple(replace(gpu, numa=node) for gpu, node in zip(made.gpus, nodes, strict=True)))


@pytest.mark.parametrize(
    ("nodes", "given", "assigned", "said"),
    [
        ((0, 1), [1], [0], True),
        ((0, 0), [1], [0], False),
        ((0, -1), [1], [0], False),
        ((0, 1), [0], [0], False),
        ((0, 1), [0, 1], [0], True),
        ((0, 1), [7], [0], False),
    ],
)
def test_numa_nodes_are_the_reason_only_where_they_are_known_and_differ(
    nodes: tuple[int, ...], given: list[int], assigned: list[int], said: bool
) -> None:
    found = misaligned(on_numa_nodes(*nodes), map(uuid, given), map(uuid, assigned))
    assert bool(found) is said


def test_slots_on_demand_name_no_numa_node() -> None:
    slots = [slot_device(uuid(at), MigSlot(0, "1g.10gb")) for at in range(2)]
    known = on_numa_nodes(0, 1)
    assert misaligned(known, [uuid(1)], [uuid(0)])
    for given, assigned in ((slots[1:], slots[:1]), (slots[1:], [uuid(0)]), ([uuid(1)], slots[:1])):
        assert misaligned(known, given, assigned) == ""


def ledger(access: str, *, names_numa: bool) -> DeviceLedger:
    pods, has = KnownPods(), on_numa_nodes(0, 1, access=access)
    pods.show(node_pod("a", 0, share("main", 2), on=[0]))
    return DeviceLedger(pods, lambda: has, DEFAULT, names_numa=lambda: names_numa, pod_wait_s=0.0)


@pytest.mark.parametrize("access", ["cdi", "nvidia"])
async def test_allocate_refuses_devices_of_another_numa_node(access: str) -> None:
    """With NVIDIA's runtime the container would have its GPU, and CPUs of another NUMA node."""
    with pytest.raises(Refused, match=OTHER_NODE):
        await ledger(access, names_numa=True).allocate(MEM, [f"{uuid(1)}-{slot}" for slot in range(2)])


async def test_where_no_device_names_its_numa_node_none_is_the_reason() -> None:
    ids = [f"{uuid(1)}-{slot}" for slot in range(2)]
    assert (await ledger("nvidia", names_numa=False).allocate(MEM, ids)).swapped
    with pytest.raises(Refused) as refused:
        await ledger("cdi", names_numa=False).allocate(MEM, ids)
    assert "NUMA" not in str(refused.value)


@pytest.mark.parametrize("named", [True, False])
def test_a_container_with_devices_of_another_numa_node_does_not_start_and_its_pod_is_replaced(named: bool) -> None:
    nothing: Any = None
    start = PreStart(
        DEFAULT, 1024, pods=nothing, records=nothing, ledger=nothing, grants=nothing, usage_records=nothing,
        bursts=nothing, inventory=lambda: on_numa_nodes(0, 1), fetch=nothing, names_numa=lambda: named,
    )  # fmt: skip
    starting = StartingPod(pod("a").build(), node_pod("a", 0, share("main", 2), on=[0]), ("main",))
    start._verify_devices(starting, "main", [uuid(0)])
    with pytest.raises(DevicesSwapped) as refused:
        start._verify_devices(starting, "main", [uuid(1)])
    assert isinstance(refused.value, DevicesMisaligned) is named
    assert (OTHER_NODE in str(refused.value)) is named
    assert refused.value.pod is starting.pod
