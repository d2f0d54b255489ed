"""Device IDs that stay Healthy: what the ledger knows, and what the kubelet listed of pods that may still be there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from deviceplugin.device_ledger import DeviceLedger
from deviceplugin.devices_in_use import DevicesInUse
from deviceplugin.pod_resources import ContainerDevices, PodResources
from deviceplugin.pods.node_pods import NodePods
from kube.objects import Pod
from tests.builders import pod
from tests.unit.deviceplugin.builders import inventory, uuid
from vgpu.api.grant import AssignedGpu
from vgpu.api.names import DEFAULT

MEM = DEFAULT.gpu_mem


def bound(name: str, phase: str = "Running") -> Pod:
    assigned = AssignedGpu(uuid(0), 0, 2048)
    thing: dict[str, Any] = pod(name).asking(mib=2048).on("n1").assigned(assigned).plain()
    thing["status"] = {"phase": phase}
    return msgspec.convert(thing, Pod)


def unreadable(name: str) -> Pod:
    thing = pod(name).asking(mib=2048).on("n1").annotated().plain()
    thing["metadata"]["annotations"][DEFAULT.assignment] = "no assignment"
    return msgspec.convert(thing, Pod)


@pytest.mark.parametrize(
    ("shown", "synced", "used"),
    [
        ([], False, True),
        ([], True, False),
        ([bound("a")], True, True),
        ([bound("b")], True, False),
        ([bound("a", "Succeeded")], True, False),
        ([unreadable("a")], True, True),
    ],
    ids=["pods not listed", "pod gone", "pod there", "another pod", "pod ended", "assignment unreadable"],
)
def test_what_the_kubelet_listed_counts_while_its_pod_may_be_there(
    tmp_path: Path, shown: list[Pod], *, synced: bool, used: bool
) -> None:
    pods, records = NodePods(DEFAULT, 1024), PodResources(tmp_path / "none")
    pods.attach(pods.changed, lambda: synced)
    for one in shown:
        pods.on_change(None, one)
    records.last = (ContainerDevices("default", "a", "main", MEM, frozenset({f"{uuid(0)}-1"})),)
    in_use = DevicesInUse(DeviceLedger(pods, lambda: inventory(1), DEFAULT), records, pods)
    assert in_use(MEM) == ({f"{uuid(0)}-1"} if used else set())
    assert in_use(DEFAULT.gpu_core) == set()


def test_what_the_ledger_knows_needs_no_list_of_the_kubelet(tmp_path: Path) -> None:
    pods = NodePods(DEFAULT, 1024)
    pods.attach(pods.changed, lambda: True)
    one = bound("a")
    pods.on_change(None, one)
    ledger = DeviceLedger(pods, lambda: inventory(1), DEFAULT)
    ledger.restore(one.uid, "main", MEM, [f"{uuid(0)}-3"])
    assert DevicesInUse(ledger, PodResources(tmp_path / "none"), pods)(MEM) == {f"{uuid(0)}-3"}
