"""Which pods a drain of one GPU evicts, and what it says at the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tangramctl import drain
from tangramctl.cordon import NodeGpus
from tangramctl.drain import Drain, holders
from tests.builders import cordoned, gpu, mig_gpu, pod, share
from vgpu.api.cordon import Cordon
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import WITHDRAWN, GpuCondition, Inventory, Withdrawal, withdraw
from vgpu.api.mig import MigSlot
from vgpu.api.mig_device import slot_device
from vgpu.api.names import DEFAULT

CUT = mig_gpu(1, "1g.10gb")
SLOT = AssignedGpu(slot_device(gpu(0).uuid, MigSlot(0, "1g.10gb")), 0, 9728, 0, "mig", "1g.10gb")
ON_DEMAND = replace(gpu(0), mig=True, on_demand=True)


@pytest.mark.parametrize(
    ("inventory", "part", "of"),
    [
        (Inventory((gpu(0), CUT)), share(gpu(0), 1024), 0),
        (Inventory((gpu(0), CUT)), AssignedGpu(CUT.instances[0].uuid, 1, 9728, 0, "mig", "1g.10gb"), 1),
        (Inventory((ON_DEMAND, CUT)), SLOT, 0),
        (Inventory((CUT,)), SLOT, 0),
        (Inventory(()), share(gpu(1), 1024), 1),
    ],
)
def test_a_pod_has_the_gpu_that_its_share_instance_or_slot_lies_on(
    inventory: Inventory, part: AssignedGpu, of: int
) -> None:
    thing = pod("a").asking(mib=1024).on("n1").assigned(part).plain()
    for index in range(2):
        found = holders([thing], gpu(index).uuid, inventory, DEFAULT)
        assert [one.key for one in found] == (["default/a"] if index == of else [])


@pytest.mark.parametrize(
    ("conditions", "more"),
    [
        ((), ""),
        (
            (GpuCondition(Withdrawal.CLASH, WITHDRAWN, 1, "it is also offered or in use as nvidia.com/gpu"),),
            ". Pods of other plugins are not evicted: GpuClash: it is also offered or in use as nvidia.com/gpu",
        ),
        (
            (GpuCondition(Withdrawal.NOT_SELECTED, WITHDRAWN, 1), GpuCondition("XidError", "degraded", 1)),
            ". Pods of other plugins are not evicted: NotSelected",
        ),
    ],
)
def test_a_released_gpu_is_called_free_of_pods_and_processes_of_tangram_alone(
    monkeypatch: pytest.MonkeyPatch, conditions: tuple[GpuCondition, ...], more: str
) -> None:
    out = withdraw(cordoned(gpu(0), "released"), *conditions)
    found = NodeGpus("n1", "1", Inventory((out,)), {out.uuid: Cordon()})
    monkeypatch.setattr(drain, "read", lambda *_: found)
    monkeypatch.setattr(drain, "kubectl", lambda *_: {"items": []})
    said: list[str] = []
    Drain("n1", out.uuid, DEFAULT, 1.0, say=said.append).run()
    name = f"GPU 0 of node n1 ({out.uuid})"
    assert said == [f"{name} is released: no pod of Tangram has it, and no process of Tangram has it open{more}"]
